"""The mutant that errs as the subject does: the one whose answers to the same questions are the subject's, within noise."""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import reference
from contracts.model import Claim
from falsifiers.attack import Attack, SubjectError
from falsifiers.case import Case
from falsifiers.comparison import Errors
from falsifiers.kinds import KINDS
from falsifiers.mutants import MUTANTS, USES, reaching
from falsifiers.mutants import subject as mutated
from falsifiers.precision import UNIT_ROUNDOFF, is_real
from falsifiers.subjects.protocol import Subject, TracedCall
from reference.table import Array, Arrays, Table

SAME_NOISE = 6.0
"""Noise floors that two honest computations of one (wrong) formula may be apart, in the worst tensor."""

SAME_SHARE = 0.05
"""And the share of the error that they may be apart where the error is large: a wrong model has another noise than the right one."""

SECONDS = 15.0
"""Time for the mutants that are not of the operation that the traces name."""


@dataclass(frozen=True)
class Question:
    """What a claim asked of the subject: an operation on a case, or its gradients with respect to `wrt`."""

    case: Case
    wrt: tuple[str, ...] | None = None

    def ask(self, subject: Subject) -> dict[str, Array] | None:
        """The answer; None where the subject raises."""
        case = self.case
        try:
            if self.wrt is None:
                return subject.run(case.operation, case.inputs, case.scalars, case.dtype)
            return subject.differentiate(case.operation, case.inputs, case.scalars, case.cotangents, self.wrt, case.dtype)
        except Exception:  # whatever a subject raises is an answer of its own kind
            return None

    def run(self, inputs: Arrays, table: Table) -> dict[str, Array]:
        """The reference's answer, with a table."""
        case = self.case
        if self.wrt is None:
            return reference.evaluate(case.operation, inputs, case.scalars, table)
        held = next((value.dtype for value in inputs.values() if is_real(value)), np.dtype(np.float64))
        upstream = {name: np.asarray(value, held) for name, value in case.cotangents.items()}
        return reference.differentiate(case.operation, inputs, case.scalars, upstream, self.wrt, table)


    def floors(self, claim: Claim, subject: Subject, exact: Arrays) -> dict[str, Errors]:
        """The noise floor of each tensor of the answer."""
        attack = Attack(replace(claim, operation=self.case.operation), subject, self.case.dtype)
        return attack.floor(self.case, self.run, exact)


@dataclass
class Listener:
    """A subject that keeps what it is asked."""

    subject: Subject
    case: Case
    questions: list[Question] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Answers under the subject's name."""
        self.name, self.device = self.subject.name, self.subject.device

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """As the subject."""
        return self.subject.unsupported(operation, dtype)

    def run(self, operation: str, inputs: Arrays, scalars: Any, dtype: str) -> dict[str, Array]:
        """As the subject."""
        self._keep(operation, inputs, scalars, {}, None)
        return self.subject.run(operation, inputs, scalars, dtype)

    def differentiate(
        self, operation: str, inputs: Arrays, scalars: Any, cotangents: Arrays, wrt: Sequence[str], dtype: str
    ) -> dict[str, Array]:
        """As the subject."""
        self._keep(operation, inputs, scalars, cotangents, tuple(wrt))
        return self.subject.differentiate(operation, inputs, scalars, cotangents, wrt, dtype)

    def record(self, operation: str, inputs: Arrays, scalars: Any, dtype: str, cotangents: Arrays | None = None) -> list[TracedCall]:
        """As the subject."""
        return self.subject.record(operation, inputs, scalars, dtype, cotangents)

    def default_configurations(self, model_params: float) -> list[dict[str, Any]]:
        """As the subject."""
        return self.subject.default_configurations(model_params)

    def _keep(self, operation: str, inputs: Arrays, scalars: Any, cotangents: Arrays, wrt: tuple[str, ...] | None) -> None:
        asked = replace(self.case, operation=operation, inputs=dict(inputs), scalars=dict(scalars), cotangents=dict(cotangents))
        self.questions.append(Question(asked, wrt))


def questions(claim: Claim, case: Case, subject: Subject) -> list[Question]:
    """What the claim asks of the subject on the case, up to the first question that it raises on."""
    listener = Listener(subject, case)
    try:
        KINDS[claim.kind](Attack(claim, listener, case.dtype), case)
    except SubjectError:
        pass
    return listener.questions


@dataclass
class _Target:
    """The subject's answer to a question, the reference's, and the noise floor of each tensor."""

    actual: dict[str, Array] | None
    exact: dict[str, Array] | None
    floors: dict[str, float]

    def apart(self, answer: Arrays | None) -> float:
        """The worst tensor's rms difference from the subject's answer, in noise floors."""
        if answer is None or self.actual is None:
            return 0.0 if answer is self.actual else np.inf
        if set(answer) != set(self.actual):
            return np.inf
        return max((_apart(value, self.actual[name], self.floors.get(name)) for name, value in answer.items()), default=0.0)

    def distance(self, answer: Arrays | None) -> float:
        """The largest relative rms difference over the tensors that the reference's answer misses."""
        if answer is None or self.actual is None:
            return 0.0
        wrong = [n for n in answer if self.exact is None or _apart(self.exact[n], self.actual[n], self.floors.get(n)) > SAME_NOISE]
        return max((_relative(answer[name], self.actual[name]) for name in wrong), default=0.0)


def find(claim: Claim, asked: Sequence[Question], subject: Subject, operation: str, left_out: Collection[str]) -> tuple[str | None, float | None]:
    """The mutant and its distance from the subject's answer; those of `operation` first, the others if none of them is it."""
    targets = [(question, _target(claim, question, subject)) for question in asked]
    wrong = max((target.apart(target.exact) for _, target in targets), default=0.0)
    limit = min(max(SAME_NOISE, SAME_SHARE * wrong), wrong / 2)
    reached = {mutant.name: mutant for question in asked for mutant in reaching(question.case.operation) if mutant.name not in left_out}
    own = [name for name, mutant in reached.items() if mutant.operation == operation]
    return (
        _closest(own, targets, limit, time.perf_counter() + SECONDS)
        or _closest([name for name in _ordered(reached) if name not in own], targets, limit, time.perf_counter() + SECONDS)
        or (None, None)
    )


def _ordered(names: Iterable[str]) -> list[str]:
    """Wrong compositions first: an operation that the traces do not name is hardly the wrong one."""
    return sorted(names, key=lambda name: MUTANTS[name].operation not in USES)


def _closest(names: Iterable[str], targets: Sequence[tuple[Question, _Target]], limit: float, deadline: float) -> tuple[str, float] | None:
    best: tuple[float, str, float] | None = None
    for name in names:
        if time.perf_counter() > deadline:
            break
        away, distance, mutant = 0.0, 0.0, mutated(name)
        for question, target in targets:
            answer = question.ask(mutant)
            away, distance = max(away, target.apart(answer)), max(distance, target.distance(answer) if target.apart(answer) < np.inf else np.inf)
            if away > limit:
                break
        if away <= limit and (best is None or away < best[0]):
            best = (away, name, distance)
    return best and (best[1], best[2])


def _target(claim: Claim, question: Question, subject: Subject) -> _Target:
    actual = question.ask(subject)
    case = question.case
    try:
        exact = question.run(case.inputs, reference.TABLE)
    except (ValueError, FloatingPointError):
        return _Target(actual, None, {})
    return _Target(actual, exact, {name: floor.rms for name, floor in question.floors(claim, subject, exact).items()})


def _apart(one: Array, other: Array, floor: float | None) -> float:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf
    finite = np.isfinite(a)
    rms = Errors.of(np.where(finite, a - b, 0.0)).rms
    if floor is None:
        floor = UNIT_ROUNDOFF.get(str(other.dtype), 0.0) * Errors.of(np.where(finite, b, 0.0)).rms
    return rms / floor if floor > 0 else (0.0 if rms == 0 else np.inf)


def _relative(one: Array, other: Array) -> float:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    scale = max(Errors.of(np.where(finite, a, 0.0)).rms, Errors.of(np.where(finite, b, 0.0)).rms)
    return Errors.of(np.where(finite, a - b, 0.0)).rms / scale if scale else 0.0
