"""Kept verdict files: what each says, and whether it still speaks about the tree."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reports.records import Identity, Run, identity, read
from reports.staleness import Tree, stale_verdicts
from reports.summary import summarise

_NAMED: Final = 12
"""Of what lacks a verdict, so many are named."""


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


@dataclass(frozen=True)
class Coverage:
    """Of the claims that speak of a device, in each of their dtypes, those that no kept run attacked there as they are now."""

    device: str
    targets: int
    lacking: tuple[str, ...]

    def __str__(self) -> str:
        """`cuda: 348 of 350 claims and dtypes have a current verdict; none: A in bfloat16, B in float32`."""
        text = f"{self.device}: {self.targets - len(self.lacking)} of {self.targets} claims and dtypes have a current verdict"
        more = len(self.lacking) - _NAMED
        named = ", ".join(self.lacking[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{text}; none: {named}" if self.lacking else text


def coverage(evidence: Sequence[Evidence], tree: Tree) -> list[Coverage]:
    """For each device that kept runs were made on."""
    devices = sorted({_kind(entry.run.header["device"]) for entry in evidence})
    return [_covered(device, evidence, tree) for device in devices]


def _covered(device: str, evidence: Sequence[Evidence], tree: Tree) -> Coverage:
    speaking = {name: domain for name, domain in tree.domains.items() if not domain.device or device in domain.device}
    targets = {(*name, dtype) for name, domain in speaking.items() for dtype in domain.dtype}
    lacking = targets.difference(*(_attacked(entry, device) for entry in evidence))
    return Coverage(device, len(targets), tuple(f"{claim} in {dtype}" for _, claim, dtype in sorted(lacking)))


def _attacked(entry: Evidence, device: str) -> set[tuple[str, str, str | None]]:
    """Contract, claim and dtype of the verdicts that still speak of them."""
    there = (verdict for verdict in entry.run.verdicts if _kind(verdict["device"] or entry.run.header["device"]) == device)
    current = (verdict for verdict in there if verdict["state"] != "NOT_RUN" and identity(verdict) not in entry.stale)
    return {(verdict["contract"], verdict["claim"], verdict["dtype"]) for verdict in current}


def _kind(device: str) -> str:
    return device.partition(":")[0]


def listing(evidence: Sequence[Evidence]) -> str:
    """A table in plain text, one line a file."""
    rows = [("file", "device", "date", "result", "staleness"), *(entry.row() for entry in evidence)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
