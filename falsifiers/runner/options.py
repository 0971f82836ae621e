"""The options of `pytest falsifiers` and of the commands, and the checks of their values and combinations."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from blackswan import contracts
from blackswan.contracts.problems import unknown
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.runner.campaign import Selection
from blackswan.reports import places

LONGEST = 1_000_000.0
"""Seconds: no wait for a process can be longer than 2³¹ milliseconds."""
TARGETS_PER_PROCESS = 8
"""A process takes seconds to start, in which one process attacks about as many claims."""
MOST_ON_A_GPU = 8
"""Processes that share a GPU by default: each has a CUDA context of its own."""
DESCRIPTION = "Attacks the implementation with every claim of every contract."
DEVICE_HELP = (
    f"cpu, auto, or an accelerator by its torch name, {', '.join(contracts.ACCELERATORS)}, also with an index as in cuda:1 (default: cpu). "
    "One that is absent ends the run with status 6 before a claim is asked; only auto takes the CPU in its place, with a warning"
)
VERDICTS_HELP = "verdict file (default: verdicts.jsonl, or replay.jsonl, in reports/generated of a checkout, else in blackswan-reports)"


def add(option: Callable[..., Any]) -> None:
    """Declares the options, with `add_argument` of argparse or `addoption` of pytest."""
    option("--model", type=Path, default=CHECKPOINT, metavar="PATH", help="checkpoint folder or .apr file (default: the one shipped)")
    option("--corpus", type=Path, default=CORPUS_HELDOUT, metavar="FILE", help="JSONL corpus (default: the held-out one shipped)")
    option("--device", default="cpu", metavar="DEVICE", help=DEVICE_HELP)
    option("--dtype", action="append", default=[], choices=contracts.DTYPES, help="attack in this dtype only; may be repeated")
    option("--effort", choices=("quick", "default", "deep"), default="default", help="how many cases a claim gets")
    option("--claim", action="append", default=[], metavar="ID", help="attack this claim only; may be repeated")
    option("--operation", action="append", default=[], metavar="NAME", help="attack claims on this operation only; may be repeated")
    option("--subject", metavar="SUBJECT", help="attack FILE.py:NAME or package.module:NAME (see blackswan vet) instead of impl")
    option("--require", action="append", default=[], choices=("cuda",), help="fail where a claim could not be run on it")
    option("--verdicts", type=Path, default=None, metavar="FILE", help=VERDICTS_HELP)
    option("--replay", type=Path, default=None, metavar="FILE", help="attack the one case stored in FILE")
    option(
        "--limit",
        type=seconds,
        default=None,
        metavar="SECONDS",
        help="stop a claim that takes longer, and call it VACUOUS; the search for a culprit is not stopped",
    )
    option("--resume", action="store_true", help="go on with the run in the verdict file: what held there is not attacked again")
    option("--seed", type=int, default=0, help="seed of the run (default: 0)")
    option("--since", metavar="COMMIT", help="name beside suspects what ran and differs from this commit (default: HEAD)")


def parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `blackswan falsify`."""
    found = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, epilog="Every option of pytest works as well, such as -x, -k and -n."
    )
    add(found.add_argument)
    return found


def main(arguments: Sequence[str], prog: str) -> int:
    """Runs `pytest falsifiers`, wherever they are installed, without the settings that a working directory has for its own tests."""
    parser(prog).parse_known_args(arguments)
    import pytest

    settings = ["-c", os.devnull, "--rootdir", str(places.CODE), "-p", "no:cacheprovider", "-ra"]
    settings += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # this process has imported what pytest could not rewrite
    return int(pytest.main([*settings, str(places.CODE / "falsifiers"), *arguments]))


def positive(text: str) -> int:
    """A whole number from 1 on. ArgumentTypeError, which argparse shows as it is."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """The number of --limit. ArgumentTypeError, which argparse shows as it is."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds above 0 and up to {LONGEST:,.0f}")
    return value


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes(targets: int, device: str) -> int:
    """How many processes share the claims out by default; 0 is this one alone."""
    most = cores() if device == "cpu" else min(cores(), MOST_ON_A_GPU)
    wanted = min(most, targets // TARGETS_PER_PROCESS)
    return wanted if wanted > 1 else 0


def one_case(option: argparse.Namespace) -> None:
    """ValueError where --replay, which attacks one stored case, is to do something else as well."""
    if option.resume:
        raise ValueError("--resume goes on with a run, and --replay attacks one stored case; expected only one of them")
    names = ("claim", "dtype") if option.subject else ("claim", "operation", "dtype")
    selected = [f"--{name}" for name in names if getattr(option, name)]
    if selected:
        raise ValueError(
            f"{', '.join(selected)}: --replay attacks the one case of its file, whatever is selected; expected only one of them"
        )


def known_names(selection: Selection, loaded: Sequence[contracts.Contract]) -> None:
    """ValueError where a claim or an operation of the selection does not exist, with the nearest name."""
    claims = {claim.id: claim for contract in loaded for claim in contract.claims}
    operations = {claim.operation for claim in claims.values() if claim.operation}
    for name in selection.claims:
        if name not in claims:
            raise ValueError(f"--claim: {unknown('claim', name, claims)}")
    for name in selection.operations:
        if name not in operations:
            raise ValueError(f"--operation: {unknown('operation', name, sorted(operations))}")


def known_profile(name: str | None) -> None:
    """UsageError where Hypothesis has no such profile: its own plug-in would end in a traceback."""
    import pytest
    from hypothesis import errors, settings

    try:
        if name is not None:
            settings.get_profile(name)
    except errors.InvalidArgument:
        expected = "default, ci, or one that a conftest registers"
        raise pytest.UsageError(f"--hypothesis-profile: unknown profile {name!r}; expected {expected}") from None


def nothing_to_attack(chosen: Selection, loaded: Sequence[contracts.Contract]) -> ValueError:
    """The error for a selection that leaves nothing; it names what could be attacked."""
    claims = [claim for contract in loaded for claim in contract.claims]
    claims = [claim for claim in claims if not chosen.claims or claim.id in chosen.claims]
    both = [claim for claim in claims if chosen.chooses(claim)]
    if not both:
        operations = _listed(claim.operation or "no operation" for claim in claims)
        return ValueError(f"--operation {_listed(chosen.operations)}: {_listed(chosen.claims)} is on {operations}; expected one of both")
    names = _listed(chosen.claims or chosen.operations) or "all claims"
    dtypes = _listed(dtype for claim in both for dtype in claim.domain.dtype)
    return ValueError(f"--dtype {_listed(chosen.dtypes)}: {names} can be attacked in {dtypes} only")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def json_lines(option: str, path: Path, keys: Sequence[str]) -> None:
    """ValueError where JSON lines cannot be written to a file, or it holds something else than lines that have these keys."""
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent} to write {path.name} into")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written; expected a file in a folder that can be written to")
    if path.is_file() and not _holds(path, keys):
        raise ValueError(f"{option}: {path} holds something else than this command writes; expected a new file, or one that it has written")


def _holds(path: Path, keys: Sequence[str]) -> bool:
    with path.open("rb") as stream:
        first = stream.readline()
    try:
        line = json.loads(first or "null")
    except (ValueError, RecursionError):
        return False
    return not first or (isinstance(line, dict) and set(keys) <= set(line))
