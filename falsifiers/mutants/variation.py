"""A composition with some of its calls made wrongly: its trace and its gradient are then those of the wrong program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blackswan.reference.table import Array, Composition, Scalars
from blackswan.reference.tape import Tape


class VariedTape(Tape):
    """A tape that writes to another tape's values and calls, and asks a function about each call before it is made.

    `scalars` are those of the composition; `memory` is for what the function keeps from one call to the next.
    """

    def __init__(self, tape: Tape, change: "Change", scalars: Scalars) -> None:
        super().__init__(tape.table, tape.values, tape.calls, tape.outputs, tape.views)
        self.inner, self.change, self.scalars = tape, change, scalars
        self.memory: dict[str, Any] = {}

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

    @property
    def scalars(self) -> Scalars:
        """The scalars of the composition."""
        return self.tape.scalars

    def value(self, argument: str) -> Array:
        """The array that an argument names."""
        return self.tape.values[self.arguments[argument]]

    def run(self, **changes: Any) -> str:
        """Makes the call, with changed arguments; returns the name of the result."""
        return self.tape.plainly(self.path, self.operation, **{**self.arguments, **changes})

    def run_on(self, argument: str, value: Array) -> str:
        """Makes the call with another array for one argument."""
        return self.run(**{argument: self.tape.put(f"{self.path}.wrong_{argument}", value)})

    def changed(self, change: Callable[[Array], Array], output: str = "") -> str:
        """Makes the call and changes its result, or the named one of several."""
        result = self.run()
        name = f"{self.path}.{output}" if output else result
        self.tape.values[name] = change(self.tape.values[name])
        return result


Change = Callable[[Made], str]


def wrong_calls(wrong: Change, operation: str | None = None, at: Callable[[str], object] = bool, **scalars: Any) -> Callable[[Any], Any]:
    """From a composition to one whose calls of an operation, or of all, on the paths `at`, are made by `wrong`; some scalars replaced."""

    def change(made: Made) -> str:
        return wrong(made) if made.operation == (operation or made.operation) and at(made.path) else made.run()

    def make(correct: Composition) -> Composition:
        def build(tape: Tape, given: Scalars) -> None:
            varying = VariedTape(tape, change, given)
            correct.build(varying, {**given, **scalars})
            tape.outputs = varying.outputs

        return Composition(build, correct.differentiable)

    return make
