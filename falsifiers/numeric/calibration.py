"""Calibration: factors of rounding tolerances, measured on the correct implementation and recorded with sample size, dtype and machine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import METRICS, Comparison, Errors
from blackswan.falsifiers.numeric.kinds import KINDS
from blackswan.falsifiers.runner import environment
from blackswan.falsifiers.runner.engine import Options, Source, comparing, search
from blackswan.falsifiers.subjects.protocol import Subject, asked_by
from blackswan.reference.table import Array


@dataclass
class Calibrating(Attack):
    """An attack that records error / noise floor instead of judging by it.

    A ratio larger than all before is measured again by the floor of many replays, as a miss is in an attack.
    """

    ratios: list[Errors] = field(default_factory=list)
    largest: Errors = field(default_factory=lambda: Errors.flat(0.0))
    _case: dict[str, Errors] = field(default_factory=dict)

    def judge(
        self,
        expected: Mapping[str, Array],
        actual: Mapping[str, Array],
        floors: Callable[[], Mapping[str, Errors]],
        dtypes: Mapping[str, np.dtype[Any]],
        reach: float = 0.0,
    ) -> list[Comparison]:
        """Always held, or broken; the ratio of each tensor is kept."""
        found = super().judge(expected, actual, floors, dtypes, reach)
        for ratio in self._case.values():
            self.ratios.append(ratio)
            self.largest = self.largest.at_least(ratio)
        return found

    def _held_to(
        self, noise: Mapping[str, Errors], expected: Mapping[str, Array], actual: Mapping[str, Array], reach: float
    ) -> list[Comparison]:
        """What counts is the last floor that the case was held to, which may reject a tensor that an earlier one compared."""
        self._case = {}
        return super()._held_to(noise, expected, actual, reach)

    def within(self, name: str, expected: Array, actual: Array, floor: Errors) -> Comparison:
        """Held, unless the ratio is a new largest one by the floor of few replays."""
        error = Errors.of(np.asarray(actual, np.float64) - expected)
        ratio = Errors(*(_ratio(getattr(error, metric), getattr(floor, metric)) for metric in METRICS))
        self._case[name] = ratio
        again = not self.thorough and any(getattr(ratio, metric) > getattr(self.largest, metric) for metric in METRICS)
        return Comparison(name, not again, 1.0, "calibration")


def _ratio(error: float, floor: float) -> float:
    return 0.0 if error == 0 else (error / floor if floor > 0 else math.inf)


@dataclass(frozen=True)
class Calibration:
    """The largest and the median ratios of a claim in a dtype on a device, over `cases` cases and `tensors` tensors."""

    claim: str
    dtype: str
    device: str
    machine: str
    torch: str
    seed: int
    cases: int
    tensors: int
    largest: Errors
    median: Errors

    def describe(self) -> dict[str, Any]:
        """The record, with ratios to four figures."""
        ratios = {
            name: {metric: float(f"{getattr(errors, metric):.4g}") for metric in METRICS}
            for name, errors in (("largest", self.largest), ("median", self.median))
        }
        return {**vars(self), **ratios}


def is_calibrated(claim: Claim) -> bool:
    """Whether the claim has factors."""
    return claim.tolerance is not None and claim.tolerance.basis == "rounding"


def calibrate(claim: Claim, dtype: str, subject: Subject, cases: int, seed: int, source: Source | None) -> Calibration:
    """Runs the correct implementation on boundary cases and on draws of the domain, guided to large ratios as a deep attack is."""
    attack = Calibrating(claim, asked_by(claim, subject), dtype)
    # An ablation asks for a change of several tolerances of its operation, so it is the operation's own parity that is measured.
    compare = KINDS["parity"] if claim.check == "ablation_shows" else comparing(claim)
    count = 0

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
        return max((getattr(ratio, metric) for ratio in attack.ratios[before:] for metric in METRICS), default=0.0)

    search(claim, dtype, Options(seed=seed, examples=cases), measure, source)
    table = np.array([[getattr(ratio, metric) for metric in METRICS] for ratio in attack.ratios] or [[0.0] * len(METRICS)])
    machine = environment.device_name(subject.device) or str(environment.machine()["processor"])
    version = str(environment.versions("cpu")["torch"])
    device, largest, median = subject.device.split(":")[0], Errors(*table.max(axis=0)), Errors(*np.median(table, axis=0))
    return Calibration(claim.id, dtype, device, machine, version, seed, count, len(attack.ratios), largest, median)
