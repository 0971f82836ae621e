"""One attempt at a system claim: a seed to draw its problem from, and the subject's doors to runs, files, data and devices.

A claim says `check: module.function`; the function of that module of this package takes a Trial and returns comparisons. Every call through
a door is a question to the subject: what the subject raises there, or a number in its answer that is not finite, falsifies the claim.
"""

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

from blackswan.contracts.model import Claim, Location
from blackswan.contracts.problems import ContractError, Problem
from blackswan.falsifiers.numeric.answers import NotFiniteError, SubjectError
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects import doors
from blackswan.falsifiers.subjects.doors.training import Trainer
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.reference.table import Array, Arrays, Table

Check = Callable[["Trial"], list[Comparison]]
Rounded = Callable[[Arrays, Table], dict[str, Array]]
C = TypeVar("C", bound=Check)


def may_be_non_finite(*patterns: str) -> Callable[[C], C]:
    """Marks a check whose subject may answer NaN or infinity where a pattern fits: dotted names of fields and keys, `*` for any."""

    def mark(check: C) -> C:
        check.__dict__["non_finite"] = patterns
        return check

    return mark


def check_of(claim: Claim) -> Check:
    """The function that a system claim names. ContractError, with the nearest name, where there is none."""
    module, _, name = str(claim.check).partition(".")
    try:
        found = import_module(f"{__package__}.{module}")
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{module}":
            raise
        raise _unknown(claim, f"there is no module {module!r} in falsifiers/system") from None
    if not callable(getattr(found, name, None)):
        near = difflib.get_close_matches(name, vars(found), n=1)
        raise _unknown(claim, f"falsifiers/system/{module}.py has no function {name!r}" + (f"; the nearest is {near[0]!r}" if near else ""))
    return cast(Check, getattr(found, name))


def _unknown(claim: Claim, message: str) -> ContractError:
    location: Location = claim.location
    return ContractError([Problem(*location, f"{claim.id}.check", message)])


@dataclass(frozen=True)
class Trial:
    """A system claim, the subject, and the seed that everything drawn follows from."""

    claim: Claim
    subject: Subject
    seed: int
    dtype: str = "float32"
    attack: Attack | None = None
    """What judges by noise floors, and keeps what it needs for them; a plain one where there is none."""

    @cached_property
    def judge(self) -> Attack:
        """What holds arrays to the claim's factors times a noise floor."""
        return self.attack or Attack(self.claim, self.subject, self.dtype)

    def run(self) -> list[Comparison]:
        """What the claim's check compares. SubjectError where the subject fails a question, doors.Lacks where it has no such door."""
        return check_of(self.claim)(self)

    def rng(self, label: str) -> Generator:
        """A generator of the seed and a label."""
        return generator_for(self.seed, label)

    @cached_property
    def corpora(self) -> doors.Corpora:
        """The subject's reading of corpora, and its plan of an epoch."""
        return cast(doors.Corpora, self._door("corpora"))

    @cached_property
    def files(self) -> doors.Files:
        """The subject's adapters and checkpoints on disk."""
        return cast(doors.Files, self._door("files"))

    @cached_property
    def devices(self) -> doors.Devices:
        """Where the subject computes."""
        return cast(doors.Devices, self._door("devices"))

    @cached_property
    def memory(self) -> doors.Memory:
        """What the subject takes of a device, and what it knows about that."""
        return cast(doors.Memory, self._door("memory"))

    @cached_property
    def classifiers(self) -> doors.Classifiers:
        """Classifiers as the subject's runs start from them."""
        return cast(doors.Classifiers, self._door("classifiers"))

    @cached_property
    def models(self) -> doors.Models:
        """The subject's whole classifiers."""
        return cast(doors.Models, self._door("models"))

    @cached_property
    def pretrainer(self) -> doors.Pretrainer:
        """The subject's pre-training of language models."""
        return cast(doors.Pretrainer, self._door("pretrainer"))

    @cached_property
    def trainer(self) -> Trainer:
        """The subject's training runs."""
        return cast(Trainer, self._door("trainer"))

    def _door(self, name: str) -> object:
        return _Asked(self.subject.door(name), getattr(check_of(self.claim), "non_finite", ()))

    def literal(self, expected: Array) -> Errors:
        """The limit of the claim's literal tolerance: absolute, or relative to the tensor's largest magnitude."""
        tolerance = self.claim.tolerance
        if tolerance is None or tolerance.value is None:
            raise ValueError(f"{self.claim.id}: check {self.claim.check!r} needs a literal tolerance")
        finite = expected[np.isfinite(expected)]
        size = float(np.max(np.abs(finite), initial=0.0)) if tolerance.unit == "relative" else 1.0
        return Errors.flat(tolerance.value * size)

    def near(self, name: str, expected: Array | float, actual: Array | float) -> Comparison:
        """Within the claim's literal tolerance."""
        wanted = np.asarray(expected, np.float64)
        return compare(name, wanted, np.asarray(actual), self.literal(wanted), UNIT_ROUNDOFF["float32"])

    def within_noise(self, case: Case, run: Rounded, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[Comparison]:
        """Within the claim's factors times the noise floor of an operation on a case, where `run` computes that with a rounding table."""
        attack = self.attack or Attack(self.claim, self.subject, self.dtype)
        attack.claim = replace(self.claim, operation=case.operation)
        try:
            dtypes, reach = attack.dtypes(expected), attack.reach(case)
            return attack.judge(expected, actual, lambda: attack.floor(case, run, expected), dtypes, reach)
        finally:
            attack.claim = self.claim

    def refuses(self, name: str, ask: Callable[[], object], message: str, error: str = "Exception") -> Comparison:
        """Whether a question raises that error with that message (a regular expression, any case)."""
        return replace(refusal(ask, error, message), tensor=name)


class _Asked:
    """A door, or a session that one opened, whose every call is a question to the subject."""

    def __init__(self, door: object, non_finite: tuple[str, ...]) -> None:
        self._door, self._non_finite = door, non_finite

    def __getattr__(self, name: str) -> Any:
        """What the door has under that name; a method answers through `_ask`."""
        value = self._ask(lambda: getattr(self._door, name))
        return (lambda *given, **named: self._ask(lambda: value(*given, **named))) if callable(value) else value

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a subject that warns has not left the claim, whatever pytest makes of warnings
                answer = question()
        except (doors.Lacks, SubjectError):
            raise
        except Exception as error:  # whatever a subject raises, where it had to answer, is a finding about the subject
            raise SubjectError(f"raised {type(error).__name__}: {error}") from error
        if isinstance(answer, doors.Session):
            return _Asked(answer, self._non_finite)
        for name, value in _numbers("answer", answer):
            if not np.isfinite(value).all() and not any(fnmatchcase(name, pattern) for pattern in self._non_finite):
                index = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
                raise NotFiniteError(name, index, float(value[index]))
        return answer


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    """The real numbers of an answer, by dotted names."""
    if isinstance(value, float | np.floating):
        yield name, np.asarray(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuSUO":
            yield name, value.astype(np.float64)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _numbers(f"{name}.{key}", entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from _numbers(f"{name}.{entry.name}", getattr(value, entry.name))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _numbers(f"{name}.{index}", entry)
