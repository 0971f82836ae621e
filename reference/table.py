"""The table of operations: name → forward and backward. Compositions look operations up here, so that one can be replaced."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Scalars = Mapping[str, Any]


@lru_cache(maxsize=1024)
def _takes_needs(backward: Callable[..., Any]) -> bool:
    return "needs" in inspect.signature(backward).parameters


@dataclass(frozen=True)
class Operation:
    """An elementary operation.

    forward(**inputs, **scalars) returns one array, or a tuple in the order of `outputs`.
    backward(*cotangents, **inputs, **scalars) returns the gradient of each differentiable input by name; None where there is none. One that
    has a parameter `needs` is told the inputs whose gradients are wanted, and leaves the others out: a frozen weight then costs nothing.
    """

    forward: Callable[..., Any]
    backward: Callable[..., dict[str, Array]] | None = None
    outputs: tuple[str, ...] = ("y",)

    def run(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        """The outputs by name."""
        result = self.forward(**arguments)
        results = result if isinstance(result, tuple) else (result,)
        return {name: np.asarray(value) for name, value in zip(self.outputs, results, strict=True)}

    def gradients(self, cotangents: Collection[Array], arguments: Mapping[str, Any], needs: Collection[str]) -> dict[str, Array]:
        """The gradients of the inputs in `needs`, from one cotangent for each output; empty where the operation has no backward."""
        if self.backward is None:
            return {}
        selection = {"needs": frozenset(needs)} if _takes_needs(self.backward) else {}
        gradients = self.backward(*cotangents, **arguments, **selection)
        return {name: gradient for name, gradient in gradients.items() if name in needs}


@dataclass(frozen=True)
class Composition:
    """Calls of operations on a tape: build(tape, scalars) reads its inputs and parameters and sets its `outputs`. The tape is a `Tape`.

    Under its name in a table, a composition replaces the reference's own of that name wherever that one is used.
    """

    build: Callable[[Any, Scalars], None]
    differentiable: bool = True


Table = Mapping[str, Operation | Composition]
