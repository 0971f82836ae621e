"""The registry of mutants: a wrong operation, procedure or rule for each name of contracts/mutants.yaml."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from blackswan import contracts
from blackswan.contracts.model import Rule
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.reference import COMPOSITIONS, TABLE
from blackswan.reference.table import Composition, Operation, Table

Entry = Operation | Composition
M = TypeVar("M", bound=Callable[[Any], Entry])
P = TypeVar("P", bound=Callable[[Subject], Subject])
R = TypeVar("R", bound=Callable[[Rule], Rule])


@dataclass(frozen=True)
class Mutant:
    """A wrong operation with a pedigree; `make` builds it from the correct one. In the dtypes `hidden_in`, rounding hides it."""

    name: str
    operation: str
    pedigree: tuple[str, ...]
    doc: str
    make: Callable[[Any], Entry]
    hidden_in: tuple[str, ...] = ()

    def entry(self) -> Entry:
        """The wrong operation, with the signature of the correct one."""
        return self.make(correct(self.operation))

    def build(self) -> Table:
        """The reference's table with the wrong operation in it; a composition stands there under its own name."""
        return {**TABLE, self.operation: self.entry()}


@dataclass(frozen=True)
class ProcedureMutant:
    """A subject with one procedure changed; `make` wraps the correct subject. No operation: its settings are what is wrong."""

    name: str
    operation: str | None
    pedigree: tuple[str, ...]
    doc: str
    make: Callable[[Subject], Subject]


@dataclass(frozen=True)
class RuleMutant:
    """A hyperparameter rule that errs; `make` changes the correct rule. Every rule must catch it."""

    name: str
    pedigree: tuple[str, ...]
    doc: str
    make: Callable[[Rule], Rule]


MUTANTS: dict[str, Mutant] = {}
PROCEDURES: dict[str, ProcedureMutant] = {}
RULES: dict[str, RuleMutant] = {}


def correct(operation: str) -> Entry:
    """The reference's own operation or composition of that name."""
    return TABLE[operation] if operation in TABLE else COMPOSITIONS[operation]


@cache
def _catalogue() -> dict[str, contracts.model.Mutant]:
    return contracts.load_mutants()


def _entry(name: str) -> contracts.model.Mutant:
    """The catalogue's entry for a name that is not taken yet; KeyError where there is none or it is."""
    catalogue = _catalogue()
    if name not in catalogue:
        near = difflib.get_close_matches(name, catalogue, n=1)
        raise KeyError(f"contracts/mutants.yaml has no mutant {name!r}" + (f"; the nearest name is {near[0]!r}" if near else ""))
    if name in MUTANTS or name in PROCEDURES or name in RULES:
        raise KeyError(f"two functions are registered as the mutant {name!r}")
    return catalogue[name]


def mutant(name: str) -> Callable[[M], M]:
    """Registers a function from the correct operation to the wrong one under a name of the catalogue; KeyError where it has none such."""
    entry = _entry(name)

    def register(make: M) -> M:
        if entry.operation is None:
            raise KeyError(f"contracts/mutants.yaml gives {name!r} no operation")
        MUTANTS[name] = Mutant(name, entry.operation, entry.pedigree, entry.doc, make, entry.hidden_in)
        return make

    return register


def procedure_mutant(name: str) -> Callable[[P], P]:
    """Registers a function from the correct subject to the wrong one; KeyError as above."""
    entry = _entry(name)

    def register(make: P) -> P:
        PROCEDURES[name] = ProcedureMutant(name, entry.operation, entry.pedigree, entry.doc, make)
        return make

    return register


def rule_mutant(name: str) -> Callable[[R], R]:
    """Registers a function from a rule to a wrong one; KeyError as above."""
    entry = _entry(name)

    def register(make: R) -> R:
        RULES[name] = RuleMutant(name, entry.pedigree, entry.doc, make)
        return make

    return register
