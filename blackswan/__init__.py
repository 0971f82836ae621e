"""Contract-driven verification of QLoRA classification fine-tuning. Everything that is installed stands below this one import name.

For the code of others: `check` asks a function, a module or a Subject every claim on the operations that it has, `parametrize` does so in
tests, `check_model` holds a whole model to the reference on its own weights, and code raises `Lacks` for what it says that it cannot do.
Contracts of one's own get a reference by `reference_operation`, checks by `named_check`, and wrong programs by `mutant` and `mutants`.

`guard` watches a training run, and raises a `GuardError` at a step that leaves a claim.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blackswan.contracts.conventions import declare as declare
    from blackswan.falsifiers.live.guard import guard as guard
    from blackswan.falsifiers.live.recorded import GuardError as GuardError
    from blackswan.falsifiers.mutants.registry import mutant as mutant
    from blackswan.falsifiers.mutants.registry import mutants as mutants
    from blackswan.falsifiers.numeric.checks import named_check as named_check
    from blackswan.falsifiers.runner.model_command import check_model as check_model
    from blackswan.falsifiers.runner.vet import Result as Result
    from blackswan.falsifiers.runner.vet import check as check
    from blackswan.falsifiers.subjects.protocol import Lacks as Lacks
    from blackswan.falsifiers.subjects.protocol import Subject as Subject
    from blackswan.reference.operations import reference_operation as reference_operation
    from blackswan.testing import parametrize as parametrize

_PUBLIC = {
    "GuardError": "falsifiers.live.recorded",
    "Lacks": "falsifiers.subjects.protocol",
    "Result": "falsifiers.runner.vet",
    "Subject": "falsifiers.subjects.protocol",
    "check": "falsifiers.runner.vet",
    "check_model": "falsifiers.runner.model_command",
    "declare": "contracts.conventions",
    "guard": "falsifiers.live.guard",
    "mutant": "falsifiers.mutants.registry",
    "mutants": "falsifiers.mutants.registry",
    "named_check": "falsifiers.numeric.checks",
    "parametrize": "testing",
    "reference_operation": "reference.operations",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: `import blackswan` alone imports nothing heavy."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'blackswan' has no attribute {name!r}; it has {', '.join(_PUBLIC)}")
    import importlib

    return getattr(importlib.import_module(f"blackswan.{_PUBLIC[name]}"), name)
