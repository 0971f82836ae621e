"""A composition with some of its calls changed, by path: its trace and its gradient are then those of the wrong program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blackswan.reference.table import Composition, Scalars
from blackswan.reference.tape import Tape


class VariedTape(Tape):
    """A tape that writes to another tape's values and calls, and asks a function about each call before it is made."""

    def __init__(self, tape: Tape, change: "Change") -> None:
        super().__init__(tape.table, tape.values, tape.calls, tape.outputs, tape.views)
        self.inner, self.change = tape, change

    def call(self, path: str, operation: str, /, **arguments: Any) -> str:
        """The call as the function changes it."""
        return self.change(Made(self, path, operation, arguments))

    def plainly(self, path: str, operation: str, /, **arguments: Any) -> str:
        """The call as it stands."""
        return self.inner.call(path, operation, **arguments)


@dataclass(frozen=True)
class Made:
    """A call that a composition is about to make."""

    tape: VariedTape
    path: str
    operation: str
    arguments: dict[str, Any]

    def run(self, **changes: Any) -> str:
        """Makes the call, with changed arguments; returns the name of the result."""
        return self.tape.plainly(self.path, self.operation, **{**self.arguments, **changes})


Change = Callable[[Made], str]


def varied(correct: Composition, change_for: Callable[[Scalars], Change], **scalars: Any) -> Composition:
    """The composition with each call changed by `change_for(scalars)`, and with some scalars replaced."""

    def build(tape: Tape, given: Scalars) -> None:
        varying = VariedTape(tape, change_for(given))
        correct.build(varying, {**given, **scalars})
        tape.outputs = varying.outputs

    return Composition(build, correct.differentiable)
