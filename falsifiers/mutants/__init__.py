"""Mutants: wrong operations and procedures with a pedigree, which a falsifier must report. See README.md for where each comes from."""

from collections.abc import Mapping
from importlib import import_module

from blackswan.falsifiers.mutants.registry import MUTANTS as _MUTANTS
from blackswan.falsifiers.mutants.registry import PROCEDURES as _PROCEDURES
from blackswan.falsifiers.mutants.registry import RULES as _RULES
from blackswan.falsifiers.mutants.registry import Mutant, ProcedureMutant, RuleMutant, correct, mutant
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
    "procedures",
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

MUTANTS: Mapping[str, Mutant] = _MUTANTS
PROCEDURES: Mapping[str, ProcedureMutant] = _PROCEDURES
RULES: Mapping[str, RuleMutant] = _RULES

USES: Mapping[str, frozenset[str]] = {name: frozenset(entry.calls) for name, entry in signatures().items() if entry.composition}
"""What a composition calls, for some of its scalars."""


def reaching(operation: str) -> list[Mutant]:
    """The mutants whose wrong operation is the given one or is called by it, in the order of registration."""
    used = USES.get(operation, frozenset()) | {operation}
    return [entry for entry in MUTANTS.values() if entry.operation in used]


def subject(name: str) -> Subject:
    """The mutant as a subject: the reference with the wrong operation in it, or the implementation with the wrong procedure."""
    if name in PROCEDURES:
        from blackswan.falsifiers.subjects.implementation import Implementation  # imports torch, which operation mutants do without

        return PROCEDURES[name].make(Implementation("cpu"))
    return ReferenceSubject(MUTANTS[name].build(), name)


__all__ = ["MUTANTS", "PROCEDURES", "RULES", "USES", "Mutant", "ProcedureMutant", "RuleMutant", "correct", "mutant", "reaching", "subject"]
