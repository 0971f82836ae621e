"""Ways to make a wrong operation from the correct one, so that its backward pass is the derivative of the wrong forward pass."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes

from blackswan.falsifiers.numeric.rounding import nearest
from blackswan.reference.table import Array, Operation

Arguments = Mapping[str, Any]
Gradients = dict[str, Array]


def call(correct: Operation, arguments: Arguments) -> Any:
    """What the operation returns for these arguments."""
    return correct.forward(**arguments)


def pull(correct: Operation, cotangent: Array, arguments: Arguments) -> Gradients:
    """All gradients of an operation with one output."""
    assert correct.backward is not None
    return correct.backward(cotangent, **arguments)


def with_arguments(correct: Operation, **changes: Callable[[Arguments], Any]) -> Operation:
    """The operation on changed arguments: scalars, indices, masks, or an input by a constant. Each change sees the arguments as given.

    An input that is changed to None has no gradient.
    """

    def changed(arguments: Arguments) -> dict[str, Any]:
        return {**arguments, **{name: change(arguments) for name, change in changes.items()}}

    def forward(**arguments: Any) -> Any:
        return call(correct, changed(arguments))

    def backward(*cotangents: Array, **arguments: Any) -> Gradients:
        assert correct.backward is not None
        return correct.backward(*cotangents, **changed(arguments))

    return Operation(forward, backward if correct.backward else None, correct.outputs)


def through(
    correct: Operation, apply: Callable[[Array, Arguments], Array], adjoint: Callable[[Array, Arguments], Array], *names: str
) -> Operation:
    """The operation with a linear map applied to some of its inputs; `adjoint` takes their gradients back through the map."""

    def changed(arguments: Arguments) -> dict[str, Any]:
        return {**arguments, **{name: apply(arguments[name], arguments) for name in names if arguments.get(name) is not None}}

    def forward(**arguments: Any) -> Any:
        return call(correct, changed(arguments))

    def backward(cotangent: Array, **arguments: Any) -> Gradients:
        gradients = pull(correct, cotangent, changed(arguments))
        return gradients | {name: adjoint(gradients[name], arguments) for name in names if name in gradients}

    return Operation(forward, backward, correct.outputs)


def scaled_input(correct: Operation, name: str, factor: Callable[[Arguments], float]) -> Operation:
    """The operation with one input times a factor."""

    def scale(value: Array, arguments: Arguments) -> Array:
        return value * factor(arguments)

    return through(correct, scale, scale, name)


def scaled(correct: Operation, factor: Callable[[Arguments], float]) -> Operation:
    """The operation's one output times a factor."""

    def forward(**arguments: Any) -> Any:
        return call(correct, arguments) * factor(arguments)

    def backward(cotangent: Array, **arguments: Any) -> Gradients:
        return pull(correct, cotangent * factor(arguments), arguments)

    return Operation(forward, backward, correct.outputs)


def dropped(correct: Operation, *names: str) -> Operation:
    """The operation without some optional inputs."""
    return with_arguments(correct, **dict.fromkeys(names, lambda _: None))


def with_gradients(correct: Operation, change: Callable[[Gradients, Array, Arguments], Gradients]) -> Operation:
    """The correct forward pass with some gradients replaced: `change` sees all gradients, the cotangent and the arguments."""

    def backward(cotangent: Array, **arguments: Any) -> Gradients:
        gradients = pull(correct, cotangent, arguments)
        return gradients | change(gradients, cotangent, arguments)

    return replace(correct, backward=backward)


def in_bfloat16(value: Array) -> Array:
    """Rounded to bfloat16, in the dtype it came in."""
    return nearest(value, ml_dtypes.bfloat16)


def without_keyword(option: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function that is not told one of its keyword arguments: its default holds."""

    def wrap(correct: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **options: correct(*given, **{name: value for name, value in options.items() if name != option})

    return wrap
