"""One attempt at a system claim: a seed to draw its problem from, and the subject's doors to runs, files, data and devices.

A claim says `check: module.function`; the function of that module of this package takes a Trial, and the claim's `arguments` by
their names, and gives comparisons, in a list or one after the other. Every call through a door is a question to the subject: what the
subject raises there, or a number in its answer that is not finite, falsifies the claim.
"""

import contextlib
import difflib
import inspect
import pkgutil
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from unittest import mock

import numpy as np
from safetensors import SafetensorError

from blackswan.contracts.model import Claim
from blackswan.contracts.problems import ContractError, Problem
from blackswan.falsifiers.numeric.answers import NotFiniteError, SubjectError
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.protocol import Lacks, Session, Subject
from blackswan.falsifiers.system.questions import question
from blackswan.falsifiers.system.same import same
from blackswan.reference.table import Array, Arrays, Table

if TYPE_CHECKING:
    from blackswan.falsifiers.subjects.doors.models import Model
    from blackswan.falsifiers.subjects.doors.training import Trainer
    from blackswan.falsifiers.subjects.impl.classifiers import Classifiers
    from blackswan.falsifiers.subjects.impl.commands import Commands
    from blackswan.falsifiers.subjects.impl.corpora import Corpora
    from blackswan.falsifiers.subjects.impl.devices import Devices
    from blackswan.falsifiers.subjects.impl.files import Files
    from blackswan.falsifiers.subjects.impl.kernels import Kernels
    from blackswan.falsifiers.subjects.impl.memory import Memory
    from blackswan.falsifiers.subjects.impl.ownership import Ownership
    from blackswan.falsifiers.subjects.impl.pretrainer import Pretrainer
    from blackswan.falsifiers.subjects.impl.reservations import Reservations

LAST = 3
"""So many functions that an error came through are named."""
Check = Callable[..., Iterable[Comparison]]
Rounded = Callable[[Arrays, Table], dict[str, Array]]
C = TypeVar("C", bound=Check)
D = TypeVar("D")


def may_be_non_finite(*patterns: str) -> Callable[[C], C]:
    """Marks a check whose subject may answer NaN or infinity where a pattern fits: dotted names of fields and keys, `*` for any."""

    def mark(check: C) -> C:
        check.__dict__["non_finite"] = patterns
        return check

    return mark


def reads_files(check: C) -> C:
    """A check to which files and printed lines that cannot be read are answers of the subject: it has failed then."""

    @wraps(check)
    def judged(trial: "Trial", **arguments: Any) -> Iterator[Comparison]:
        try:
            yield from check(trial, **arguments)
        except (ValueError, LookupError, TypeError, AttributeError, OSError, SafetensorError) as error:
            raise SubjectError(f"what it left cannot be read: {type(error).__name__}: {error}") from error

    return cast(C, judged)


def by_each_backend(check: C) -> C:
    """A check of runs that is asked once more of each backend that can only be asked with formulas in the places of its kernels."""

    @wraps(check)
    def asked(trial: "Trial", **arguments: Any) -> Iterator[Comparison]:
        yield from check(trial, **arguments)
        for backend in trial.trainer.stand_in_backends:
            trial.backend = backend
            try:
                yield from (replace(each, tensor=f"{backend}: {each.tensor}") for each in check(trial, **arguments))
            finally:
                trial.backend = None

    return cast(C, asked)


def check_of(claim: Claim) -> Check:
    """The function that a system claim names. ContractError, with the nearest name, where there is none."""
    module, _, name = str(claim.check).partition(".")
    try:
        found = import_module(f"{__package__}.{module}")
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{module}":
            raise
        raise _refused(claim, "check", f"there is no module {module!r} in falsifiers/system") from None
    if not callable(getattr(found, name, None)):
        near = difflib.get_close_matches(name, vars(found), n=1)
        told = f"; the nearest is {near[0]!r}" if near else ""
        raise _refused(claim, "check", f"falsifiers/system/{module}.py has no function {name!r}{told}")
    return cast(Check, getattr(found, name))


def arguments_of(check: Check) -> dict[str, bool]:
    """The names of a check's arguments, its keyword-only parameters, and whether each has to be given."""
    parameters = inspect.signature(check).parameters.values()
    return {one.name: one.default is one.empty for one in parameters if one.kind is one.KEYWORD_ONLY}


def _require_arguments(claim: Claim, check: Check) -> None:
    accepted = arguments_of(check)
    if unknown := sorted(set(claim.arguments) - set(accepted)):
        raise _refused(claim, f"arguments.{unknown[0]}", f"{claim.check} has no such argument; it has {', '.join(accepted) or 'none'}")
    if missing := [name for name, needed in accepted.items() if needed and name not in claim.arguments]:
        raise _refused(claim, "arguments", f"{claim.check} needs {', '.join(missing)}")


def _refused(claim: Claim, key: str, message: str) -> ContractError:
    return ContractError([Problem(*claim.location, f"{claim.id}.{key}", message)])


class _Door(Generic[D]):
    """A door of the trial's subject, opened when it is first asked for. Lacks where the subject has none of that name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trial: "Trial", owner: type) -> D:
        may = getattr(check_of(trial.claim), "non_finite", ())
        try:
            door = trial.subject.door(self._name)
        except ImportError as error:
            if not (error.name or "").startswith("blackswan.impl"):  # a library that is missing says nothing about the subject
                raise
            raise SubjectError(f"has not what its users import: {error}") from error
        vars(trial)[self._name] = _Asked(door, may, self._name, trial.attack)
        return cast(D, vars(trial)[self._name])


class Trial:
    """The attack of a system claim on a subject, and the seed that everything drawn follows from; the `backend` of its runs, where one is
    chosen."""

    classifiers: "_Door[Classifiers]" = _Door()
    commands: "_Door[Commands]" = _Door()
    corpora: "_Door[Corpora]" = _Door()
    devices: "_Door[Devices]" = _Door()
    files: "_Door[Files]" = _Door()
    kernels: "_Door[Kernels]" = _Door()
    memory: "_Door[Memory]" = _Door()
    models: "_Door[Model]" = _Door()
    ownership: "_Door[Ownership]" = _Door()
    pretrainer: "_Door[Pretrainer]" = _Door()
    reservations: "_Door[Reservations]" = _Door()
    trainer: "_Door[Trainer]" = _Door()

    def __init__(self, attack: Attack, seed: int) -> None:
        self.attack, self.seed = attack, seed
        self.backend: str | None = None

    @property
    def claim(self) -> Claim:
        """The claim that is tried."""
        return self.attack.claim

    @property
    def subject(self) -> Subject:
        """The implementation under test."""
        return self.attack.subject

    @property
    def dtype(self) -> str:
        """The dtype in which the subject computes, where the claim speaks of one."""
        return self.attack.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether the subject computes on a GPU."""
        return self.subject.device.startswith("cuda")

    def run(self) -> list[Comparison]:
        """Runs the claim's check, up to a comparison that fails beyond measure: nothing after it could be worse.

        Raises SubjectError where the subject fails a question, Lacks where it has no such door.

        ContractError where the check has no argument of a name that the claim gives, or needs one that it does not give.
        """
        from blackswan.falsifiers.subjects.process import Process

        check = check_of(self.claim)
        _require_arguments(self.claim, check)
        process = Process()
        try:
            found = list(up_to_the_worst(check(self, **self.claim.arguments)))
        finally:
            changes = process.changes()
        return [*found, *same("what is otherwise in this process afterwards", [], changes)]

    def rng(self, label: str) -> Generator:
        """A generator of the seed and a label."""
        return generator_for(self.seed, label)

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
        attack, claim = self.attack, self.claim
        attack.claim = replace(claim, operation=case.operation)
        try:
            dtypes, reach = attack.dtypes(expected), attack.reach(case)
            return attack.judge(expected, actual, lambda: attack.floor(case, run, expected), dtypes, reach)
        finally:
            attack.claim = claim

    def refuses(self, name: str, ask: Callable[[], object], message: str, error: str = "Exception") -> Comparison:
        """Whether a question raises that error with that message (a regular expression, any case)."""
        return replace(refusal(ask, error, message), tensor=name)


def up_to_the_worst(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """The comparisons, of which those after the first that fails by an infinite headroom are not asked for.

    A check may so end wherever it yields: what it did to the process it undoes in `finally`, or in a `with`.
    """
    for each in comparisons:
        yield each
        if not each.held and each.headroom == np.inf:
            break
    if isinstance(comparisons, types.GeneratorType):
        comparisons.close()


def came_through(error: BaseException) -> str:
    """The last functions of `impl`, three at most, that an error came through: ` (raised in impl.fit:fit, impl.samples:batches)`."""
    names, at = list[str](), error.__traceback__
    while at is not None:
        module, function = at.tb_frame.f_globals.get("__name__", ""), at.tb_frame.f_code.co_qualname.partition(".<locals>")[0]
        if module.startswith("blackswan.impl."):
            names.append(f"{module.removeprefix('blackswan.')}:{function}")
        at = at.tb_next
    return f" (raised in {', '.join(dict.fromkeys(names[-LAST:]))})" if names else ""


def _require_fit(error: Exception) -> None:
    """A RuntimeError where the door could not replace a name inside the subject: the door is out of date, and the subject not wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    looked_up = {(mock.__file__, "get_original"), (pkgutil.__file__, "resolve_name")}
    if isinstance(error, AttributeError) and frames and (frames[-1].filename, frames[-1].name) in looked_up:
        at = [frame for frame in frames if frame.filename not in (__file__, mock.__file__, contextlib.__file__, pkgutil.__file__)][-1]
        raise RuntimeError(f"{error}; {Path(at.filename).name}:{at.lineno} replaces it by name, and has to follow the subject") from error


class _Asked:
    """A door, or a session that one opened, whose every call is a question to the subject."""

    def __init__(self, door: object, non_finite: tuple[str, ...], name: str, attack: Attack) -> None:
        self._door, self._non_finite, self._name, self._attack = door, non_finite, name, attack

    def __getattr__(self, name: str) -> Any:
        """Looks a name up in the door; a method answers through `_ask`, and the attack remembers the call."""
        value = self._ask(lambda: getattr(self._door, name))
        if not callable(value):
            return value

        def call(*given: Any, **named: Any) -> Any:
            self._attack.asked.pop(name, None)
            self._attack.asked[name] = question(self._name, name, given, named)
            return self._ask(lambda: value(*given, **named))

        return call

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*")  # it may warn, whatever pytest makes of it; a filter of its own is another one
                before = _of_warnings()
                answer = question()
                if before != _of_warnings():
                    raise SubjectError("left other filters of warnings, or another way of showing them")
        except (Lacks, SubjectError):
            raise
        except Exception as error:  # whatever a subject raises, where it had to answer, is a finding about the subject
            _require_fit(error)
            raise SubjectError(f"raised {type(error).__name__}: {error}{came_through(error)}") from error
        if isinstance(answer, Session):
            return _Asked(answer, self._non_finite, self._name, self._attack)
        for name, value in _numbers("answer", answer):
            if not np.isfinite(value).all() and not any(fnmatchcase(name, pattern) for pattern in self._non_finite):
                index = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
                raise NotFiniteError(name, index, float(value[index]))
        return answer


def _of_warnings() -> tuple[Any, ...]:
    """The function that shows warnings, and the filters that hold for every program. Filters of one module, of one message or of a
    library's own category are left out, because libraries add such when they are imported."""
    return warnings.showwarning, [
        each for each in warnings.filters if each[1] is None and each[3] is None and each[2].__module__ == "builtins"
    ]


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
            if type(entry) is not int:  # of which a matrix of counts has a million
                yield from _numbers(f"{name}.{index}", entry)
