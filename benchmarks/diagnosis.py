"""`python -m benchmarks.diagnosis`: how often the operation to blame is named, for mutants planted into the real PyTorch model.

Each mutant is planted, a claim about whole models is falsified, and the culprit is named with that mutant left out of the catalogue. The
aim is the right operation for at least 80 % of them. `--honest` measures instead how near the calls of the correct implementation come to
the limit at which a call is blamed.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import command
from blackswan import contracts
from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.falsifiers.runner.workers import answers
from blackswan.reference.table import Array

if TYPE_CHECKING:
    from blackswan.falsifiers.runner.verdict import Verdict
    from blackswan.falsifiers.subjects.protocol import Subject

CLAIMS = (
    "FWD-DECODER",
    "CLS-FORWARD",
    "CLS-FORWARD-NF4",
    "FWD-LM-LOSS",
    "CLS-LOSS",
    "BWD-DECODER",
    "CLS-GRADIENT",
    "CLS-GRADIENT-NF4",
    "CLS-TRAJECTORY",
)
AIM = 0.8


@dataclass(frozen=True)
class Result:
    """What became of one planted mutant. `reason`: why there was nothing to diagnose; `twin`: the mutant named when none is left out."""

    mutant: str
    reason: str = ""
    claim: str = ""
    dtype: str = ""
    wanted: str = ""
    named: str = ""
    path: str = ""
    explanation: str = ""
    mutant_match: str = ""
    distance: float = 0.0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the operation named is the one to blame."""
        return self.named == self.wanted


def examine(mutant: str, dtype: str) -> Result:
    """Plants a mutant, falsifies the first claim that it breaks, and diagnoses it; in the other dtype where it breaks none in this one.

    A case on which the claim fails without the mutant proves nothing and is passed over.
    """
    from benchmarks.planting import planting
    from blackswan.falsifiers.runner.engine import Options, falsify, replay
    from blackswan.falsifiers.runner.verdict import State
    from blackswan.falsifiers.subjects.implementation import Implementation

    start, subject = time.perf_counter(), Implementation()
    for tried in (dtype, *({"float32", "bfloat16"} - {dtype})):
        if isinstance(plant := planting(mutant, tried), str):
            return Result(mutant, f"not planted: {plant}")
        for claim in claims_on(mutant):
            with plant():
                verdict = falsify(claim, tried, subject, Options(examples=6, shrink=False))
            if verdict.case is not None and replay(claim, verdict.case, subject).state is State.HELD:
                with plant():
                    found = diagnosed(mutant, verdict, subject)
                return replace(found, seconds=time.perf_counter() - start)
    return Result(mutant, "planted, and no claim about a model shows it", seconds=time.perf_counter() - start)


def diagnosed(mutant: str, verdict: "Verdict", subject: "Subject") -> Result:
    """The diagnosis of a planted mutant's counterexample, the mutant left out; and the mutant named when it is not."""
    from benchmarks.planting import culprit
    from blackswan.falsifiers.diagnosis.blame import diagnose

    claim, case = verdict.claim, verdict.case
    assert case is not None
    blamed = diagnose(claim, case, verdict.comparison, subject, left_out=(mutant,))
    assert blamed is not None
    whole = diagnose(claim, case, verdict.comparison, subject)
    assert whole is not None
    mutant_match, distance = whole.mutant or "", whole.distance or 0.0
    return Result(
        mutant, "", claim.id, case.dtype, culprit(mutant), blamed.operation, blamed.path, blamed.explanation, mutant_match, distance
    )


def claims_on(mutant: str) -> Iterator[Claim]:
    """The claims about whole models that call the mutant's operation."""
    from blackswan.falsifiers.mutants import MUTANTS, USES

    operation = MUTANTS[mutant].operation
    known = {claim.id: claim for contract in contracts.load() for claim in contract.claims}
    for name in CLAIMS:
        used = USES[str(known[name].operation)] | {known[name].operation}
        if (operation if operation != "nf4_linear" else "nf4_dequantize") in used:
            yield known[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where fewer operations are named than the aim."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description="How often the operation to blame is named.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="tried first (default: float32)")
    parser.add_argument("--mutant", action="append", default=[], metavar="NAME", help="this mutant only; may be repeated")
    parser.add_argument("--processes", type=command.positive, default=2)
    parser.add_argument("--honest", type=command.natural, default=0, metavar="EXAMPLES", help="judge the correct implementation's calls")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.honest:
        return _honest(options.honest)
    from blackswan.falsifiers.mutants import MUTANTS

    if unknown := sorted(set(options.mutant) - set(MUTANTS)):
        parser.error(f"no mutant is named {unknown[0]!r}")
    start, results = time.perf_counter(), []
    names = options.mutant or list(MUTANTS)
    print(f"{'mutant':42} {'claim falsified':25} {'to blame':24} {'named':24} path: why")
    for result in answers([partial(examine, name, options.dtype) for name in names], options.processes, in_order=True):
        results.append(result)
        print(_row(result), flush=True)
    return _totals(results, time.perf_counter() - start)


def _row(result: Result) -> str:
    if result.reason:
        return f"{result.mutant:42} {result.reason}"
    mark = "" if result.right else "   WRONG"
    mutant_match = f"   equals {result.mutant_match}, to {result.distance:.2g}" if result.mutant_match else "   equals no mutant"
    claim = f"{result.claim} {result.dtype}"
    return f"{result.mutant:42} {claim:25} {result.wanted:24} {result.named:24} {result.path}: {result.explanation}{mutant_match}{mark}"


def _totals(results: Sequence[Result], seconds: float) -> int:
    diagnosed = [result for result in results if not result.reason]
    right = sum(result.right for result in diagnosed)
    named = sum(result.mutant_match == result.mutant for result in diagnosed)
    equal = sum(bool(result.mutant_match) and result.mutant_match != result.mutant for result in diagnosed)
    print()
    for reason, count in Counter(result.reason for result in results if result.reason).most_common():
        print(f"neither right nor wrong: {count} {reason}")
    if not diagnosed:
        return 0
    print(f"the operation to blame is named for {right} of {len(diagnosed)} planted mutants ({right / len(diagnosed):.0%}; aim {AIM:.0%})")
    print(
        f"the mutant itself is named for {named}, another one with an answer as near for {equal}, none for {len(diagnosed) - named - equal}"
    )
    print(f"{seconds:.0f} s")
    return int(right / len(diagnosed) < AIM)


def _honest(examples: int) -> int:
    """The largest error of a correct implementation's call, in shares of the limit at which it is blamed."""
    from blackswan.falsifiers.diagnosis import blame, local
    from blackswan.falsifiers.diagnosis.mutant_match import questions
    from blackswan.falsifiers.runner.engine import Options, cases
    from blackswan.falsifiers.subjects.implementation import Implementation

    worst: dict[str, float] = {}
    judge = local.error_in_floors

    def listening(expected: Array, actual: Array | None, floor: Errors) -> tuple[float, float]:
        rms, limited = judge(expected, actual, floor)
        worst["worst measure of a call"] = max(worst.get("worst measure of a call", 0.0), limited)
        worst["rms of a call"] = max(worst.get("rms of a call", 0.0), rms / local.LIMIT.rms)
        return rms, limited

    class Judge(local.Local):
        """Keeps the largest average over an operation's calls."""

        def systematic_errors(self) -> Iterator[local.Suspicion]:
            for (operation, what), errors in self.errors.items():
                if len(errors) > 1:
                    key = f"average over calls of {operation}, {what}, in {self.dtype}"
                    average = float(np.sqrt(np.mean(np.square([error for _, error in errors])))) / local.STEADY
                    worst[key] = max(worst.get(key, 0.0), average)
            yield from super().systematic_errors()

    local.error_in_floors, blame.Local = listening, Judge  # type: ignore[misc]  # measured where it is judged
    subject, calls, blamed = Implementation(), 0, Counter[str]()
    known = {claim.id: claim for contract in contracts.load() for claim in contract.claims}
    for name in CLAIMS:
        for dtype in known[name].domain.dtype:
            for case in cases(known[name], dtype, Options(examples=examples, seed=1)):
                calls += 1
                for found in blame.suspicions(known[name], questions(known[name], case, subject), subject):
                    blamed[f"{name} {dtype}: {found.operation} at {found.path}: {found.explanation}"] += 1
            print(f"{name} {dtype}: {calls} cases so far, {sum(blamed.values())} calls blamed", flush=True)
    for key, times in sorted(worst.items(), key=lambda entry: -entry[1])[:12]:
        print(f"{times:.2f} of the limit: {key}")
    for text in blamed:
        print(f"BLAMED {text}")
    return int(bool(blamed))


if __name__ == "__main__":
    command.start(main)
