"""The registry of mutants: decorators that enter a wrong operation, step or rule under its function's name, with its pedigree and one line.

A pedigree names numbered defects of README.md, or `own`. `contracts/mutants.json` is the catalogue made from here (`python -m falsifiers
catalogue`), by which contracts are linted without importing this package.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from blackswan.contracts.model import Rule
from blackswan.falsifiers.subjects import patching
from blackswan.reference import COMPOSITIONS, TABLE
from blackswan.reference.table import Composition, Operation, Table

Entry = Operation | Composition
Change = Callable[[Any], Any]
M = TypeVar("M", bound=Callable[..., Any])
R = TypeVar("R", bound=Callable[[Rule], Rule])


@dataclass(frozen=True)
class Mutant:
    """A wrong operation with a pedigree; `make` builds it from the correct one. In the dtypes `hidden_in`, rounding hides it."""

    name: str
    operation: str
    pedigree: tuple[str, ...]
    doc: str
    make: Change
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
    """One function, method or constant of a module changed while the subject runs; `attribute` may be dotted: `Trainer.train_batch`."""

    name: str
    module: str
    attribute: str
    pedigree: tuple[str, ...]
    doc: str
    change: Change


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


def _said(function: Any, name: str | None, doc: str | None) -> tuple[str, str]:
    """Name and line of a mutant. ValueError where it has no line, or another mutant has its name."""
    name = name or str(function.__name__)
    doc = doc or (inspect.getdoc(function) or "").split("\n\n")[0]
    if not doc:
        raise ValueError(f"mutant {name}: needs a docstring that says what is wrong with it")
    if name in every():
        raise ValueError(f"two mutants are called {name}")
    return name, doc


def mutant(
    operation: str, *pedigree: str, hidden_in: tuple[str, ...] = (), name: str | None = None, doc: str | None = None
) -> Callable[[M], M]:
    """Enters a function from the correct operation to a wrong one."""

    def register(make: M) -> M:
        called, said = _said(make, name, doc)
        MUTANTS[called] = Mutant(called, operation, pedigree, said, make, hidden_in)
        return make

    return register


def step_mutant(module: str, attribute: str, *pedigree: str, name: str | None = None, doc: str | None = None) -> Callable[[M], M]:
    """Enters a function from one step of a program (a function, method or constant) to the wrong one; `own` where it has no pedigree."""

    def register(change: M) -> M:
        called, said = _said(change, name, doc)
        STEPS[called] = StepMutant(called, module, attribute, pedigree or ("own",), said, change)
        return change

    return register


def named_step(name: str, pedigree: str, doc: str, change: Change, module: str, attribute: str) -> None:
    """Enters a change that is an expression, as `step_mutant` does a function."""
    step_mutant(module, attribute, *pedigree.split(", "), name=name, doc=doc)(change)


def wrong_step(module: str, attribute: str, *pedigree: str, name: str | None = None, doc: str | None = None) -> Callable[[M], M]:
    """Enters a wrong function or method, which is given the correct one before its own arguments."""

    def register(wrong: M) -> M:
        called, said = _said(wrong, name, doc)
        step_mutant(module, attribute, *pedigree, name=called, doc=said)(
            lambda correct: lambda *own, **named: wrong(correct, *own, **named)
        )
        return wrong

    return register


def wrong_steps(
    module: str,
    attribute: str,
    by: Callable[[Any], Callable[..., Any]] = lambda wrong: wrong,
    **entries: tuple[str, Any] | tuple[str, Any, str],
) -> None:
    """Enters wrong steps that are expressions under their names: the line, the step as `wrong_step` takes it or what `by` makes one of, and
    the pedigree, `own` unless it is given."""
    for name, (doc, wrong, *pedigree) in entries.items():
        wrong_step(module, attribute, *(pedigree[0] if pedigree else "own").split(", "), name=name, doc=doc)(by(wrong))


def rule_mutant(*pedigree: str, name: str | None = None, doc: str | None = None) -> Callable[[R], R]:
    """Enters a function from a hyperparameter rule to a wrong one."""

    def register(make: R) -> R:
        called, said = _said(make, name, doc)
        RULES[called] = RuleMutant(called, pedigree, said, make)
        return make

    return register


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """The step of that mutant is the wrong one inside the block; None changes nothing.

    Raises an AttributeError where the program has no such step (any more).
    """
    if name is None:
        yield
        return
    step = STEPS[name]
    with patching.changed(step.module, step.attribute, step.change, f"{__name__}:{name}"):
        yield
