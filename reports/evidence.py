"""Kept verdict files: their results, whether they still speak about the checkout, and which claims no current verdict holds."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blackswan.contracts.tables import ACCELERATORS, DTYPES
from blackswan.reports.records import Identity, Run, Verdict, identity, read
from blackswan.reports.staleness import Tree, stale_verdicts
from blackswan.reports.summary import summarise

_NAMED: Final = 12
"""How many claims without a current verdict are named."""
Target = tuple[str, str, str | None]
"""Contract, claim and dtype."""
SHIPPED: Final = {"model": "falsifiers/data/checkpoint", "corpus": "falsifiers/data/corpus/heldout.jsonl"}
"""The model and the corpus that a run reads by default."""
SUBJECT: Final = "impl"
CUDA_ONLY: Final = frozenset(name for name, dtype in DTYPES.items() if dtype.cuda_only)
"""The dtypes that no other device computes in."""


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
    """How many claims and dtypes there are on a kind of device, and which of them no kept run has held there as they are now.

    Those that a kept run has a verdict of count as well: a claim that was taken out of its contract, or went with it, is missed.
    """

    device: str
    targets: int
    lacking: tuple[str, ...]

    def __str__(self) -> str:
        """`cuda: 348 of 350 claims and dtypes are held by a current verdict; not: A in bfloat16, B in float32`."""
        text = f"{self.device}: {self.targets - len(self.lacking)} of {self.targets} claims and dtypes are held by a current verdict"
        more = len(self.lacking) - _NAMED
        named = ", ".join(self.lacking[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{text}; not: {named}" if self.lacking else text


@dataclass(frozen=True)
class Seen:
    """A kind of device, and the kept runs that asked claims on it: machine, date, results and whether they are STALE, as text."""

    device: str
    runs: tuple[str, ...]

    def __str__(self) -> str:
        """`cuda: seen on NVIDIA H200, 2026-11-23, 350 held of 350 (h200-cuda.jsonl, current)`, or that it was never seen."""
        if self.runs:
            return f"{self.device}: seen on {'; '.join(self.runs)}"
        if self.device == "cpu":
            return "cpu: no run is kept, for every machine can make one: pytest falsifiers"
        return f"{self.device}: never seen; no claim was ever asked on such hardware by a kept run"


def seen(evidence: Sequence[Evidence]) -> list[Seen]:
    """Every kind of device that has a name, and those of the kept runs, with the runs in which the implementation was asked there."""
    own = [entry for entry in evidence if entry.run.header["subject"] == SUBJECT]
    found: dict[str, list[str]] = {device: [] for device in ("cpu", *ACCELERATORS)}
    for entry in own:
        device = _device(entry.run)
        if states := Counter(str(verdict["state"]) for verdict in _on(device, entry) if verdict["state"] != "NOT_RUN"):
            found.setdefault(device, []).append(_told(entry, states))
    return [Seen(device, tuple(runs)) for device, runs in found.items()]


def _told(entry: Evidence, states: Counter[str]) -> str:
    header, total = entry.run.header, sum(states.values())
    machine = header["device_name"] or header["machine"].get("processor") or "a machine without a name"
    counts = ", ".join(f"{count} {state.lower()}" for state, count in states.most_common())
    return f"{machine}, {header['started'][:10]}, {counts} of {total} ({entry.run.path.name}, {'STALE' if entry.stale else 'current'})"


def coverage(evidence: Sequence[Evidence], tree: Tree) -> list[Coverage]:
    """The coverage of each kind of device that kept runs were made on."""
    devices = sorted({_device(entry.run) for entry in evidence})
    own = [entry for entry in evidence if entry.run.header["subject"] == SUBJECT]
    return [_covered(device, own, tree) for device in devices]


def _covered(device: str, evidence: Sequence[Evidence], tree: Tree) -> Coverage:
    kind = "cuda" if device == "hip" else device
    asked = {name: domain for name, domain in tree.domains.items() if name not in tree.on_request}
    speaking = {name: domain for name, domain in asked.items() if not domain.device or kind in domain.device}
    pairs = ((name, dtype) for name, domain in speaking.items() for dtype in domain.dtype)
    targets: set[Target] = {(*name, dtype) for name, dtype in pairs if kind == "cuda" or dtype not in CUDA_ONLY}
    targets |= {_target(verdict) for entry in evidence for verdict in _on(device, entry) if verdict["state"] != "NOT_RUN"}
    held = set().union(*(_held(entry, device) for entry in evidence if _counts(entry.run)))
    failed = set().union(*(_failed(entry, device) for entry in evidence))
    lacking = targets - (held - failed)
    gone = {target: "" if target[:2] in tree.domains else f" (gone from {target[0]})" for target in lacking}
    return Coverage(device, len(targets), tuple(f"{target[1]} in {target[2]}{gone[target]}" for target in sorted(lacking)))


def _counts(run: Run) -> bool:
    """Whether a run attacked with more than a stored case or a quick look, and nothing but its verdicts failed.

    A run that was interrupted counts: each of its verdicts stands by itself.
    """
    return "replay" not in run.header and run.header["effort"] != "quick" and summarise(run).result != "FAILED"


def _held(entry: Evidence, device: str) -> set[Target]:
    """The claims that a run on the shipped model and corpus has held."""
    header = dict(entry.run.header)
    if any(isinstance(given := header.get(name), dict) and given["path"] != path for name, path in SHIPPED.items()):
        return set()
    return {_target(verdict) for verdict in _current(entry, device) if verdict["state"] == "HELD"}


def _failed(entry: Evidence, device: str) -> set[Target]:
    """The claims that a run of the implementation failed, however short it was: a run that held them beside it was lucky."""
    return {_target(verdict) for verdict in _current(entry, device) if verdict["state"] not in ("HELD", "NOT_RUN")}


def _current(entry: Evidence, device: str) -> Iterator[Verdict]:
    """The verdicts on a kind of device that still speak about the checkout."""
    return (verdict for verdict in _on(device, entry) if identity(verdict) not in entry.stale)


def _on(device: str, entry: Evidence) -> Iterator[Verdict]:
    """The verdicts on a kind of device."""
    return (verdict for verdict in entry.run.verdicts if _device(entry.run, verdict["device"]) == device)


def _target(verdict: Verdict) -> Target:
    return verdict["contract"], verdict["claim"], verdict["dtype"]


def _device(run: Run, device: str | None = None) -> str:
    """The kind of a device, by default the run's own. ROCm's are `cuda` to torch, and another kind here: the hardware is."""
    kind = (device or str(run.header["device"])).partition(":")[0]
    return "hip" if kind == "cuda" and run.header["versions"].get("hip") else kind


def listing(evidence: Sequence[Evidence]) -> str:
    """A table in plain text, one line a file."""
    rows = [("file", "device", "date", "result", "staleness"), *(entry.row() for entry in evidence)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
