"""Reads where claims about runs, files, data and devices fail on programs with a known mistake: a failure at a like place may have a like
cause.

`failures.json` names the place for each such claim and mutant, without the numbers; `python -m falsifiers power --record-failures` makes it
anew. `planted.json` does for each claim and planted change, with the function of the mistake; `python -m benchmarks.attackers places` makes
it anew from the results of all rounds.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.runner.verdict import Culprit
from blackswan.falsifiers.system.run_problem import ACCUMULATION

RECORD, PLANTED = (Path(__file__).with_name(f"{name}.json") for name in ("failures", "planted"))


def place(tensor: str) -> str:
    """The name of what was compared without its numbers, so that it is the same for every seed.

    `process 2, step 3, state, exp_avg/model.norm.weight` becomes `process #, step #, state, exp_avg`, for which parameter it is depends on
    the seed as well. Angle brackets say which of several questions it was: `accuracy <one label>` becomes `accuracy`.
    """
    return re.sub(r"\d+", "#", re.sub(r" <[^>]*>|/\S+|\bmodel(\.\w+)+|\bscore(\.\w+)+", "", tensor)).strip(" ,")


@cache
def recorded() -> Mapping[str, Mapping[str, str]]:
    """Claim → mutant → the place where the claim fails on that mutant."""
    found: Mapping[str, Mapping[str, str]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


@cache
def planted() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Claim → planted change, `round-60/32-strata-by-numpy` → the function of its mistake, and the place where the claim fails on it."""
    found: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(PLANTED.read_text(encoding="utf-8"))
    return found


def record(killed: Iterable[tuple[str, str, str]], kept: Iterable[str] = ()) -> None:
    """Writes claim, mutant and tensor of each kill; what is recorded of the claims `kept` stays."""
    found: dict[str, dict[str, str]] = {claim: dict(recorded()[claim]) for claim in kept if claim in recorded()}
    for claim, mutant, tensor in sorted(killed):
        found.setdefault(claim, {})[mutant] = place(tensor)
    text = json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False) + "\n"
    RECORD.write_text(text, encoding="utf-8", errors="backslashreplace")  # JSON's own escape of what UTF-8 does not hold, as in file names


def not_averaged(comparison: Comparison) -> Culprit | None:
    """The accumulation of micro-batches, where a loss or a norm is as many times what is expected as the steps of a run have of them."""
    expected, actual, of_a_mean = comparison.expected, comparison.actual, comparison.tensor.endswith((", loss", ", norm"))
    if not (of_a_mean and isinstance(expected, float) and isinstance(actual, float)):
        return None
    if not math.isclose(actual, ACCUMULATION * expected, rel_tol=1e-4):
        return None
    why = f"is {actual / expected:.4f} times what is expected, and a step has {ACCUMULATION} micro-batches, which add up to no mean"
    return Culprit("accumulation of micro-batches", place(comparison.tensor), f"{comparison.tensor} {why}")
