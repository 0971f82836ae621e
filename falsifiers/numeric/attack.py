"""One claim's attack: runs reference and subject on a case, keeps the time of each, and knows the limits of the claim's tolerance."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.contracts.model import Claim, Signature, Tolerance
from blackswan.falsifiers.numeric.answers import SubjectError, asked, require_finite
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare, compare_exactly, rejected, same_structure
from blackswan.falsifiers.numeric.precision import (
    UNIT_ROUNDOFF,
    Declared,
    checks,
    compute_dtype,
    declared_by,
    is_real,
    output_dtypes,
    rounded_table,
    signature_of,
    signatures,
)
from blackswan.falsifiers.numeric.sign_ambiguity import mask_ambiguous, moved, reach, sign_ambiguity
from blackswan.falsifiers.subjects.protocol import COTANGENT, Subject
from blackswan.reference.table import Array, Arrays, Table

STAGES = ("drawing", "reference", "noise", "subject", "comparison")
REPLAYS, REPLAYS_OF_FEW, FEW_ELEMENTS = 2, 6, 32
THOROUGH_REPLAYS, THOROUGH_REPLAYS_OF_COMPOSITIONS = 48, 24
NEARLY = 8.0
"""An answer that misses its tolerance by less than this is judged again by a floor of many replays: the largest of a few errors is small by
luck now and then, and a thousand seeds meet such a case."""
SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)
"""The smallest normal number of float32 and of bfloat16, which share their exponents. Libraries may flush smaller ones to zero."""

SIGNAL_SHARE = 0.1
"""A floor above this share of the signal proves nothing: the case is rejected for that tensor, which has yet to be noise of that size."""

Replay = tuple[dict[str, Errors], dict[str, Array]]
"""One run under rounding: the errors of its tensors, and the differences of those whose errors are taken once the others are known."""

Floors = Callable[[], Mapping[str, Errors]]
"""Measures the noise floor of each tensor, by as many replays as the attack asks for."""


@dataclass
class Stopwatch:
    """Seconds by stage; of a stage inside another, to the inner one alone."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    _inner: float = 0.0

    @contextmanager
    def on(self, stage: str) -> Iterator[None]:
        """Adds the time inside to a stage."""
        start, beside, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[stage] += spent - self._inner
            self._inner = beside + spent


@dataclass
class Attack:
    """A claim against a subject in one dtype. With `only_compared` an answer with NaN is left to what the claim's check compares.
    A `sparing` one measures no more of the noise floor than it takes to see that an answer is right.

    The reference and the noise floor follow `declared`, which is what the subject declares, unless something else is assumed of it.
    `asked` has the last call of each method of a door, in words.
    """

    claim: Claim
    subject: Subject
    dtype: str
    watch: Stopwatch = field(default_factory=Stopwatch)
    thorough: bool = False
    sparing: bool = True
    only_compared: bool = False
    memory: dict[str, dict[tuple[Any, ...], Any]] = field(default_factory=dict)
    assumed: Declared | None = None
    asked: dict[str, str] = field(default_factory=dict)
    _at_most: int = REPLAYS_OF_FEW

    def __post_init__(self) -> None:
        """Asks the subject once what it declares."""
        self.declared = declared_by(self.subject) if self.assumed is None else self.assumed
        self.table = reference.table_of(self.declared)

    @property
    def signature(self) -> Signature:
        """The signature of the claim's operation, as what is declared makes it."""
        assert self.claim.operation is not None
        return signature_of(self.claim.operation, self.declared)

    def follows(self, convention: str, value: str) -> bool:
        """Whether that is declared of the claim's operation."""
        return self.declared.get(self.claim.operation or "", {}).get(convention) == value

    @property
    def tolerance(self) -> Tolerance:
        """The claim's tolerance; asking for one that is not there is an error of the contract."""
        if self.claim.tolerance is None:
            raise ValueError(f"{self.claim.id}: check {self.claim.check!r} needs a tolerance")
        return self.claim.tolerance

    def expect(self, case: Case, operation: str | None = None, **changes: Any) -> dict[str, Array]:
        """The reference's float64 outputs, with some inputs or scalars replaced."""
        inputs, scalars = _changed(case, changes)

        def evaluate() -> dict[str, Array]:
            with self.watch.on("reference"):
                return _fixed(reference.evaluate(operation or case.operation, inputs, scalars, self.table))

        key = ("outputs", operation, replace(case, inputs=inputs, scalars=scalars, cotangents={}).digest if changes else None)
        return dict(self.once(case, key, evaluate))

    def answer(self, case: Case, operation: str | None = None, **changes: Any) -> dict[str, Array]:
        """The subject's outputs, with some inputs or scalars replaced. SubjectError where it raises."""
        inputs, scalars = _changed(case, changes)
        with self.watch.on("subject"):
            answer = asked(inputs, lambda given: self.subject.run(operation or case.operation, given, scalars, self.dtype))
        outputs = signatures()[operation or case.operation].outputs
        missing = [name for name, output in outputs.items() if output.group is None and name not in answer]
        if missing:
            raise SubjectError(f"answered without {missing[0]}; it has {', '.join(sorted(answer)[:6]) or 'nothing'}")
        return self._finite(answer)

    def expect_gradients(self, case: Case, wrt: Sequence[str]) -> dict[str, Array]:
        """The reference's float64 gradients."""

        def differentiate() -> dict[str, Array]:
            with self.watch.on("reference"):
                return _fixed(reference.differentiate(case.operation, case.inputs, case.scalars, case.cotangents, wrt, self.table))

        return dict(self.once(case, ("gradients", *wrt), differentiate))

    def answer_gradients(self, case: Case, wrt: Sequence[str], **changes: Any) -> dict[str, Array]:
        """The subject's gradients. SubjectError where it raises."""
        inputs, scalars = _changed(case, changes)

        def ask(given: dict[str, Array]) -> object:
            upstream = {name: given.pop(f"{COTANGENT}{name}") for name in case.cotangents}
            return self.subject.differentiate(case.operation, given, scalars, upstream, wrt, self.dtype)

        with self.watch.on("subject"):
            return self._finite(asked({**inputs, **{f"{COTANGENT}{name}": value for name, value in case.cotangents.items()}}, ask))

    def answer_at(self, case: Case, count: int, rows: Sequence[int], gradients: bool) -> dict[str, Array]:
        """Some rows of the subject's outputs, or gradients, for the case's rows repeated to `count`. SubjectError where it raises."""
        cotangents = {f"{COTANGENT}{name}": value for name, value in case.cotangents.items()} if gradients else {}

        def ask(given: dict[str, Array]) -> object:
            upstream = {name.removeprefix(COTANGENT): given.pop(name) for name in cotangents}
            return self.subject.at_rows(case.operation, given, case.scalars, self.dtype, count, rows, upstream if gradients else None)

        self.asked["at_rows"] = f"for {count:,} rows, which repeat those of the case"
        with self.watch.on("subject"):
            return self._finite(asked({**case.inputs, **cotangents}, ask))

    def _finite(self, answer: dict[str, Array]) -> dict[str, Array]:
        """A check may compare answers of the subject with each other, where NaN equals NaN; plain parity has the reference's to go by."""
        if self.claim.check is not None and not self.only_compared:
            require_finite(answer, checks()[self.claim.check].non_finite)
        return answer

    def floor(self, case: Case, run: "Run", expected: Arrays) -> dict[str, Errors]:
        """The error that honest arithmetic in this dtype makes on the case, a tensor: nearest rounding, the worst of the random replays,
        and half an ulp of the answer or its flushed numbers, whichever is largest. `run` is known by what it gives without rounding."""
        view = replace(case, inputs=dict(expected), cotangents={}).digest
        with self.watch.on("noise"):
            replays: list[Replay] = self.once(case, ("replays", view), list)
            inputs = {name: value.astype(compute_dtype(self.dtype)) if is_real(value) else value for name, value in case.inputs.items()}
            while len(replays) <= (wanted := self._replays(expected)):
                generator = np.random.default_rng([case.seed, len(replays) - 1]) if replays else None
                table = rounded_table(self.table, self.dtype, generator, self.signature.composition, self.declared)
                replays.append(_replay(run(inputs, table), expected, moved(self.signature, expected)))
            return self._worst(replays[: wanted + 1], expected)

    def _worst(self, replays: Sequence[Replay], expected: Arrays) -> dict[str, Errors]:
        """The largest errors; of a parameter whose moment is noise, those where its moment is not."""
        floors = {name: self._half_ulp(name, value) for name, value in expected.items()}
        for errors, _ in replays:
            floors |= {name: floors[name].at_least(each) for name, each in errors.items()}
        left_open = sign_ambiguity(self.signature, expected, floors)
        for _, late in replays:
            for name, difference in late.items():
                floors[name] = floors[name].at_least(_errors(np.where(left_open[name], 0.0, difference), expected[name]))
        return floors

    def once(self, case: Case, what: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """A value that does not depend on the subject, computed once a case. It is forgotten when the next case comes."""
        if case.digest not in self.memory:
            self.memory.clear()
        known = self.memory.setdefault(case.digest, {})
        if what not in known:
            known[what] = compute()
        return known[what]

    def reach(self, case: Case) -> float:
        """The distance from the expected answer that a parameter may have where rounding alone says which way the case's steps moved it."""
        return reach(self.signature, case.scalars)

    def _replays(self, expected: Arrays) -> int:
        """More where a tensor has few elements: the one error of a number may be small by luck. A composition averages its own."""
        if self.thorough:
            return THOROUGH_REPLAYS_OF_COMPOSITIONS if self.signature.composition else THOROUGH_REPLAYS
        fewest = min((value.size for value in expected.values()), default=0)
        few = fewest <= (1 if self.signature.composition else FEW_ELEMENTS)
        return min(self._at_most, REPLAYS_OF_FEW if few else REPLAYS)

    def judge(
        self,
        expected: Arrays,
        actual: Arrays,
        floors: Floors,
        dtypes: Mapping[str, np.dtype[Any]],
        reach: float = 0.0,
    ) -> list[Comparison]:
        """Compares an answer with the expected one under the claim's tolerance. `floors` is called only when it is needed. `reach` is how
        far from the expected answer a parameter may be where rounding alone says which way it moved."""
        if found := same_structure(expected, actual, dtypes):
            return found
        basis = self.tolerance.basis
        if basis == "exact":
            return [compare_exactly(name, value.astype(dtypes[name]), actual[name]) for name, value in expected.items()]
        if basis == "literal":
            return [compare(name, value, actual[name], self.literal(value), self._unit(name)) for name, value in expected.items()]
        held_to = partial(self._held_to, floors, expected, actual, reach)
        return self.judge_with_retry(held_to if not self.sparing else lambda: self._judge_by_fewest(held_to))

    def _judge_by_fewest(self, judged: Callable[[], list[Comparison]]) -> list[Comparison]:
        """With one replay more at a time, until the answer is right: a replay only raises a floor, so it is right by all of them too."""
        try:
            for most in range(REPLAYS_OF_FEW * self.thorough, REPLAYS_OF_FEW + 1):
                self._at_most = most
                found = judged()
                if all(comparison.held for comparison in found):
                    break
            return found
        finally:
            self._at_most = REPLAYS_OF_FEW

    def judge_with_retry(self, judged: Callable[[], list[Comparison]]) -> list[Comparison]:
        """Calls `judged` with a floor of a few replays; and again, with one of many, where the answer misses by little."""
        found = judged()
        if all(comparison.held or comparison.headroom > NEARLY for comparison in found):
            return found
        self.thorough = True
        try:
            return judged()
        finally:
            self.thorough = False

    def _held_to(self, floors: Floors, expected: Arrays, actual: Arrays, reach: float) -> list[Comparison]:
        noise = floors()
        left_open = sign_ambiguity(self.signature, expected, noise) if self.claim.operation else {}
        wanted = {**expected, **{name: mask_ambiguous(expected[name], actual[name], where, reach) for name, where in left_open.items()}}
        nothing_left = {name for name, where in left_open.items() if where.all() and np.array_equal(wanted[name], actual[name])}
        return [
            rejected(name) if name in nothing_left else self._judged(name, wanted[name], actual[name], noise[name]) for name in expected
        ]

    def _judged(self, name: str, expected: Array, actual: Array, floor: Errors) -> Comparison:
        if not is_real(expected):
            return compare_exactly(name, expected, actual)
        finite = np.where(np.isfinite(expected), expected, 0.0)
        if not floor.rms <= SIGNAL_SHARE * Errors.of(finite).rms and floor.max != 0:
            return self._judge_below_noise(name, expected, actual, floor)
        return self.within(name, expected, actual, floor)

    def _judge_below_noise(self, name: str, expected: Array, actual: Array, floor: Errors) -> Comparison:
        """Rejected, for it proves nothing that it is right; wrong it is if it holds what no noise of this size can be, or NaN."""
        limit = floor.times(self.factors()).times(NEARLY) if np.isfinite(floor.max) else Errors.flat(np.inf)
        beyond = compare(name, expected, actual, limit, self._unit(name))
        return rejected(name) if beyond.held else beyond

    def within(self, name: str, expected: Array, actual: Array, floor: Errors) -> Comparison:
        """Compares a tensor with the claim's factors times its noise floor."""
        return compare(name, expected, actual, floor.times(self.factors()), self._unit(name))

    def factors(self) -> Errors:
        """The calibrated factors of a rounding tolerance, for this dtype."""
        if self.dtype not in self.tolerance.factors:
            raise ValueError(f"{self.claim.id} has no factors for {self.dtype}; it has them for {', '.join(self.tolerance.factors)}")
        return Errors(**vars(self.tolerance.factors[self.dtype]))

    def literal(self, expected: Array) -> Errors:
        """The limit of a literal tolerance: absolute, or relative to the tensor's largest magnitude."""
        value = float(self.tolerance.value or 0.0)
        if self.tolerance.unit == "relative":
            finite = expected[np.isfinite(expected)]
            value *= float(np.max(np.abs(finite))) if finite.size else 0.0
        return Errors.flat(value)

    def dtypes(self, expected: Arrays) -> dict[str, np.dtype[Any]]:
        """The dtype that each output must come back in."""
        return output_dtypes(self.signature, expected, self.dtype)

    def _unit(self, name: str) -> float:
        known = self.claim.operation is not None and name.split("/", 1)[0] in self.signature.outputs
        held = str(output_dtypes(self.signature, [name], self.dtype)[name]) if known else self.dtype
        return UNIT_ROUNDOFF.get(held, UNIT_ROUNDOFF["float32"])

    def _half_ulp(self, name: str, expected: Array) -> Errors:
        if not is_real(expected):
            return Errors.flat(0.0)
        finite = expected if np.isfinite(expected).all() else expected[np.isfinite(expected)]
        output = self.signature.outputs.get(name.split("/", 1)[0])
        half = Errors.of(finite).at_least(Errors.flat(output.order if output else 0.0)).times(self._unit(name))
        return half.at_least(Errors.of(np.where(np.abs(finite) < SMALLEST_NORMAL, finite, 0.0)))


Run = Callable[[Arrays, Table], dict[str, Array]]
"""The reference on inputs, with a table: its outputs, its gradients, or a view of them."""


def rounded_outputs(case: Case) -> Run:
    """The operation's outputs on the case."""
    return lambda inputs, table: reference.evaluate(case.operation, inputs, case.scalars, table)


def rounded_gradients(case: Case, wrt: Sequence[str]) -> Run:
    """The gradients of the case with respect to the inputs in `wrt`, from its cotangents in the dtype of the inputs."""

    def run(inputs: Arrays, table: Table) -> dict[str, Array]:
        held = next((value.dtype for value in inputs.values() if is_real(value)), np.dtype(np.float64))
        upstream = {name: np.asarray(value, held) for name, value in case.cotangents.items()}
        return reference.differentiate(case.operation, inputs, case.scalars, upstream, wrt, table)

    return run


def _replay(found: Arrays, expected: Arrays, late: Collection[str]) -> Replay:
    with np.errstate(invalid="ignore"):
        differences = {name: value.astype(np.float64) - expected[name] for name, value in found.items()}
    errors = {name: _errors(value, expected[name]) for name, value in differences.items() if name not in late}
    return errors, {name: differences[name] for name in late if name in differences}


def _errors(difference: Array, expected: Array) -> Errors:
    finite = np.isfinite(expected)
    return Errors.of(difference if finite.all() else difference[finite])


def _fixed(found: dict[str, Array]) -> dict[str, Array]:
    """Arrays that nobody may write to: what is computed once is handed out again."""
    for value in found.values():
        value.flags.writeable = False
    return found


def _changed(case: Case, changes: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    inputs = {**case.inputs, **changes.get("inputs", {})}
    return {name: value for name, value in inputs.items() if value is not None}, {**case.scalars, **changes.get("scalars", {})}
