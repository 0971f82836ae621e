"""A run's pages: Markdown, JSON and HTML, named like the verdict file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from blackswan.reports import markdown, page, staleness
from blackswan.reports.records import read
from blackswan.reports.summary import Summary, document, summarise
from blackswan.reports.writing import write_all

FORMATS: Final = ("md", "json", "html")


_STARTS: Final = {
    "md": b"# Blackswan: ",
    "json": b'{\n "result": "',
    "html": b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
}
_TITLES: Final = {"md": b"# Blackswan: ", "json": b'\n "headline": "', "html": b"<title>Blackswan: "}


def is_page(path: Path, name: str) -> bool:
    """Whether a file is a run's page of this format, or empty. No command replaces any other file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(4096)
    return not beginning or (beginning.startswith(_STARTS[name]) and _TITLES[name] in beginning)


def write_pages(file: Path, output: Path, formats: Sequence[str] = FORMATS, against_tree: bool = False) -> tuple[str, list[Path]]:
    """Writes all pages or none; returns the headline and the paths.

    Raises:
        RecordError: the file is no verdict file.
        ValueError: a page would be written over the file, or over one that is no page.
    """
    run = read(file)
    paths = {name: output / f"{file.stem}.{name}" for name in formats}
    for name, path in paths.items():
        if path.name == file.name and output.resolve() == file.parent.resolve():
            raise ValueError(
                f"{file}: is where a page would be written; expected another folder to write to, or a verdict file named *.jsonl"
            )
        if path.exists() and not is_page(path, name):
            raise ValueError(f"{path}: is no page of a report, and would be replaced by one; expected another folder to write to")
    stale = staleness.stale_verdicts(run, staleness.current_tree(staleness.ROOT)) if against_tree else None
    summary = summarise(run, stale)
    pages = {path: _page(name, summary) for name, path in paths.items()}
    write_all(pages)
    return summary.headline, list(pages)


def _page(name: str, summary: Summary) -> str:
    if name == "md":
        return markdown.render(summary)
    if name == "html":
        return page.render(summary)
    return json.dumps(document(summary), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
