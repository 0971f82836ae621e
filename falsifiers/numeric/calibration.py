"""Calibration: factors of rounding tolerances, measured on the correct implementation and recorded with sample size, dtype and machine."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.attack import Attack, Floors
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import METRICS, Comparison, Errors
from blackswan.falsifiers.numeric.kinds import KINDS
from blackswan.falsifiers.runner import environment
from blackswan.falsifiers.runner.engine import Options, Source, comparing, search
from blackswan.falsifiers.subjects.protocol import Subject, asked_by
from blackswan.reference.table import Array, Arrays


@dataclass
class Calibrating(Attack):
    """An attack that records error / noise floor instead of judging by it.

    A ratio larger than all before is measured again by the floor of many replays, as a miss is in an attack.
    """

    ratios: list[Errors] = field(default_factory=list)
    largest: Errors = field(default_factory=lambda: Errors.flat(0.0))
    _case: dict[str, Errors] = field(default_factory=dict)

    def judge(self, *asked: Any, **more: Any) -> list[Comparison]:
        """Always held, or broken; the ratio of each tensor is kept."""
        found = super().judge(*asked, **more)
        for ratio in self._case.values():
            self.ratios.append(ratio)
            self.largest = self.largest.at_least(ratio)
        return found

    def _held_to(self, floors: Floors, expected: Arrays, actual: Arrays, reach: float) -> list[Comparison]:
        """Only the last floor that the case was held to counts: it may reject a tensor that an earlier one compared."""
        self._case = {}
        return super()._held_to(floors, expected, actual, reach)

    def within(self, name: str, expected: Array, actual: Array, floor: Errors) -> Comparison:
        """Held, unless the ratio is a new largest one by the floor of few replays."""
        self._case[name] = ratio = Errors.of(np.asarray(actual, np.float64) - expected).over(floor)
        again = not self.thorough and self.largest.at_least(ratio) != self.largest
        return Comparison(name, not again, 1.0, "calibration")


def is_calibrated(claim: Claim) -> bool:
    """Whether the claim has factors."""
    return claim.tolerance is not None and claim.tolerance.basis == "rounding"


def calibrate(claim: Claim, dtype: str, subject: Subject, cases: int, seed: int, source: Source | None) -> dict[str, Any]:
    """The largest and the median ratios of a claim in a dtype, as `calibration_record.add` takes them, to four figures.

    They are those of the correct implementation on boundary cases and on draws of the domain, guided to large ratios as a deep attack is.
    """
    attack, count = Calibrating(claim, asked_by(claim, subject), dtype, sparing=False), 0
    # An ablation asks for a change of several tolerances of its operation, so it is the operation's own parity that is measured.
    compare = KINDS["parity"] if claim.check == "ablation_shows" else comparing(claim)

    def measure(case: Case) -> float:
        nonlocal count
        before = len(attack.ratios)
        try:
            compare(attack, case)
        except SubjectError as error:
            raise ValueError(
                f"{claim.id} in {dtype}: the subject {error} on case {case.digest}; calibrate a correct implementation"
            ) from error
        count += 1
        return max(map(max, attack.ratios[before:]), default=0.0)

    search(claim, dtype, Options(seed=seed, examples=cases), measure, source)
    table = np.array(attack.ratios or [Errors.flat(0.0)])
    return {
        "claim": claim.id,
        "dtype": dtype,
        "device": subject.device.split(":")[0],
        "machine": environment.device_name(subject.device) or str(environment.machine()["processor"]),
        "torch": str(environment.versions("cpu")["torch"]),
        "seed": seed,
        "cases": count,
        "tensors": len(attack.ratios),
        "largest": _by_metric(table.max(axis=0)),
        "median": _by_metric(np.median(table, axis=0)),
    }


def _by_metric(ratios: Array) -> dict[str, float]:
    return {metric: float(f"{ratio:.4g}") for metric, ratio in zip(METRICS, ratios, strict=True)}
