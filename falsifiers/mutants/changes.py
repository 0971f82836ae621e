"""Ways to make a wrong operation from the correct one. Each returns a function from the correct operation to the wrong one.

Unless it says otherwise, the backward pass of the wrong operation is the derivative of its wrong forward pass.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from blackswan.falsifiers.numeric.rounding import nearest
from blackswan.reference.table import Array, Operation

Arguments = Mapping[str, Any]
Gradients = dict[str, Array]
Change = Callable[[Operation], Operation]


def in_bfloat16(value: Array) -> Array:
    """Rounded to bfloat16, in the dtype it came in."""
    return nearest(value, ml_dtypes.bfloat16)


def in_float16(value: Array) -> Array:
    """Rounded to float16, in the dtype it came in; beyond 65,504 infinite."""
    return nearest(value, np.float16)


def call(correct: Operation, arguments: Arguments) -> Any:
    """The result of the operation for these arguments."""
    return correct.forward(**arguments)


def pull(correct: Operation, cotangent: Array, arguments: Arguments) -> Gradients:
    """All gradients of an operation with one output."""
    assert correct.backward is not None
    return correct.backward(cotangent, **arguments)


@cache
def _compiled(module: ModuleType, edits: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The names that the module defines when the texts in its source are replaced."""
    source = inspect.getsource(module)
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{module.__file__}: a mutant replaces {old!r}, which stands there {source.count(old)} times, not once")
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": module.__name__, "in_bfloat16": in_bfloat16, "in_float16": in_float16, "math": math}
    exec(compile(source, str(module.__file__), "exec"), names)  # noqa: S102  the reference's own source, with a mutant's texts in it
    return names


def edited(*edits: tuple[str, str], only: str = "") -> Change:
    """The operation compiled anew from the source of its module in the reference, with texts replaced: (old, new), …

    `only` is `forward` or `backward` where the other pass stays the correct one. A new text may use `math`, `in_bfloat16` and
    `in_float16`. ValueError where an old text does not stand in the source exactly once.
    """

    def change(correct: Operation) -> Operation:
        names = _compiled(sys.modules[correct.forward.__module__], edits)
        passes = {name: getattr(correct, name) for name in ("forward", "backward") if only in ("", name)}
        return replace(correct, **{name: names[function.__name__] for name, function in passes.items() if function})

    return change


def _on(changed: Callable[[Arguments], Arguments], back: Callable[[Gradients, Arguments], Gradients]) -> Change:
    """The operation on changed arguments; `back` makes the gradients of the arguments as given."""

    def change(correct: Operation) -> Operation:
        def backward(*cotangents: Array, **arguments: Any) -> Gradients:
            assert correct.backward is not None
            return back(correct.backward(*cotangents, **changed(arguments)), arguments)

        return replace(correct, forward=lambda **given: call(correct, changed(given)), backward=correct.backward and backward)

    return change


def with_arguments(**changes: Callable[[Arguments], Any]) -> Change:
    """The operation on changed arguments: scalars, indices, masks, or an input by a constant. Each change sees the arguments as given.

    An input that is changed to None has no gradient.
    """
    return _on(lambda given: {**given, **{name: change(given) for name, change in changes.items()}}, lambda gradients, _: gradients)


def without(*names: str) -> Change:
    """The operation without some optional inputs."""
    return with_arguments(**dict.fromkeys(names, lambda _: None))


def through(*names: str, by: Callable[[Array, Arguments], Array], back: Callable[[Array, Arguments], Array] | None = None) -> Change:
    """The operation with a linear map applied to some inputs; `back` takes their gradients back, where the map is not its own adjoint."""

    def mapped(values: Arguments, given: Arguments, linear: Callable[[Array, Arguments], Array]) -> dict[str, Any]:
        return {**values, **{name: linear(values[name], given) for name in names if values.get(name) is not None}}

    return _on(lambda given: mapped(given, given, by), lambda gradients, given: mapped(gradients, given, back or by))


def scaled_input(name: str, factor: Callable[[Arguments], Any]) -> Change:
    """The operation with one input times a factor."""
    return through(name, by=lambda value, arguments: value * factor(arguments))


def scaled(factor: Callable[[Arguments], Any]) -> Change:
    """The operation's one output times a factor."""

    def change(correct: Operation) -> Operation:
        def forward(**arguments: Any) -> Any:
            return call(correct, arguments) * factor(arguments)

        def backward(cotangent: Array, **arguments: Any) -> Gradients:
            return pull(correct, cotangent * factor(arguments), arguments)

        return Operation(forward, backward, correct.outputs)

    return change


ONE_WAVE = 1024
"""The number of rows that a kernel computes whose programs are of a fixed number."""


def first_rows(name: str, axes: int) -> Callable[[Arguments], Array]:
    """A factor that is one for the first ONE_WAVE rows of an input and zero for the others; its first `axes` axes count rows."""

    def kept(a: Arguments) -> Array:
        shape = a[name].shape[:axes]
        counted = np.arange(math.prod(shape)).reshape(shape) < ONE_WAVE
        mask: Array = counted.reshape(*shape, *[1] * (a[name].ndim - axes)).astype(a[name].dtype)
        return mask

    return kept


SHORT = 2**15
"""The number of elements that a signed index of 16 bits counts; few cases have more, beside those of large arrays."""


def short_index(name: str) -> Change:
    """The operation on an input whose rows are zero where they begin beyond the first SHORT elements."""

    def kept(value: Array, _: Arguments) -> Array:
        begins = np.arange(len(value)) * (value.size // max(len(value), 1))
        read: Array = (begins < SHORT).reshape(-1, *[1] * (value.ndim - 1)).astype(value.dtype)
        return np.asarray(value * read)

    return through(name, by=kept)


def with_result(change: Callable[[Any, Arguments], Any]) -> Change:
    """The operation with another result, made from its own and its arguments; the gradient, if there is one, stays the correct one."""

    def forward_of(correct: Operation) -> Callable[..., Any]:
        return lambda **arguments: change(call(correct, arguments), arguments)

    return lambda correct: replace(correct, forward=forward_of(correct))


def with_gradients(**changes: Callable[[Array, Array, Arguments], Array]) -> Change:
    """The correct forward pass, and other gradients where there are any: each change sees the gradient, the cotangent and the arguments."""

    def change(correct: Operation) -> Operation:
        def backward(cotangent: Array, **arguments: Any) -> Gradients:
            gradients = pull(correct, cotangent, arguments)
            return gradients | {name: made(gradients[name], cotangent, arguments) for name, made in changes.items() if name in gradients}

        return replace(correct, backward=backward)

    return change


def of_result(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A wrong step that changes the result of the right one."""
    return lambda right, *given, **options: change(right(*given, **options))


def without_keyword(option: str) -> Callable[..., Any]:
    """A wrong step that is not told one of its keyword arguments: its default holds."""
    return lambda correct, *given, **options: correct(*given, **{name: value for name, value in options.items() if name != option})
