"""One patch of a round: the falsifiers on a copy of the checkout that has it, and what they said."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.attackers import places
from benchmarks.command import CannotRun
from blackswan.falsifiers.diagnosis import run_failures
from blackswan.falsifiers.numeric import comparison

CHECKOUT = Path(__file__).resolve().parents[2]
FOUND, MISSED, NOT_RUN, BROKEN = "FOUND", "MISSED", "NOT RUN", "BROKEN"
FIELDS, FEW, MOST_SECONDS = ("Title", "Where", "Wrong", "Device"), 5, 3600
Record = dict[str, Any]


@dataclass(frozen=True)
class Bug:
    """A patch: what is wrong with it, in which file and function, what a user gets, and the kind of device that it shows on."""

    path: Path
    title: str
    where: str
    wrong: str
    device: str

    @classmethod
    def read(cls, path: Path) -> "Bug":
        """Raises a CannotRun for a patch whose header is not whole."""
        header = path.read_text(encoding="utf-8").partition("\ndiff --git ")[0]
        found = dict(re.findall(r"^(\w+): (.+)$", header, re.MULTILINE))
        if not found.keys() >= set(FIELDS) or found["Device"] not in ("cpu", "cuda"):
            raise CannotRun(f"{path}: expected lines {', '.join(FIELDS)} before the diff, the device cpu or cuda")
        return cls(path, *(found[name] for name in FIELDS))

    @property
    def honest(self) -> Path | None:
        """The same change without its mistake, the patch of that name in the folder `honest`; None where there is none."""
        path = self.path.parent / "honest" / self.path.name
        return path if path.is_file() else None

    def outcome(self, outcome: str, **more: Any) -> Record:
        """What results.json says of the patch."""
        return {"outcome": outcome, "title": self.title, "where": self.where, "commit": commit(), **more}


def commit() -> str:
    """The checkout's commit."""
    return executed(["git", "rev-parse", "--short=12", "HEAD"], CHECKOUT).stdout.decode().strip()


def false_claims(options: Sequence[str], device: str, patch: Path | None = None) -> list[str]:
    """The claims that are false without a patch, or with an honest one: they find nothing. Raises a RuntimeError where the run does not
    come to its end."""
    records, reason = _asked(patch, options, device)
    if reason.startswith("no end"):
        raise RuntimeError(f"the checkout with {patch}: {reason}" if patch else f"the checkout without a patch: {reason}")
    return sorted(set(map(_name, records)))


def attack(bug: Bug, options: Sequence[str], before: Sequence[str]) -> Record:
    """What the falsifiers say of the checkout with the bug; `before` are the claims that are false without it."""
    start = time.perf_counter()
    records, reason = _asked(bug.path, options, bug.device)
    false, taken = [record for record in records if _name(record) not in before], {"seconds": round(time.perf_counter() - start, 1)}
    if not false:
        return bug.outcome(BROKEN if reason.startswith("no end") else MISSED, reason=reason, **taken)
    names, culprit = list(dict.fromkeys(map(_name, false))), false[0]["culprit"] or {}
    blamed = " at ".join(str(culprit[key]) for key in ("operation", "path") if culprit.get(key))
    changed = culprit.pop("changed", ())  # so that `said` is about the ranking alone
    said, listed = _said([false[0][key] for key in ("operation", "culprit", "reason")], bug.where), _said(changed, bug.where)
    shown = false[0]["counterexample"] or {}
    at = run_failures.place(comparison.where(shown.get("tensor", ""), shown.get("metric")))
    return bug.outcome(FOUND, claims=names[:FEW], falsified=len(names), culprit=blamed, place=at, said=said, changed=listed, **taken)


def _said(words: Any, where: str) -> str:
    """Which parts of the bug's place are among the words: file, function, both or none."""
    file, _, function = where.partition(":")
    parts = {"file": re.escape(file), "function": rf"\b{re.escape(function.rpartition('.')[2])}\b"}
    return " and ".join(part for part, pattern in parts.items() if re.search(pattern, json.dumps(words))) or "none"


@contextmanager
def planted(patch: Path | None) -> Iterator[tuple[Path, str]]:
    """A clone in which the patch is not committed, and nothing known of its round; and in words why it does not apply."""
    with tempfile.TemporaryDirectory(prefix="attackers-") as folder:
        copy = Path(folder) / "checkout"
        executed(["git", "clone", "-q", "--shared", str(CHECKOUT), str(copy)], CHECKOUT).check_returncode()
        applied = executed(["git", "apply", "-C1", str(patch)], copy) if patch else None
        places.forget(copy, patch)
        yield copy, applied.stderr.decode().strip() if applied and applied.returncode else ""


def _asked(patch: Path | None, options: Sequence[str], device: str) -> tuple[list[Record], str]:
    """The false claims of a run on HEAD's tracked files with the patch, and in words how it ended where that was not well."""
    with planted(patch) as (copy, reason):
        if reason:
            return [], f"no end: {reason}"
        file = copy.parent / "verdicts.jsonl"
        given = ["-q", "-p", "no:cacheprovider", "-n", "2", "--verdicts", str(file), *(["--device", "cuda"] if device == "cuda" else [])]
        try:
            asked = [sys.executable, "-m", "pytest", "falsifiers", *given, *options]
            printed = executed(asked, copy, device).stdout.decode(errors="replace")
        except subprocess.TimeoutExpired:
            printed = f"still running after {MOST_SECONDS} seconds"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    false = [record for record in records if record.get("state") == "FALSIFIED" and not record["known_failure"]]
    ends = [record for record in records if record["record"] == "end" and not record["interrupted"]]
    if not ends:
        flaky = [f"{_name(record)}: {record['counterexample']}; " for record in records if record.get("state") == "FLAKY"]
        return false, f"no end: {''.join(flaky)}{printed[-1000:]}"
    return false, f"exit status {ends[0]['exit_status']}: {ends[0]['totals']}" if ends[0]["exit_status"] else ""


def _name(record: Record) -> str:
    return f"{record['claim']} {record['dtype'] or ''}".strip()


def executed(command: list[str], folder: Path, device: str = "cpu") -> subprocess.CompletedProcess[bytes]:
    """Runs a command for which the folder is the only checkout; kernels run on the device, on a CPU in Triton's interpreter."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    environment["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=MOST_SECONDS)  # noqa: S603  git and pytest
