"""`python -m benchmarks.attackers random --changes 40 --seed 1`: changes of `impl` drawn at random, and which claims see them.

A claim is asked about a change where it executes the changed line, the quickest claims first, on the cases of a default run on a CPU.
Kernels, the progress line and texts of messages are not changed. A change that survives is to be read: it may be
the same program in other words, a slower one, or what no claim asks.
"""

import argparse
import copy
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attackers import changes
from benchmarks.command import CannotRun
from blackswan import contracts
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.diagnosis import tracing
from blackswan.falsifiers.mutants.power import RememberingAttack
from blackswan.falsifiers.numeric.precision import CUDA_ONLY
from blackswan.falsifiers.runner.campaign import Selection, Target, targets
from blackswan.falsifiers.runner.engine import Examination, Falsified, Options, cases
from blackswan.falsifiers.runner.options import cores
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.workers import answers
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.subjects.protocol import Lacks, asked_by
from blackswan.reports.digests import tree_digests

KILLED, SURVIVED, ENDLESS, UNSEEN = "KILLED", "SURVIVED", "NO END", "NOT EXECUTED"
TOGETHER, MOST_SECONDS, MOST_TIMES = 8, 60, 10
"""Changes that share their cases, and how long a claim may run with a change: this many seconds more than so many times its own."""
Record = dict[str, Any]
Traced = tuple[float, Target, frozenset[str]]
"""The seconds that a claim takes, the claim in a dtype, and the lines of `impl` that it executes."""


class Asking:
    """One claim in one dtype: its cases, and what of them does not depend on the subject."""

    def __init__(self, target: Target) -> None:
        self.claim, self.dtype, self.memory = target.claim, target.dtype, dict[str, Any]()
        self.subject = asked_by(self.claim, Implementation("cpu"))
        source = RealInput(CHECKPOINT, CORPUS_HELDOUT).case if self.claim.domain.input == "checkpoint" else None
        self.cases = list(cases(self.claim, self.dtype, Options(shrink=False), source))

    def outcome(self, change: AbstractContextManager[None], most: int = 0) -> str:
        """KILLED where a case leaves the claim, NO END after so many seconds (0: never), else SURVIVED."""
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # nobody takes a KeyboardInterrupt for a failure of his own
        signal.alarm(most)
        examination = Examination(RememberingAttack(self.claim, self.subject, self.dtype, memory=self.memory))
        try:
            with change, suppress(Lacks):
                for case in copy.deepcopy(self.cases):  # a change may write into its inputs
                    examination.case(case)
        except (Falsified, SystemExit):
            return KILLED
        except KeyboardInterrupt:
            return ENDLESS
        finally:
            signal.alarm(0)
        return SURVIVED


def trace(target: Target, folder: Path) -> Record:
    """The lines that the claim executes and the seconds that it takes; kept in the folder as long as the checkout stays as it is."""
    path, checkout = folder / f"{target.claim.id}-{target.dtype}.json", tree_digests(tracing.IMPL.parent)
    if path.is_file() and (kept := json.loads(path.read_bytes()))["checkout"] == checkout:
        return dict(kept)
    asking = Asking(target)
    with tracing.executed(tracing.LINES) as lines:
        asking.outcome(nullcontext())
    start = time.perf_counter()
    held = asking.outcome(nullcontext()) == SURVIVED
    found = {"checkout": checkout, "seconds": time.perf_counter() - start, "lines": sorted(lines) if held else []}
    path.write_text(json.dumps(found))
    return found


def attack(drawn: Sequence[changes.Change], near: Sequence[Traced]) -> list[Record]:
    """Asks the claims about some changes, which share their cases."""
    found = {change.name: {**asdict(change), "outcome": UNSEEN, "by": "", "asked": 0} for change in drawn}
    for seconds, target, lines in near:
        due = [change.name for change in drawn if change.line in lines and found[change.name]["outcome"] in (UNSEEN, SURVIVED)]
        asking = Asking(target) if due else None
        for name in due if asking else ():
            found[name]["outcome"] = asking.outcome(changes.applied(name), MOST_SECONDS + round(MOST_TIMES * seconds))
            found[name]["asked"] += 1
            if found[name]["outcome"] != SURVIVED:
                found[name]["by"] = f"{target.claim.id} {target.dtype}"
    return list(found.values())


def traces(chosen: Sequence[Target], folder: Path, jobs: int) -> list[Traced]:
    """The claims, the quickest first."""
    made: list[Traced] = []
    for target, found in zip(chosen, answers([partial(trace, target, folder) for target in chosen], jobs, in_order=True), strict=True):
        made.append((found["seconds"], target, frozenset(found["lines"])))
        print(f"{len(made)}/{len(chosen)} traced: {target.claim.id} {target.dtype}", file=sys.stderr, flush=True)
    return sorted(made, key=lambda one: one[0])


def asked_on_cpu(claims: Sequence[str]) -> list[Target]:
    """These claims, or all, in each dtype in which they are asked on a CPU."""
    known = targets(contracts.load(), Selection(claims=claims), "cpu")
    chosen = [target for target in known if target.device == "cpu" and target.dtype not in CUDA_ONLY]
    if unknown := {*claims} - {target.claim.id for target in chosen}:
        raise CannotRun(f"--claim: {min(unknown)} is no claim that is asked on a CPU")
    return chosen


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each change, and how many there are of each outcome."""
    options = _options(arguments)
    chosen = asked_on_cpu(options.claim)
    counts, every = Counter[str](), [change for change in changes.every() if change.what.startswith(options.what)]
    if not every:
        raise CannotRun(f"--what: no change begins with {options.what!r}; expected the beginning of one, such as 'kept for every'")
    with tempfile.TemporaryDirectory(prefix="attackers-") as temporary, (options.output or Path(os.devnull)).open("w") as output:
        near = traces(chosen, options.traces or Path(temporary), options.jobs)
        if options.claim:  # of the others there is nothing to be learnt
            every = [change for change in every if any(change.line in lines for _, _, lines in near)]
        drawn = random.Random(options.seed).sample(every, min(options.changes, len(every)))  # noqa: S311  # no secrets
        parts = [partial(attack, drawn[start : start + TOGETHER], near) for start in range(0, len(drawn), TOGETHER)]
        for found in (one for part in answers(parts, options.jobs) for one in part):
            counts[found["outcome"]] += 1
            print(f"{found['outcome']:<12} {found['by']:<28} impl/{found['line']}  {found['what']}", flush=True)
            print(json.dumps(found, ensure_ascii=False), file=output, flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attackers random", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--changes", metavar="N", type=int, choices=range(1, 10_001), required=True, help="how many are drawn")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="another one draws others (default: 0)")
    parser.add_argument("--what", metavar="TEXT", default="", help="draw of those that begin so, as `kept for every` (default: of all)")
    parser.add_argument("--claim", metavar="ID", action="append", default=[], help="ask this claim only, of what it executes; repeatable")
    parser.add_argument("--jobs", metavar="J", type=int, choices=range(1, 257), default=cores(), help="processes (default: one a core)")
    parser.add_argument("--traces", metavar="DIR", type=Path, help="an existing folder that keeps which lines each claim executes")
    parser.add_argument("--output", metavar="FILE", type=Path, help="a line of JSON for each change")
    return parser.parse_args(arguments)
