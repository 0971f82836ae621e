"""Asks about a patch the claims that execute the lines which it changes, the quickest first: seconds in place of a whole run's minutes.

No line of a kernel is seen to be executed, because Triton compiles its source; nor is what a module computes when it is imported. So claims
that execute anything else of the file come next. Where a minute of these finds nothing, the others that execute a changed line are asked,
and then all claims on kernels on a GPU, if there is one.
"""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock, Semaphore

from benchmarks import command
from benchmarks.attackers import chance
from benchmarks.attackers import round as whole
from benchmarks.attackers.round import BROKEN, FOUND, MISSED, NOT_RUN, Bug, Record, executed, planted
from blackswan import contracts
from blackswan.falsifiers.runner.campaign import Selection, Target, targets

MOST_SECONDS = 60
"""Claims are asked first that take no longer than this, without a patch, altogether."""
LARGE = "KERNEL-LARGE"
"""The claim on kernels that fills the memory of a GPU."""
AT_A_TIME = 4
"""So many patches are asked on a GPU at a time; of the large claim one, when no other is asked."""
_places, _alone = Semaphore(AT_A_TIME), Lock()


def changed(patch: Path) -> frozenset[str]:
    """`file:line` of `impl` that the patch takes away, and the lines beside those that it adds, by the numbers before it."""
    found, file, line = set[str](), "", 0
    for text in patch.read_text(encoding="utf-8").splitlines():
        if text.startswith(("+++ ", "--- ")):
            file = text[4:].removeprefix("b/").removeprefix("a/").removeprefix("impl/")
        elif start := re.match(r"@@ -(\d+)", text):
            line = int(start[1])
        elif text.startswith("+"):
            found |= {f"{file}:{line - 1}", f"{file}:{line}"}
        elif file:
            found |= {f"{file}:{line}"} if text.startswith("-") else set()
            line += 1
    return frozenset(found)


def attack(bug: Bug, traced: Sequence[chance.Traced], before: Sequence[str] = ()) -> Record:
    """Asks those claims about a checkout with the bug, and gives what results.json says of it; the first false one names a culprit.

    `before` are the claims on kernels that are false on the GPU without it, be it in one dtype; they are not asked there. A claim that is
    false on the honest change too, where there is one, finds nothing: it is `excused`, and the others are asked.
    """
    start, excused = time.perf_counter(), list[str]()
    while True:
        said = _answer(bug, [each for each in traced if each[1].claim.id not in excused], [*before, *excused])
        if said["outcome"] != FOUND or bug.honest is None:
            break
        first = said["claims"][0].split()[0]
        if not whole.false_claims([f"--claim={first}"], said.get("on", "cpu"), bug.honest):
            break
        excused.append(first)
    return said | {"seconds": round(time.perf_counter() - start, 1)} | ({"excused": excused} if excused else {})


def _answer(bug: Bug, traced: Sequence[chance.Traced], before: Sequence[str]) -> Record:
    asked, late, spent = list[str](), dict[str, float](), 0.0
    near, beside = _nearest(changed(bug.path), traced)
    for seconds, target in [*near, *beside]:
        name = f"{target.claim.id} {target.dtype}"
        if spent + seconds < MOST_SECONDS:
            asked, spent = [*asked, name], spent + seconds
        elif (seconds, target) in near:
            late[name] = seconds
    said = _asked(bug, asked)
    if said["outcome"] == MISSED and late:
        said, asked = _asked(bug, list(late), max(late.values())), [*asked, *late]
    if said["outcome"] == MISSED and has_gpu():
        said = _asked_on_a_gpu(bug, before)
    elif said["outcome"] == MISSED and bug.device == "cuda":
        said = bug.outcome(NOT_RUN, reason="no CUDA device")
    return said | {"asked": len(asked)}


def _asked(bug: Bug, claims: Sequence[str], slowest: float = MOST_SECONDS) -> Record:
    """The claims' answer about the bug; `slowest` is the number of seconds that the slowest of them takes without it."""
    most = chance.MOST_SECONDS + round(chance.MOST_TIMES * slowest)
    with planted(bug.path) as (copy, reason):
        try:
            ran = None if reason else executed([sys.executable, "-m", __name__, str(most), *claims], copy)
        except subprocess.TimeoutExpired as error:
            return bug.outcome(BROKEN, reason=f"still running after {error.timeout:g} seconds")
    if ran is None or ran.returncode:
        return bug.outcome(BROKEN, reason=reason or (ran.stderr.decode()[-500:] if ran else ""))
    first = ran.stdout.decode().split("\n")[0]
    if not first:
        return bug.outcome(MISSED)
    said = whole.attack(replace(bug, device="cpu"), ["-x", "--claim", first.split()[0]], [])
    said.pop("falsified", None)  # of one claim
    return said if said["outcome"] == FOUND else bug.outcome(FOUND, claims=[first])


def false_on_a_gpu() -> list[str]:
    """The claims on kernels that are false without a patch on this machine's GPU."""
    return whole.false_claims([f"--claim={name}" for name in _on_kernels()], "cuda")


def _on_kernels() -> list[str]:
    return [claim.id for contract in contracts.load() for claim in contract.claims if "KERNEL" in claim.id]


def _asked_on_a_gpu(bug: Bug, before: Sequence[str]) -> Record:
    """Asks the claims on kernels about the bug on a GPU, the large one last and alone."""
    known = [name for name in _on_kernels() if name not in {false.split()[0] for false in before}]
    if not known:
        return bug.outcome(NOT_RUN, reason="every claim on kernels is false without the patch")
    with _places:
        said = whole.attack(replace(bug, device="cuda"), ["-x", *(f"--claim={name}" for name in known if name != LARGE)], [])
    if said["outcome"] == MISSED and LARGE in known:
        with _alone, ExitStack() as every:
            for _ in range(AT_A_TIME):
                every.enter_context(_places)
            said = whole.attack(replace(bug, device="cuda"), ["-x", "--require=cuda", f"--claim={LARGE}"], [])
        if said["outcome"] == MISSED and said["reason"] and bug.device == "cuda":  # no verdict, where memory is short
            said["outcome"] = NOT_RUN
    said.pop("falsified", None)  # the run ends at the first
    return said | {"on": "cuda"}


@cache
def has_gpu() -> bool:
    """Whether there is one here."""
    import torch

    return torch.cuda.is_available()


def _nearest(lines: frozenset[str], traced: Sequence[chance.Traced]) -> tuple[list[tuple[float, Target]], list[tuple[float, Target]]]:
    """Claims that execute one of the lines, and those that execute another one of their files."""
    files = {line.partition(":")[0] for line in lines}
    near, beside = list[tuple[float, Target]](), list[tuple[float, Target]]()
    for seconds, target, executes in traced:
        if lines & executes:
            near.append((seconds, target))
        elif files & {line.partition(":")[0] for line in executes}:
            beside.append((seconds, target))
    return near, beside


def main(arguments: Sequence[str]) -> None:
    """Prints the first claim, of those named and in the order of a run, that does not hold in this checkout; the first argument is the
    seconds that each of them may take."""
    most, *names = arguments
    chosen = targets(contracts.load(), Selection(claims=[name.split()[0] for name in names]), "cpu")
    known = {f"{target.claim.id} {target.dtype}": target for target in chosen}
    if missing := sorted({*names} - known.keys()):
        raise command.CannotRun(f"{missing[0]}: this checkout has no such claim; commit what the claims were traced in")
    asked = (name for name in known if name in names)
    print(next((name for name in asked if chance.Asking(known[name]).outcome(nullcontext(), int(most)) != chance.SURVIVED), ""))


if __name__ == "__main__":
    main(sys.argv[1:])
