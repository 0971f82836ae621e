"""Kept verdict files: what each says, and whether it still speaks about the tree."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reports.records import Identity, Run, read
from reports.staleness import Tree, stale_verdicts
from reports.summary import summarise


@dataclass(frozen=True)
class Evidence:
    """One kept run, and why each of its stale verdicts is stale."""

    run: Run
    stale: Mapping[Identity, str]

    def row(self) -> tuple[str, ...]:
        """File, device, date, result with totals, and staleness, as text."""
        header = self.run.header
        device = header["device"] + (f" ({header['device_name']})" if header["device_name"] else "")
        return (self.run.path.name, device, header["started"][:10], summarise(self.run).headline, self._staleness())

    def _staleness(self) -> str:
        if not self.stale:
            return "current"
        reasons = "; ".join(f"{count} × {reason}" for reason, count in Counter(self.stale.values()).most_common())
        return f"STALE, {len(self.stale)} of {len(self.run.verdicts)} verdicts: {reasons}"


def collect(folder: Path, tree: Tree) -> list[Evidence]:
    """The verdict files of a folder, by name.

    Raises:
        RecordError: a file cannot be read.
    """
    runs = [read(path) for path in sorted(folder.glob("*.jsonl"))]
    return [Evidence(run, stale_verdicts(run, tree)) for run in runs]


def listing(evidence: Sequence[Evidence]) -> str:
    """A table in plain text, one line a file."""
    rows = [("file", "device", "date", "result", "staleness"), *(entry.row() for entry in evidence)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
