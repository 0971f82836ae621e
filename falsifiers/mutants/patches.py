"""Wrong procedures made by changing one step of `impl`: a function or method of it replaced while the subject runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from blackswan.falsifiers.mutants.registry import procedure_mutant
from blackswan.falsifiers.mutants.wrapped import Wrapped
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.reference.table import Array, Arrays, Scalars

Change = Callable[[Any], Any]
PATCHES: dict[str, tuple[str, str, Change]] = {}
"""Name of the mutant → module, dotted attribute in it, and the change from what is there to what stands there instead."""


def step_mutant(name: str, module: str, attribute: str) -> Callable[[Change], Change]:
    """Registers a function from one step of `impl` (a function, method or constant) to the wrong one, as a procedure mutant.

    `attribute` may be dotted: `Trainer.train_batch`. KeyError where contracts/mutants.yaml has no such name.
    """

    def register(change: Change) -> Change:
        PATCHES[name] = (module, attribute, change)
        procedure_mutant(name)(lambda inner: _Patched(inner, name))
        return change

    return register


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """The step of that mutant is the wrong one inside the block, in this process; None changes nothing.

    Raises an AttributeError where `impl` has no such step (any more).
    """
    if name is None:
        yield
        return
    module, attribute, change = PATCHES[name]
    *owners, last = attribute.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    getattr(owner, last)
    before = vars(owner)[last]
    setattr(owner, last, change(before))
    try:
        yield
    finally:
        setattr(owner, last, before)


class _Patched(Wrapped):
    """The subject with one step of `impl` replaced while it runs."""

    def __init__(self, inner: Subject, mutant: str) -> None:
        super().__init__(inner)
        self.mutant = mutant

    def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> dict[str, Array]:
        """The operation's outputs. A procedure that works in processes of its own finds the mutant's name in `scalars`."""
        with applied(self.mutant):
            return super().run(operation, inputs, {**scalars, "mutant": self.mutant} if not inputs else scalars, dtype)
