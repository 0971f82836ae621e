"""The registry of mutants: one wrong operation for each name of contracts/mutants.yaml."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import contracts
from reference import COMPOSITIONS, TABLE
from reference.table import Composition, Operation, Table

Entry = Operation | Composition
M = TypeVar("M", bound=Callable[[Any], Entry])


@dataclass(frozen=True)
class Mutant:
    """A wrong operation with a pedigree; `make` builds it from the correct one."""

    name: str
    operation: str
    pedigree: tuple[str, ...]
    doc: str
    make: Callable[[Any], Entry]

    def entry(self) -> Entry:
        """The wrong operation, with the signature of the correct one."""
        return self.make(correct(self.operation))

    def build(self) -> Table:
        """The reference's table with the wrong operation in it; a composition stands there under its own name."""
        return {**TABLE, self.operation: self.entry()}


MUTANTS: dict[str, Mutant] = {}


def correct(operation: str) -> Entry:
    """The reference's own operation or composition of that name."""
    return TABLE[operation] if operation in TABLE else COMPOSITIONS[operation]


@cache
def _catalogue() -> dict[str, contracts.model.Mutant]:
    return contracts.load_mutants()


def mutant(name: str) -> Callable[[M], M]:
    """Registers a function from the correct operation to the wrong one under a name of the catalogue; KeyError where it has none such."""
    catalogue = _catalogue()
    if name not in catalogue:
        near = difflib.get_close_matches(name, catalogue, n=1)
        raise KeyError(f"contracts/mutants.yaml has no mutant {name!r}" + (f"; the nearest name is {near[0]!r}" if near else ""))
    if name in MUTANTS:
        raise KeyError(f"two functions are registered as the mutant {name!r}")

    def register(make: M) -> M:
        entry = catalogue[name]
        MUTANTS[name] = Mutant(name, entry.operation, entry.pedigree, entry.doc, make)
        return make

    return register
