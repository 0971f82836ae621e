"""Calibration: factors of rounding tolerances, measured on the correct implementation and recorded with sample size, dtype and machine."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contracts.model import Claim
from falsifiers import environment
from falsifiers.attack import Attack, SubjectError
from falsifiers.comparison import METRICS, Comparison, Errors
from falsifiers.engine import Options, Source, own_seed
from falsifiers.kinds import KINDS
from falsifiers.strategies import boundaries, build, draws
from falsifiers.subjects.protocol import Subject
from reference.table import Array

RECORD = Path(__file__).parent / "calibration.json"
MARGIN = 1.3
"""A factor is the largest ratio that was measured, times this, rounded up to two figures; and at least one."""


@dataclass
class Calibrating(Attack):
    """An attack that records error / noise floor instead of judging by it."""

    ratios: list[Errors] = field(default_factory=list)

    def within(self, name: str, expected: Array, actual: Array, floor: Errors) -> Comparison:
        """Always held; the ratio of each measure is kept."""
        error = Errors.of(np.asarray(actual, np.float64) - expected)
        self.ratios.append(Errors(*(_ratio(getattr(error, metric), getattr(floor, metric)) for metric in METRICS)))
        return Comparison(name, True, 0.0, "calibration")


def _ratio(error: float, floor: float) -> float:
    return 0.0 if error == 0 else (error / floor if floor > 0 else math.inf)


@dataclass(frozen=True)
class Calibration:
    """The largest ratios of a claim in a dtype, over `cases` cases and `tensors` tensors."""

    claim: str
    dtype: str
    cases: int
    tensors: int
    largest: Errors
    median: Errors

    def factors(self) -> dict[str, float]:
        """The factors that a contract may use, none looser."""
        return {metric: max(1.0, rounded_up(MARGIN * getattr(self.largest, metric))) for metric in METRICS}

    def describe(self) -> dict[str, Any]:
        """The record."""
        largest, median = (
            {metric: float(f"{getattr(errors, metric):.4g}") for metric in METRICS} for errors in (self.largest, self.median)
        )
        return {"cases": self.cases, "tensors": self.tensors, "largest": largest, "median": median, "factors": self.factors()}


def rounded_up(value: float) -> float:
    """Up to two significant figures."""
    if value <= 0 or not math.isfinite(value):
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / step - 1e-9) * step:.2g}")


def is_calibrated(claim: Claim) -> bool:
    """Whether the claim has factors that its own comparisons use."""
    return claim.tolerance is not None and claim.tolerance.basis == "rounding" and claim.check != "ablation_shows"


def calibrate(claim: Claim, dtype: str, subject: Subject, cases: int, seed: int, source: Source | None) -> Calibration:
    """Runs the correct implementation on boundary cases and on draws of the domain, without guiding the draws anywhere."""
    attack = Calibrating(claim, subject, dtype)
    compare = KINDS[claim.kind]
    count = 0
    for case in _cases(claim, dtype, cases, seed, source):
        try:
            compare(attack, case)
        except SubjectError as error:
            raise ValueError(
                f"{claim.id} in {dtype}: the subject {error} on case {case.digest}; calibrate a correct implementation"
            ) from error
        count += 1
    table = np.array([[getattr(ratio, metric) for metric in METRICS] for ratio in attack.ratios] or [[0.0] * len(METRICS)])
    return Calibration(claim.id, dtype, count, len(attack.ratios), Errors(*table.max(axis=0)), Errors(*np.median(table, axis=0)))


def _cases(claim: Claim, dtype: str, cases: int, seed: int, source: Source | None) -> Iterator[Any]:
    make = source or build
    start = own_seed(claim, dtype, seed) % 2**31
    for draw, flavour in boundaries(claim, start):
        yield make(claim, draw, flavour, dtype)
    for draw in _sampled(claim, cases, start):
        for flavour in claim.domain.flavours:
            yield make(claim, draw, flavour, dtype)


def _sampled(claim: Claim, count: int, seed: int) -> Iterable[Any]:
    """Draws of the domain, collected from Hypothesis without shrinking."""
    import hypothesis

    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(draws(claim))
    def collect(draw: Any) -> None:
        found.append(draw)

    collect()
    return found


def read_record() -> dict[str, Any]:
    """The recorded calibration; empty where there is none yet."""
    return dict(json.loads(RECORD.read_text())) if RECORD.is_file() else {"machine": None, "claims": {}}


def write_record(found: Iterable[Calibration], subject: Subject, options: Options) -> None:
    """Adds to the record, claim by claim and dtype by dtype."""
    record = read_record()
    where = {"machine": environment.machine(), "versions": environment.versions(subject.device), "device": subject.device}
    for calibration in found:
        entry = record["claims"].setdefault(calibration.claim, {})
        entry[calibration.dtype] = {**calibration.describe(), "seed": options.seed, "device": subject.device}
    record |= where
    record["claims"] = dict(sorted(record["claims"].items()))
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def write_factors(claim: Claim, path: Path, factors: dict[str, dict[str, float]]) -> None:
    """Puts measured factors into a contract's text, at the claim's own tolerance line; everything else stays as it is."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    start = claim.location.line - 1
    pattern = re.compile(r"(\s+tolerance: \{basis: rounding, factors: )\{.*\}\}\s*$")
    for index in range(start, len(lines)):
        if index > start and lines[index].lstrip().startswith("- id:"):
            break
        if match := pattern.match(lines[index]):
            lines[index] = f"{match[1]}{_flow(factors)}}}\n"
            path.write_text("".join(lines), encoding="utf-8")
            return
    raise ValueError(f"{path}:{claim.location.line}: {claim.id} has no line `tolerance: {{basis: rounding, factors: {{…}}}}` to write to")


def _flow(factors: dict[str, dict[str, float]]) -> str:
    parts = [f"{dtype}: {{" + ", ".join(f"{metric}: {value:g}" for metric, value in by.items()) + "}" for dtype, by in factors.items()]
    return "{" + ", ".join(parts) + "}"
