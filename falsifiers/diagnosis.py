"""Who is to blame for a falsified claim: the first call of the subject's trace that is wrong by itself, and the mutant that errs likewise.

Each recorded call is held to the reference on the call's own inputs, so an error does not travel; and to the reference's trace, so a call
that is missing, has another weight or scalar, or reads another value is found as well.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import reference
from contracts.model import Claim
from falsifiers.case import Case
from falsifiers.comparison import Comparison, Errors
from falsifiers.kinds.gradient import differentiable
from falsifiers.precision import STORAGE, UNIT_ROUNDOFF, compute_dtype, is_real, rounded_table, signatures
from falsifiers.subjects.protocol import Subject, TracedCall
from falsifiers.verdict import Culprit
from reference.table import Array, Arrays
from reference.tape import Call, Tape

LOCAL_FACTOR = 6.0
"""Multiples of a single call's noise floor that its own answer may differ by; a wrong formula is tens to thousands of floors away."""

SAME_ANSWER = 0.05
"""A mutant is named when its answer is this much closer to the subject's than the reference's is."""


def diagnose(claim: Claim, case: Case, comparison: Comparison | None, subject: Subject, left_out: Sequence[str] = ()) -> Culprit | None:
    """The culprit of a falsified claim on a case; mutants in `left_out` are not tried."""
    if claim.operation is None or signatures()[claim.operation].procedure:
        return None
    mutant, distance = _twin(claim, case, subject, left_out)
    if not signatures()[claim.operation].composition:
        where = comparison.tensor if comparison else ""
        return Culprit(claim.operation, claim.operation, f"its {where or 'answer'} leaves the tolerance", mutant, distance)
    found = next(_suspects(claim, case, subject), None)
    if found is None:
        explanation = "every operation that it calls is right by itself; what is wrong is the procedure around them"
        return Culprit(claim.operation, claim.operation, explanation, mutant, distance)
    operation, path, explanation = found
    return Culprit(operation, path, explanation, mutant, distance)


def _suspects(claim: Claim, case: Case, subject: Subject) -> Iterator[tuple[str, str, str]]:
    """Operation, path and explanation of everything that is wrong, the first in the order of the computation first."""
    assert claim.operation is not None
    differentiated = bool(signatures()[claim.operation].gradients) and claim.kind in ("gradient", "invariant")
    cotangents = case.cotangents if differentiated else None
    try:
        calls = subject.record(claim.operation, case.inputs, case.scalars, case.dtype, cotangents)
    except Exception as error:  # the subject may fail in its own way once more; the verdict has the message already
        yield claim.operation, claim.operation, f"raises {type(error).__name__}: {error}"
        return
    tape = reference.record(case.operation, case.inputs, case.scalars)
    yield from _forward(case, calls, tape)
    if differentiated:
        yield from _backward(case, calls)
        yield from _unreached(claim, case, tape, calls)


def _forward(case: Case, calls: Sequence[TracedCall], tape: Tape) -> Iterator[tuple[str, str, str]]:
    by_path = {call.path: call for call in calls}
    known = {call.path: call for call in tape.calls}
    for call in tape.calls if known.keys() & by_path.keys() else ():
        if call.path in by_path:
            yield from _wiring(case, call, by_path[call.path], tape, by_path)
        elif not any(path.endswith(call.path) for path in by_path):
            yield call.operation, call.path, "is not called"
    for traced in calls:
        if traced.path not in known:
            yield from _local(case, traced)


def _wiring(case: Case, call: Call, traced: TracedCall, tape: Tape, by_path: Mapping[str, TracedCall]) -> Iterator[tuple[str, str, str]]:
    """Inputs, parameters and scalars of one call against the reference's, then its own answer."""
    produced = {result: (other.path, output) for other in tape.calls for output, result in other.results.items()}
    for name, value in call.inputs.items():
        if name not in traced.inputs:
            yield call.operation, call.path, f"is called without {name}"
            continue
        source = tape.views.get(value, value)
        if source in produced:
            path, output = produced[source]
            made = by_path[path].outputs[output] if path in by_path else None
            if made is not None and not _close(made, traced.inputs[name]):
                yield call.operation, call.path, f"reads a {name} that is not what {path} gave"
        elif not _close(_as_stored(tape.values[value], case.dtype), traced.inputs[name]):
            yield call.operation, call.path, f"is called with another {name} than {value}"
    for name, scalar in call.scalars.items():
        given = traced.scalars.get(name)
        if isinstance(scalar, int | float) and isinstance(given, int | float) and not np.isclose(given, scalar, rtol=1e-6, atol=0):
            yield call.operation, call.path, f"is called with {name} = {given:g}; the configuration has {scalar:g}"
    yield from _local(case, traced)


def _local(case: Case, traced: TracedCall) -> Iterator[tuple[str, str, str]]:
    """The call's answer from its own inputs, against the reference's and its noise floor."""
    inputs, scalars = _own(traced)
    try:
        expected = reference.evaluate(traced.operation, inputs, scalars)
    except (ValueError, FloatingPointError) as error:
        yield traced.operation, traced.path, f"answers where the reference refuses: {error}"
        return
    rounded = reference.evaluate(traced.operation, _computing(inputs, case.dtype), scalars, rounded_table(reference.TABLE, case.dtype))
    for name, value in expected.items():
        excess = _excess(value, rounded[name], traced.outputs.get(name), case.dtype)
        if excess > LOCAL_FACTOR:
            yield traced.operation, traced.path, f"from its own inputs, {name} is {excess:.3g} noise floors from the reference's"


def _backward(case: Case, calls: Sequence[TracedCall]) -> Iterator[tuple[str, str, str]]:
    """Each call's own gradients from its own inputs and cotangents, the last call first."""
    for traced in reversed(calls):
        wrt = [name for name in signatures()[traced.operation].gradients if name in traced.gradients]
        if not wrt or not traced.cotangents:
            continue
        inputs, scalars = _own(traced)
        upstream = {name: np.asarray(value, np.float64) for name, value in traced.cotangents.items()}
        expected = reference.differentiate(traced.operation, inputs, scalars, upstream, wrt)
        low, table = _computing(inputs, case.dtype), rounded_table(reference.TABLE, case.dtype)
        rounded = reference.differentiate(traced.operation, low, scalars, _computing(upstream, case.dtype), wrt, table)
        for name in wrt:
            excess = _excess(expected[name], rounded[name], traced.gradients[name], case.dtype)
            if excess > LOCAL_FACTOR:
                yield traced.operation, traced.path, f"the gradient of its {name} is {excess:.3g} noise floors from the reference's"


def _unreached(claim: Claim, case: Case, tape: Tape, calls: Sequence[TracedCall]) -> Iterator[tuple[str, str, str]]:
    """Calls whose output gets a gradient in the reference and none in the subject, the last one first."""
    del claim
    wrt = differentiable(signatures()[case.operation], case)
    arrived = tape.backward(case.cotangents)
    by_path = {call.path: call for call in calls}
    for call in reversed(tape.calls):
        result = next(iter(call.results.values()))
        traced = by_path.get(call.path)
        if traced is None or result not in arrived or not wrt:
            continue
        got = np.asarray(next(iter(traced.cotangents.values()), np.zeros(())), np.float64)
        if np.any(arrived[result]) and not np.any(got):
            yield call.operation, call.path, "no gradient reaches its result"


def _own(traced: TracedCall) -> tuple[dict[str, Array], dict[str, Any]]:
    inputs = {name: np.asarray(value, np.float64) if is_real(value) else value for name, value in traced.inputs.items()}
    known = {*signatures()[traced.operation].scalars, *signatures()[traced.operation].attributes}
    return inputs, {name: value for name, value in traced.scalars.items() if name in known}


def _computing(arrays: Arrays, dtype: str) -> dict[str, Array]:
    return {name: value.astype(compute_dtype(dtype)) if is_real(value) else value for name, value in arrays.items()}


def _as_stored(value: Array, dtype: str) -> Array:
    return value.astype(STORAGE[dtype]) if is_real(value) else value


def _close(one: Array, other: Array) -> bool:
    """Equal up to two roundings of the coarser of the two dtypes."""
    if one.size != other.size:
        return False
    unit = max(UNIT_ROUNDOFF.get(str(array.dtype), 0.0) for array in (one, other))
    a, b = (np.asarray(value, np.float64).reshape(-1) for value in (one, other))
    return bool(np.all(np.abs(a - b) <= 2 * unit * np.maximum(np.abs(a), np.abs(b)), where=np.isfinite(a) & np.isfinite(b)))


def _excess(expected: Array, rounded: Array, actual: Array | None, dtype: str) -> float:
    """The rms error in noise floors of the call; infinite for another shape or misplaced non-finite values."""
    if actual is None or actual.shape != expected.shape:
        return np.inf
    got = np.asarray(actual, np.float64)
    if not is_real(expected):
        return 0.0 if np.array_equal(expected, actual) else np.inf
    if not np.array_equal(np.isfinite(got), np.isfinite(expected)):
        return np.inf
    finite = np.isfinite(expected)
    wanted = np.where(finite, expected, 0.0)
    noise = Errors.of(np.where(finite, rounded.astype(np.float64) - wanted, 0.0)).at_least(Errors.of(wanted).times(UNIT_ROUNDOFF[dtype]))
    error = Errors.of(np.where(finite, got - wanted, 0.0))
    if error.rms == 0:
        return 0.0
    tiny = UNIT_ROUNDOFF["float32"] * 1e-3
    return error.rms / noise.rms if noise.rms > 0 else (np.inf if error.rms > tiny else 0.0)


def _twin(claim: Claim, case: Case, subject: Subject, left_out: Iterable[str]) -> tuple[str | None, float | None]:
    """The mutant whose answer on the case is the subject's, and the relative distance of the two."""
    from falsifiers.mutants import reaching
    from falsifiers.mutants import subject as mutated

    assert claim.operation is not None
    actual = _answer(subject, claim, case)
    exact = _answer(mutated_reference(), claim, case)
    if actual is None or exact is None:
        return None, None
    best: tuple[str | None, float | None] = (None, None)
    closest = SAME_ANSWER * _distance(actual, exact)
    for mutant in reaching(claim.operation):
        answer = None if mutant.name in left_out else _answer(mutated(mutant.name), claim, case)
        if answer is not None and (away := _distance(actual, answer)) < closest:
            closest, best = away, (mutant.name, away)
    return best


def mutated_reference() -> Subject:
    """The reference itself under rounding, the mutant that is none."""
    from falsifiers.subjects.reference import ReferenceSubject

    return ReferenceSubject()


def _answer(subject: Subject, claim: Claim, case: Case) -> dict[str, Array] | None:
    try:
        if claim.kind == "gradient":
            wrt = differentiable(signatures()[case.operation], case)
            return subject.differentiate(case.operation, case.inputs, case.scalars, case.cotangents, wrt, case.dtype)
        return subject.run(case.operation, case.inputs, case.scalars, case.dtype)
    except Exception:  # a mutant may refuse the case; then it is not the twin
        return None


def _distance(one: Arrays, other: Arrays) -> float:
    """The largest relative rms difference of two answers over their tensors; infinite where they have other names or shapes."""
    if set(one) != set(other):
        return np.inf
    worst = 0.0
    for name, value in one.items():
        a, b = np.asarray(value, np.float64), np.asarray(other[name], np.float64)
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return np.inf
        finite = np.isfinite(a)
        scale = Errors.of(np.where(finite, a, 0.0)).rms + Errors.of(np.where(finite, b, 0.0)).rms
        if scale:
            worst = max(worst, 2 * Errors.of(np.where(finite, a - b, 0.0)).rms / scale)
    return worst
