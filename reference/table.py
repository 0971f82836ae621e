"""The table of operations: name → forward and backward. Compositions look operations up here, so that one can be replaced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Scalars = Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """An elementary operation.

    forward(**inputs, **scalars) returns one array, or a tuple in the order of `outputs`.
    backward(*cotangents, **inputs, **scalars) returns the gradient of each differentiable input by name; None where there is none.
    """

    forward: Callable[..., Any]
    backward: Callable[..., dict[str, Array]] | None = None
    outputs: tuple[str, ...] = ("y",)

    def run(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        """The outputs by name."""
        result = self.forward(**arguments)
        results = result if isinstance(result, tuple) else (result,)
        return {name: np.asarray(value) for name, value in zip(self.outputs, results, strict=True)}


Table = Mapping[str, Operation]
