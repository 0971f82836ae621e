"""The registry of mutants: wrong operations, wrong steps of a program and wrong rules, each with a name, one line and a pedigree.

A function is entered by a decorator, under its own name and with the first line of its docstring; expressions are entered in a table:

    @mutant(operation, *pedigree)     mutants(operation, name=(line, change, pedigree), …)     an operation of the reference
    @wrong_step(step, *pedigree)      wrong_steps(step, name=(line, step, pedigree), …)        `module:attribute` of the program
    @rule_mutant(*pedigree)                                                                    a hyperparameter rule

`variation.wrong_call` enters what a composition of the reference does wrongly at some of its calls. A pedigree names numbered defects of
README.md; without one it is `own`. `contracts/mutants.json` is the catalogue made from here (`python -m falsifiers catalogue`), by which
contracts are linted without importing this package.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from blackswan.contracts.model import Rule
from blackswan.falsifiers.subjects import patching
from blackswan.reference import COMPOSITIONS, TABLE
from blackswan.reference.table import Composition, Operation, Table

Entry = Operation | Composition
F = TypeVar("F", bound=Callable[..., Any])
OWN = ("own",)


@dataclass(frozen=True)
class Mutant:
    """A wrong operation with a pedigree; `make` builds it from the correct one. In the dtypes `hidden_in`, rounding hides it."""

    name: str
    operation: str
    pedigree: tuple[str, ...]
    doc: str
    make: Callable[[Any], Any]
    hidden_in: tuple[str, ...] = ()

    def entry(self) -> Entry:
        """The wrong operation, with the signature of the correct one."""
        made: Entry = self.make(correct(self.operation))
        return made

    def build(self) -> Table:
        """The reference's table with the wrong operation in it; a composition stands there under its own name."""
        return {**TABLE, self.operation: self.entry()}


@dataclass(frozen=True)
class StepMutant:
    """A step of a program, wrong while the subject runs: a function, method, property or constant, as in `impl.trainer:Trainer.state`."""

    name: str
    step: str
    pedigree: tuple[str, ...]
    doc: str
    wrong: Callable[..., Any]

    def make(self, right: Any) -> Any:
        """The wrong step in the place of the right one, which it is given before its own arguments; a constant is all that it is given."""
        if isinstance(right, property):
            return property(partial(self.wrong, right.fget))
        if isinstance(right, classmethod):
            return classmethod(lambda cls, *own, **named: self.wrong(partial(right.__func__, cls), *own, **named))
        return (lambda *own, **named: self.wrong(right, *own, **named)) if callable(right) else self.wrong(right)


@dataclass(frozen=True)
class RuleMutant:
    """A hyperparameter rule that errs; `make` changes the correct rule. Every rule must catch it."""

    name: str
    pedigree: tuple[str, ...]
    doc: str
    make: Callable[[Rule], Rule]


MUTANTS: dict[str, Mutant] = {}
STEPS: dict[str, StepMutant] = {}
RULES: dict[str, RuleMutant] = {}


def correct(operation: str) -> Entry:
    """The reference's own operation or composition of that name."""
    return TABLE[operation] if operation in TABLE else COMPOSITIONS[operation]


def every() -> dict[str, Mutant | StepMutant | RuleMutant]:
    """All mutants by name, in the order of registration within each sort."""
    return {**MUTANTS, **STEPS, **RULES}


def _enter(registry: dict[str, Any], entry: Mutant | StepMutant | RuleMutant) -> None:
    """ValueError where the mutant has no line, or another one has its name."""
    if not entry.doc:
        raise ValueError(f"mutant {entry.name}: needs a docstring that says what is wrong with it")
    if entry.name in every():
        raise ValueError(f"two mutants are called {entry.name}")
    registry[entry.name] = entry


def _line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n\n")[0]


def mutant(operation: str, *pedigree: str, hidden_in: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Enters a function from the correct operation to a wrong one."""

    def register(make: F) -> F:
        _enter(MUTANTS, Mutant(make.__name__, operation, pedigree or OWN, _line(make), make, hidden_in))
        return make

    return register


def mutants(operation: str, **entries: tuple[Any, ...]) -> None:
    """Enters wrong operations under their names: (line, function from the correct operation, pedigree, dtype that hides it)."""
    for name, (doc, make, *rest) in entries.items():
        pedigree, *hidden = rest or OWN
        _enter(MUTANTS, Mutant(name, operation, tuple(pedigree.split(", ")), doc, make, tuple(hidden)))


def wrong_step(step: str, *pedigree: str, name: str = "", doc: str = "") -> Callable[[F], F]:
    """Enters a wrong function or method, which is given the correct one before its own arguments; a lambda with name and line."""

    def register(wrong: F) -> F:
        called = name or wrong.__name__
        _enter(STEPS, StepMutant(called, step, pedigree or OWN, doc or _line(wrong), wrong))
        return wrong

    return register


def wrong_steps(step: str, by: Callable[[Any], Callable[..., Any]] = lambda wrong: wrong, **entries: tuple[Any, ...]) -> None:
    """Enters wrong steps under their names: (line, the step as `wrong_step` takes it or what `by` makes one of, pedigree)."""
    for name, (doc, wrong, *pedigree) in entries.items():
        wrong_step(step, *(pedigree or OWN)[0].split(", "), name=name, doc=doc)(by(wrong))


def rule_mutant(*pedigree: str) -> Callable[[F], F]:
    """Enters a function from a hyperparameter rule to a wrong one."""

    def register(make: F) -> F:
        _enter(RULES, RuleMutant(make.__name__, pedigree or OWN, _line(make), make))
        return make

    return register


def absent_steps() -> dict[str, str]:
    """The steps that mutants name and the program does not have (any more), by mutant."""
    return {name: entry.step for name, entry in STEPS.items() if not _is_there(entry.step)}


def _is_there(step: str) -> bool:
    module, _, attribute = step.partition(":")
    try:
        patching.owner_of(f"blackswan.{module}", attribute)
    except AttributeError:
        return False
    except ModuleNotFoundError as missing:  # a library that the module needs may be missing here
        return not (missing.name or "").startswith("blackswan.")
    return True


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """The step of that mutant is the wrong one inside the block; None changes nothing.

    Raises an AttributeError where the program has no such step (any more).
    """
    if name is None:
        yield
        return
    module, _, attribute = STEPS[name].step.partition(":")
    with patching.changed(f"blackswan.{module}", attribute, STEPS[name].make, f"{__name__}:{name}"):
        yield
