"""Wrong programs with a pedigree (README.md), each a decorated function, which a falsifier must report; and the kill matrix over them."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from blackswan.falsifiers.mutants.registry import MUTANTS, RULES, STEPS, Mutant, applied, correct, every, mutant
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.falsifiers.subjects.reference import ReferenceSubject

for _module in (
    "layers",
    "norms",
    "attention",
    "losses",
    "lora",
    "nf4",
    "optimiser",
    "decoder",
    "training",
    "answers",
    "data",
    "parallel",
    "adapters",
    "devices",
    "footprint",
    "runs",
    "entry_points",
    "pretraining",
    "pretraining_runs",
    "whole_models",
):
    import_module(f"{__name__}.{_module}")

USES: Mapping[str, frozenset[str]] = {name: frozenset(entry.calls) for name, entry in signatures().items() if entry.composition}
"""What a composition calls, for some of its scalars."""


def reaching(operation: str) -> list[Mutant]:
    """The mutants whose wrong operation is the given one or is called by it, in the order of registration."""
    used = USES.get(operation, frozenset()) | {operation}
    return [entry for entry in MUTANTS.values() if entry.operation in used]


def subject(name: str) -> Subject:
    """The mutant as a subject: the reference with the wrong operation in it, or the implementation, wrong inside `applied(name)`."""
    if name in MUTANTS:
        return ReferenceSubject(MUTANTS[name].build(), name)
    from blackswan.falsifiers.subjects.implementation import Implementation  # imports torch, which operation mutants do without

    return Implementation("cpu")


def catalogue() -> dict[str, dict[str, Any]]:
    """What contracts are linted by: of each mutant its operation if it is one, its pedigree, its line and where rounding hides it."""
    found = {}
    for name, entry in every().items():
        hidden = list(getattr(entry, "hidden_in", ()))
        said = {"operation": getattr(entry, "operation", None), "pedigree": list(entry.pedigree), "doc": entry.doc}
        found[name] = said | ({"hidden_in": hidden} if hidden else {})
    return found


__all__ = [
    "MUTANTS",
    "RULES",
    "STEPS",
    "USES",
    "Mutant",
    "applied",
    "catalogue",
    "correct",
    "every",
    "mutant",
    "reaching",
    "subject",
]
