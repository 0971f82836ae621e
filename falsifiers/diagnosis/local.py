"""One call held to the reference on its own inputs: its results, and its gradients on its own cotangents. Earlier errors do not show."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.attack import Attack, Run, rounded_gradients, rounded_outputs
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.falsifiers.numeric.precision import declared_by, is_real, signatures
from blackswan.falsifiers.subjects.protocol import Subject, TracedCall
from blackswan.reference.table import Array, Arrays, Table

LIMIT = Errors(rms=5.0, row=8.0, max=8.0)
"""Multiples of a call's own noise floor. `python -m benchmarks.diagnosis --honest 20` measures how near the calls of the correct
implementation come, inside models; a wrong formula is tens to millions of floors away."""


@dataclass(frozen=True)
class Suspicion:
    """A suspect call by operation and path, with the reason; and the call itself where it is wrong on its own inputs.

    `times` is how many times its limit a wrong result reaches; infinite where there is no limit to speak of.
    """

    operation: str
    path: str
    explanation: str
    call: TracedCall | None = None
    times: float = np.inf


STEADY = 2.0
"""Noise floors that the results of one operation may be off by on average (rms over its calls): what is small in each of them adds up."""

COARSER_GRADIENT = {("attention", "float32"): 10.0, ("attention", "float64"): 10.0}
"""Both limits times this for the gradients of an operation. Fused attention recomputes its probabilities in the backward pass as
exp(score − log-sum-exp), from a log-sum-exp that is rounded to float32: they are off together, by its size (tens) times the unit roundoff
(Dao et al. 2022, arXiv:2205.14135, algorithm 4), where the reference's noise is of each score by itself."""

FEW = 8
"""Results of fewer elements say nothing about an average."""


@dataclass(frozen=True)
class Local:
    """Judges single calls of a subject in one dtype; `claim` and `seed` are those of the case that the calls come from.

    `errors` keeps, for each operation and result or gradient, every call's path and rms error in noise floors.
    """

    claim: Claim
    subject: Subject
    dtype: str
    seed: int
    errors: dict[tuple[str, str], list[tuple[str, float]]] = field(default_factory=dict)

    @cached_property
    def table(self) -> Table:
        """The reference's operations by the conventions that the subject declares."""
        return reference.table_of(declared_by(self.subject))

    def systematic_errors(self) -> Iterator[Suspicion]:
        """The operations that are a little wrong in all of their calls, the worst one first."""
        averages = {key: float(np.sqrt(np.mean(np.square([error for _, error in errors])))) for key, errors in self.errors.items()}
        for (operation, what), average in sorted(averages.items(), key=lambda entry: -entry[1]):
            errors = self.errors[operation, what]
            if average > STEADY and len(errors) > 1:
                why = f"{what} is {average:.3g} noise floors from the reference's on average over {len(errors)} calls"
                yield Suspicion(operation, errors[0][0], why, times=average / STEADY)

    def results(self, call: TracedCall) -> Iterator[Suspicion]:
        """A suspicion for each wrong result of the call."""
        case = self._case(call)
        try:
            expected = reference.evaluate(call.operation, case.inputs, case.scalars, self.table)
        except (ValueError, FloatingPointError) as error:
            yield Suspicion(call.operation, call.path, f"answers where the reference refuses: {error}")
            return
        yield from self._judged(call, case, rounded_outputs(case), expected, call.outputs)

    def gradients(self, call: TracedCall, wrt: Sequence[str]) -> Iterator[Suspicion]:
        """A suspicion for each input in `wrt` of which the call's own gradient is wrong."""
        names = [name for name in wrt if name in call.gradients]
        if not names or not call.cotangents:
            return
        case = self._case(call)
        try:
            expected = reference.differentiate(call.operation, case.inputs, case.scalars, case.cotangents, names, self.table)
        except (ValueError, FloatingPointError) as error:
            yield Suspicion(call.operation, call.path, f"has a gradient where the reference refuses: {error}")
            return
        yield from self._judged(call, case, rounded_gradients(case, names), expected, call.gradients)

    def alone(self, call: TracedCall, name: str) -> Array:
        """The subject's gradient of one input where it differentiates the call's operation by itself, outside any model."""
        case = self._case(call)
        return self.subject.differentiate(case.operation, case.inputs, case.scalars, case.cotangents, [name], self.dtype)[name]

    def _case(self, call: TracedCall) -> Case:
        inputs, scalars = own(call)
        upstream = {name: np.asarray(value, np.float64) for name, value in call.cotangents.items()}
        return Case(call.operation, self.dtype, {}, scalars, self.seed, "recorded", inputs, upstream)

    def _judged(self, call: TracedCall, case: Case, rounded: Run, expected: Arrays, actual: Arrays) -> Iterator[Suspicion]:
        """The results or gradients that are further from the expected ones than LIMIT noise floors."""
        attack = Attack(replace(self.claim, operation=call.operation), self.subject, self.dtype)
        floors = attack.floor(case, rounded, expected)
        for name, value in expected.items():
            what = f"the gradient of its {name}" if actual is call.gradients else f"from its own inputs, its {name}"
            coarser = COARSER_GRADIENT.get((call.operation, self.dtype), 1.0) if actual is call.gradients else 1.0
            error, limited = error_in_floors(value, actual.get(name), floors[name].times(coarser))
            if value.size >= FEW:
                self.errors.setdefault((call.operation, what), []).append((call.path, error))
            if limited > 1:
                yield Suspicion(call.operation, call.path, f"{what} is {_multiple(limited)} from the reference's", call, limited)


def own(call: TracedCall) -> tuple[dict[str, Array], dict[str, Any]]:
    """The call's own inputs in float64, and its scalars."""
    inputs = {name: np.asarray(value, np.float64) if is_real(value) else value for name, value in call.inputs.items()}
    signature = signatures()[call.operation]
    known = {*signature.scalars, *signature.attributes}
    return inputs, {name: value for name, value in call.scalars.items() if name in known}


def error_in_floors(expected: Array, actual: Array | None, floor: Errors) -> tuple[float, float]:
    """The rms error in floors, and the worst measure in multiples of LIMIT floors; infinite for another shape, another integer or misplaced
    non-finite values.
    """
    if actual is None or actual.shape != expected.shape or np.iscomplexobj(actual):
        return np.inf, np.inf
    if not is_real(expected):
        return (0.0, 0.0) if np.array_equal(expected, actual) else (np.inf, np.inf)
    got = np.asarray(actual, np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(got), finite):
        return np.inf, np.inf
    error = Errors.of(np.subtract(got, expected, out=np.zeros_like(expected), where=finite))
    return error.over(floor).rms, error.headroom(floor.times(LIMIT))[0]


def _multiple(times: float) -> str:
    return f"{times:.3g} times the limit of its own noise" if np.isfinite(times) else "beyond any noise"
