"""The mutant that errs as the subject does: the one whose answers to the same questions are the subject's, within noise."""

import copy
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.contracts.model import Claim
from blackswan.falsifiers.diagnosis.local import LIMIT
from blackswan.falsifiers.diagnosis.local import own as own_arguments
from blackswan.falsifiers.mutants import USES, reaching
from blackswan.falsifiers.mutants import subject as mutated
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.attack import Attack, rounded_gradients, rounded_outputs
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.falsifiers.numeric.kinds import KINDS
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF, declared_by, signatures
from blackswan.falsifiers.numeric.sign_ambiguity import mask_ambiguous, reach, sign_ambiguity
from blackswan.falsifiers.subjects.protocol import Subject, TracedCall
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference.table import Array, Arrays, Table

SAME_NOISE = 6.0
"""Noise floors that two honest computations of one (wrong) formula may be apart, in the worst tensor."""

SAME_SHARE = 0.01
"""And the share of the error that they may be apart where the error is large: a wrong model has another noise than the right one."""

CLEARLY_CLOSER = 3.0
"""Where the error is small, a mutant's answer must be this many times closer to the subject's than the reference's is: every mutant that
does not show on the case shares what is left of an honest error."""

SECONDS = 15.0
"""Time for each of the two rounds of mutants; on a large model not all of them get their turn."""


@dataclass(frozen=True)
class Question:
    """A question of a claim to the subject: an operation on a case, or its gradients with respect to `wrt`."""

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
        run = rounded_outputs(self.case) if self.wrt is None else rounded_gradients(self.case, self.wrt)
        return run(inputs, table)

    def floors(self, claim: Claim, subject: Subject, exact: Arrays) -> dict[str, Errors]:
        """The noise floor of each tensor of the answer."""
        attack = Attack(replace(claim, operation=self.case.operation), subject, self.case.dtype)
        return attack.floor(self.case, self.run, exact)


def questions(claim: Claim, case: Case, subject: Subject) -> list[Question]:
    """The claim's questions to the subject on the case, up to the first one that it raises on."""
    found: list[Question] = []

    def keep(operation: str, inputs: Arrays, scalars: Any, cotangents: Arrays, wrt: Sequence[str] | None) -> None:
        asked = replace(case, operation=operation, inputs=dict(inputs), scalars=dict(scalars), cotangents=dict(cotangents))
        found.append(Question(asked, None if wrt is None else tuple(wrt)))

    def run(operation: str, inputs: Arrays, scalars: Any, dtype: str) -> dict[str, Array]:
        keep(operation, inputs, scalars, {}, None)
        return subject.run(operation, inputs, scalars, dtype)

    def differentiate(operation: str, inputs: Arrays, scalars: Any, cotangents: Arrays, wrt: Sequence[str], dtype: str) -> dict[str, Array]:
        keep(operation, inputs, scalars, cotangents, wrt)
        return subject.differentiate(operation, inputs, scalars, cotangents, wrt, dtype)

    listening = copy.copy(subject)
    vars(listening).update(run=run, differentiate=differentiate)
    with suppress(SubjectError):
        KINDS[claim.kind](Attack(claim, listening, case.dtype), case)
    return found


@dataclass
class _Target:
    """The subject's answer to a question, the reference's, and the noise floor of each tensor."""

    actual: dict[str, Array] | None
    exact: dict[str, Array] | None
    floors: dict[str, float]
    left_open: dict[str, Array] = field(default_factory=dict)
    """Places where rounding alone says which way a parameter moved: there two answers within `reach` of each other count as the same."""
    reach: float = 0.0

    def apart(self, answer: Arrays | None) -> float:
        """The worst tensor's rms difference from the subject's answer, in noise floors."""
        if answer is None or self.actual is None:
            return 0.0 if answer is self.actual else np.inf
        if set(answer) != set(self.actual):
            return np.inf
        return max((self._apart(name, value) for name, value in answer.items()), default=0.0)

    def distance(self, answer: Arrays | None) -> float:
        """The largest relative rms difference over the tensors that the reference's answer misses."""
        if answer is None or self.actual is None:
            return 0.0
        wrong = [name for name in answer if self.exact is None or self._apart(name, self.exact[name]) > SAME_NOISE]
        return max((_relative(answer[name], self.actual[name]) for name in wrong), default=0.0)

    def _apart(self, name: str, value: Array) -> float:
        assert self.actual is not None
        actual = self.actual[name]
        if name in self.left_open and value.shape == actual.shape:
            value = mask_ambiguous(value, actual, self.left_open[name], self.reach)
        return _apart(value, actual, self.floors.get(name))


def find(
    claim: Claim, asked: Sequence[Question], subject: Subject, operation: str, left_out: Collection[str]
) -> tuple[str | None, float | None]:
    """The mutant and its distance from the subject's answer: one of `operation`; else a wrong composition; where `operation` is a
    composition, any that it calls."""
    targets = [(question, _target(claim, question, subject, question.ask(subject))) for question in asked]
    limit = _limit(targets)
    reached = {mutant.name: mutant for question in asked for mutant in reaching(question.case.operation) if mutant.name not in left_out}
    own = [name for name, mutant in reached.items() if mutant.operation == operation]
    rest = [name for name, mutant in reached.items() if name not in own and (operation in USES or mutant.operation in USES)]
    return _closest(own, targets, limit) or _closest(rest, targets, limit) or (None, None)


def find_in_call(
    claim: Claim, call: TracedCall, case: Case, subject: Subject, left_out: Collection[str]
) -> tuple[str | None, float | None]:
    """The mutant of a recorded call's operation that gives what the call gave, and the distance: where no mutant's whole answer is the
    subject's, since the subject errs in some of the calls only or in an operation that the reference does not call.
    """
    inputs, scalars = own_arguments(call)
    asked = replace(case, operation=call.operation, inputs=inputs, scalars=scalars, cotangents={})
    targets = [(Question(asked), _target(claim, Question(asked), subject, dict(call.outputs)))]
    wrt = tuple(name for name in signatures()[call.operation].gradients if name in call.gradients)
    if wrt and call.cotangents:
        upstream = {name: np.asarray(value, np.float64) for name, value in call.cotangents.items()}
        question = Question(replace(asked, cotangents=upstream), wrt)
        targets.append((question, _target(claim, question, subject, {name: call.gradients[name] for name in wrt})))
    names = [mutant.name for mutant in reaching(call.operation) if mutant.name not in left_out]
    return _closest(names, targets, _limit(targets)) or (None, None)


def _limit(targets: Sequence[tuple[Question, "_Target"]]) -> float:
    """The largest distance, in noise floors, at which a mutant's answer counts as the subject's; 0 where an honest one may err so."""
    exact = max((target.apart(target.exact) for _, target in targets), default=0.0)
    rounded = max((target.apart(question.ask(ReferenceSubject())) for question, target in targets), default=0.0)
    wrong = min(exact, rounded)  # a mutant that changes nothing on the case is as close as the rounded reference
    return min(max(SAME_NOISE, SAME_SHARE * wrong), wrong / CLEARLY_CLOSER) if exact > LIMIT.rms else 0.0


def _closest(names: Iterable[str], targets: Sequence[tuple[Question, _Target]], limit: float) -> tuple[str, float] | None:
    """The closest mutant within the limit and its distance; after SECONDS, of those tried so far."""
    deadline = time.perf_counter() + SECONDS
    best: tuple[float, str, float] | None = None
    for name in names:
        if time.perf_counter() > deadline:
            break
        away, distance, mutant = 0.0, 0.0, mutated(name)
        for question, target in targets:
            answer = question.ask(mutant)
            away = max(away, target.apart(answer))
            if away >= limit:
                break
            distance = max(distance, target.distance(answer))
        if away < limit and (best is None or away < best[0]):
            best = (away, name, distance)
    return best and (best[1], best[2])


def _target(claim: Claim, question: Question, subject: Subject, actual: dict[str, Array] | None) -> _Target:
    try:
        exact = question.run(question.case.inputs, reference.table_of(declared_by(subject)))
    except (ValueError, FloatingPointError):
        return _Target(actual, None, {})
    noise, signature = question.floors(claim, subject, exact), signatures()[question.case.operation]
    rms = {name: floor.rms for name, floor in noise.items()}
    return _Target(actual, exact, rms, sign_ambiguity(signature, exact, noise), reach(signature, question.case.scalars))


def _apart(one: Array, other: Array, floor: float | None) -> float:
    if np.iscomplexobj(one) or np.iscomplexobj(other):
        return np.inf
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
