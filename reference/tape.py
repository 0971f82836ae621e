"""A tape of operation calls: the trace of a composition, and its reverse-mode derivative."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blackswan.reference.table import Array, Arrays, Composition, Operation, Scalars, Table


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

    A value is an input, a parameter (by its Hugging Face name) or the result of a call (by the call's path; `path.output` where an
    operation has several outputs). A view is a value in another shape (`value:view`); its gradient lands on the value itself.
    """

    table: Table
    values: dict[str, Array]
    calls: list[Call] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)

    def call(self, path: str, operation: str, /, **arguments: Any) -> str:
        """Runs an operation on named values; a string argument is a value's name, None an absent optional input, all else a scalar.

        Returns the name of the result (of the first one where there are several).
        """
        inputs = {name: value for name, value in arguments.items() if isinstance(value, str) and value in self.values}
        scalars = {name: value for name, value in arguments.items() if name not in inputs and value is not None}
        absent = {name: None for name, value in arguments.items() if value is None}
        results = self.operation(operation).run({**{name: self.values[value] for name, value in inputs.items()}, **scalars, **absent})
        single = len(results) == 1
        names = {output: path if single else f"{path}.{output}" for output in results}
        for output, name in names.items():
            self.put(name, results[output])
        self.calls.append(Call(path, operation, inputs, {**scalars, **absent}, names))
        return next(iter(names.values()))

    def operation(self, name: str) -> Operation:
        """The elementary operation of that name in the table."""
        entry = self.table[name]
        if not isinstance(entry, Operation):
            raise TypeError(f"{name!r} is a composition, but it is called as an elementary operation")
        return entry

    def put(self, name: str, value: Array) -> str:
        """Adds a value that no call made; returns its name."""
        if name in self.values:
            raise KeyError(f"the tape already has a value named {name!r}")
        self.values[name] = value
        return name

    def view(self, value: str, name: str, shape: tuple[int, ...]) -> str:
        """The value in another shape, as `value:name`; returns that name."""
        view = self.put(f"{value}:{name}", self.values[value].reshape(shape))
        self.views[view] = value
        return view

    def compose(self, name: str, default: Composition, scalars: Scalars) -> None:
        """Runs the composition of that name in the table, or the reference's own."""
        entry = self.table.get(name, default)
        if not isinstance(entry, Composition):
            raise TypeError(f"{name!r} is a composition: it is replaced by a Composition, not by an Operation")
        entry.build(self, scalars)

    def result(self) -> dict[str, Array]:
        """The composition's outputs by name."""
        return {name: self.values[value] for name, value in self.outputs.items()}

    def backward(self, cotangents: Arrays, wrt: Iterable[str] | None = None) -> dict[str, Array]:
        """Reverse mode: cotangents by output name → gradients by value name, for every value on the way (or only those in `wrt`).

        A value that the outputs do not depend on has a zero gradient. With `wrt`, calls from which no wanted value is reached are left out,
        and the gradient of a value on the way is dropped once it is used.
        """
        wanted = None if wrt is None else tuple(wrt)
        active = self._active(wanted)
        gradients: dict[str, Array] = {}
        for output, cotangent in cotangents.items():
            self._accumulate(gradients, self.outputs[output], np.asarray(cotangent))
        for call in reversed(self.calls):
            needs = {name for name, value in call.inputs.items() if self._base(value) in active}
            results = tuple(call.results.values())
            if not needs or not any(name in gradients for name in results):
                continue
            upstream = [gradients[name] if name in gradients else np.zeros_like(self.values[name]) for name in results]
            arguments = {**{name: self.values[value] for name, value in call.inputs.items()}, **call.scalars}
            for name, gradient in self.operation(call.operation).gradients(upstream, arguments, needs).items():
                self._accumulate(gradients, call.inputs[name], gradient)
            if wanted is not None:
                for name in set(results).difference(wanted):
                    gradients.pop(name, None)
        if wanted is None:
            return gradients
        return {name: gradients[name] if name in gradients else np.zeros_like(self.values[name]) for name in wanted}

    def _active(self, wanted: Collection[str] | None) -> set[str]:
        """The values whose gradients are wanted or lead to a wanted one; all of them where nothing was asked for."""
        if wanted is None:
            return set(self.values)
        active = set(wanted)
        if unknown := sorted(active.difference(self.values)):
            raise KeyError(f"no value is named {unknown[0]!r} on this tape")
        for call in self.calls:
            if not active.isdisjoint(map(self._base, call.inputs.values())):
                active.update(call.results.values())
        return active

    def _base(self, name: str) -> str:
        return self.views.get(name, name)

    def _accumulate(self, gradients: dict[str, Array], name: str, gradient: Array) -> None:
        base = self._base(name)
        shaped = gradient.reshape(self.values[base].shape)
        gradients[base] = gradients[base] + shaped if base in gradients else shaped
