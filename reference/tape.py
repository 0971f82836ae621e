"""A tape of operation calls: the trace of a composition, and its reverse-mode derivative."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reference.table import Array, Arrays, Table


@dataclass(frozen=True)
class Call:
    """One recorded call: `inputs` maps the operation's input names to value names, `results` its output names to value names."""

    path: str
    operation: str
    inputs: Mapping[str, str]
    scalars: Mapping[str, Any]
    results: Mapping[str, str]


@dataclass
class Tape:
    """Values by name, and the calls that made them, in order.

    A value is an input, a parameter (by its Hugging Face name) or the result of a call (by the call's path; `path.output` where an operation
    has several outputs).
    """

    table: Table
    values: dict[str, Array]
    calls: list[Call] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)

    def call(self, path: str, operation: str, /, **arguments: Any) -> str:
        """Runs an operation on named values; a string argument is a value's name, None an absent optional input, all else a scalar.

        Returns the name of the result (of the first one where there are several).
        """
        entry = self.table[operation]
        inputs = {name: value for name, value in arguments.items() if isinstance(value, str) and value in self.values}
        scalars = {name: value for name, value in arguments.items() if name not in inputs and value is not None}
        absent = {name: None for name, value in arguments.items() if value is None}
        results = entry.run({**{name: self.values[value] for name, value in inputs.items()}, **scalars, **absent})
        single = len(results) == 1
        names = {output: path if single else f"{path}.{output}" for output in results}
        for output, name in names.items():
            if name in self.values:
                raise KeyError(f"the tape already has a value named {name!r}")
            self.values[name] = results[output]
        self.calls.append(Call(path, operation, inputs, {**scalars, **absent}, names))
        return next(iter(names.values()))

    def result(self) -> dict[str, Array]:
        """The composition's outputs by name."""
        return {name: self.values[value] for name, value in self.outputs.items()}

    def backward(self, cotangents: Arrays, wrt: Iterable[str] | None = None) -> dict[str, Array]:
        """Reverse mode: cotangents by output name → gradients by value name, for every value on the way (or only those in `wrt`).

        A value that the outputs do not depend on has a zero gradient.
        """
        gradients: dict[str, Array] = {}
        for output, cotangent in cotangents.items():
            _accumulate(gradients, self.outputs[output], np.asarray(cotangent))
        for call in reversed(self.calls):
            entry = self.table[call.operation]
            if entry.backward is None or not any(name in gradients for name in call.results.values()):
                continue
            upstream = [gradients.get(name, np.zeros_like(self.values[name])) for name in call.results.values()]
            arguments = {**{name: self.values[value] for name, value in call.inputs.items()}, **call.scalars}
            for name, gradient in entry.backward(*upstream, **arguments).items():
                if name in call.inputs:
                    _accumulate(gradients, call.inputs[name], gradient)
        if wrt is None:
            return gradients
        return {name: gradients.get(name, np.zeros_like(self.values[name])) for name in wrt}


def _accumulate(gradients: dict[str, Array], name: str, gradient: Array) -> None:
    gradients[name] = gradients[name] + gradient if name in gradients else gradient
