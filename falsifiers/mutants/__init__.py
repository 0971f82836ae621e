"""Mutants: wrong programs, each of which some claim must report, and the kill matrix, which shows that it does.

README.md lists the defects that they come from; `registry` says how one is entered.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from blackswan.contracts.vocabulary import FOLDER, load_mutants, own_folder
from blackswan.falsifiers.mutants.registry import MUTANTS, RULES, STEPS, Mutant, applied, correct, every
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.falsifiers.subjects.named import module_at
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.falsifiers.subjects.reference import ReferenceSubject

for _module in (
    *("layers", "norms", "attention", "losses", "lora", "nf4", "roundings", "optimiser", "decoder", "training", "pretraining"),
    *(
        "answers",
        "blocks",
        "corpora",
        "tokens",
        "sampling",
        "parallel",
        "adapters",
        "merging",
        "saved_files",
        "adapter_crossings",
        "apr_files",
        "apr_writers",
        "apr_readers",
        "devices",
        "ledger",
        "host_memory",
        "non_finite",
        "hand_written",
        "fused_trainer",
        "kernel_calls",
        "footprint",
        "estimates",
        "runs",
        "resumed_runs",
        "run_edges",
        "shown",
        "run_crossings",
        "by_hand",
        "worker_crossings",
        "entry_points",
        "ownership",
        "token_streams",
        "pretraining_runs",
        "pretraining_states",
        "pretraining_models",
        "token_shards",
        "model_refusals",
        "refusals",
        "bad_operations",
        "commands",
        "command_settings",
        "command_records",
        "command_failures",
        "far_effects",
        "kept_values",
        "inputs",
        "misuse",
        "unusual_files",
        "other_doors",
        "warm_up",
        "whole_models",
        "large",
        "large_runs",
        "strides",
        "parts",
        "written_folders",
    ),
):
    import_module(f"{__name__}.{_module}")

for _file in sorted(_own.glob("*.py")) if (_own := own_folder()) else ():  # the user's own operations, checks and mutants
    module_at(str(_file))

USES: Mapping[str, frozenset[str]] = {name: frozenset(entry.calls) for name, entry in signatures().items() if entry.composition}
"""Composition → the operations that it calls, for some of its scalars."""


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
    """By mutant, what the linter of contracts reads: its operation or None, its pedigree, its line, and dtypes that hide it."""
    found = {}
    for name, entry in every().items():
        found[name] = {"operation": getattr(entry, "operation", None), "pedigree": list(entry.pedigree), "doc": entry.doc}
        if hidden := getattr(entry, "hidden_in", ()):
            found[name]["hidden_in"] = list(hidden)
    return found


def own_mutants() -> set[str]:
    """The names of the mutants of the user's own folder."""
    return every().keys() - load_mutants(FOLDER / "mutants.json").keys() if own_folder() else set()


__all__ = ["MUTANTS", "RULES", "STEPS", "USES", "Mutant", "applied", "catalogue", "correct", "every", "own_mutants", "reaching", "subject"]
