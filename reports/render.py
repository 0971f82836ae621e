"""A run's pages: Markdown, JSON and HTML, named like the verdict file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from reports import markdown, page, staleness
from reports.records import read
from reports.summary import Summary, document, summarise
from reports.writing import write_all

FORMATS: Final = ("md", "json", "html")


def write_pages(file: Path, output: Path, formats: Sequence[str] = FORMATS, against_tree: bool = False) -> tuple[str, list[Path]]:
    """Writes all pages or none; returns the headline and the paths. Raises a RecordError for a file that is no verdict file."""
    run = read(file)
    stale = staleness.stale_verdicts(run, staleness.current_tree(staleness.ROOT)) if against_tree else None
    summary = summarise(run, stale)
    pages = {output / f"{file.stem}.{name}": _page(name, summary) for name in formats}
    write_all(pages)
    return summary.headline, list(pages)


def _page(name: str, summary: Summary) -> str:
    if name == "md":
        return markdown.render(summary)
    if name == "html":
        return page.render(summary)
    return json.dumps(document(summary), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
