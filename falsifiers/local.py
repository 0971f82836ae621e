"""One call held to the reference on its own inputs: its results, and its own gradients on its own cotangents. Errors made before do not show."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import reference
from contracts.model import Claim
from falsifiers.attack import Attack
from falsifiers.case import Case
from falsifiers.comparison import Errors
from falsifiers.precision import is_real, signatures
from falsifiers.subjects.protocol import Subject, TracedCall
from reference.table import Array, Arrays, Table

LIMIT = Errors(rms=4.0, row=6.0, max=6.0)
"""Multiples of a call's own noise floor. Of the honest implementation's calls inside models none comes near (`python -m benchmarks.diagnosis
--honest` measures it); a wrong formula is tens to millions of floors away."""


@dataclass(frozen=True)
class Suspicion:
    """What is wrong with a call: its operation and path, and why."""

    operation: str
    path: str
    explanation: str


@dataclass(frozen=True)
class Local:
    """Judges single calls of a subject in one dtype; `claim` and `seed` are those of the case that the calls come from."""

    claim: Claim
    subject: Subject
    dtype: str
    seed: int

    def results(self, call: TracedCall) -> Iterator[Suspicion]:
        """What is wrong with the call's results."""
        inputs, scalars = own(call)
        try:
            expected = reference.evaluate(call.operation, inputs, scalars)
        except (ValueError, FloatingPointError) as error:
            yield Suspicion(call.operation, call.path, f"answers where the reference refuses: {error}")
            return

        def rounded(entering: Arrays, table: Table) -> dict[str, Array]:
            return reference.evaluate(call.operation, entering, scalars, table)

        for name, times in self._excesses(call, inputs, rounded, expected, call.outputs):
            if times > 1:
                yield Suspicion(call.operation, call.path, f"from its own inputs, its {name} is {_multiple(times)} from the reference's")

    def gradients(self, call: TracedCall, wrt: Sequence[str]) -> Iterator[Suspicion]:
        """What is wrong with the call's own share of the gradients of its inputs in `wrt`."""
        names = [name for name in wrt if name in call.gradients]
        if not names or not call.cotangents:
            return
        inputs, scalars = own(call)
        upstream = {name: np.asarray(value, np.float64) for name, value in call.cotangents.items()}
        expected = reference.differentiate(call.operation, inputs, scalars, upstream, names)

        def rounded(entering: Arrays, table: Table) -> dict[str, Array]:
            held = next((value.dtype for value in entering.values() if is_real(value)), np.dtype(np.float64))
            cotangents = {name: value.astype(held) for name, value in upstream.items()}
            return reference.differentiate(call.operation, entering, scalars, cotangents, names, table)

        for name, times in self._excesses(call, inputs, rounded, expected, call.gradients):
            if times > 1:
                yield Suspicion(call.operation, call.path, f"the gradient of its {name} is {_multiple(times)} from the reference's")

    def alone(self, call: TracedCall, name: str) -> Array:
        """The subject's gradient of one input where it differentiates the call's operation by itself, outside any model."""
        inputs, scalars = own(call)
        upstream = {key: np.asarray(value, np.float64) for key, value in call.cotangents.items()}
        return self.subject.differentiate(call.operation, inputs, scalars, upstream, [name], self.dtype)[name]

    def _excesses(
        self, call: TracedCall, inputs: Mapping[str, Array], rounded: Any, expected: Arrays, actual: Arrays
    ) -> Iterator[tuple[str, float]]:
        """By name, the error in multiples of LIMIT noise floors; infinite for another shape or misplaced non-finite values."""
        case = Case(call.operation, self.dtype, {}, call.scalars, self.seed, "recorded", inputs)
        attack = Attack(replace(self.claim, operation=call.operation), self.subject, self.dtype)
        floors = attack.floor(case, rounded, expected)
        for name, value in expected.items():
            yield name, excess(value, actual.get(name), floors[name])


def own(call: TracedCall) -> tuple[dict[str, Array], dict[str, Any]]:
    """The call's own inputs in float64, and its scalars."""
    inputs = {name: np.asarray(value, np.float64) if is_real(value) else value for name, value in call.inputs.items()}
    signature = signatures()[call.operation]
    known = {*signature.scalars, *signature.attributes}
    return inputs, {name: value for name, value in call.scalars.items() if name in known}


def excess(expected: Array, actual: Array | None, floor: Errors) -> float:
    """The error in multiples of LIMIT floors; infinite for another shape, another integer or misplaced non-finite values."""
    if actual is None or actual.shape != expected.shape:
        return np.inf
    if not is_real(expected):
        return 0.0 if np.array_equal(expected, actual) else np.inf
    got = np.asarray(actual, np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(got), finite):
        return np.inf
    error = Errors.of(np.subtract(got, expected, out=np.zeros_like(expected), where=finite))
    return error.headroom(floor.times(LIMIT))[0]


def _multiple(times: float) -> str:
    return f"{times:.3g} times the limit of its own noise" if np.isfinite(times) else "beyond any noise"
