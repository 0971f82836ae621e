"""Products that round their operands to TF32, for every `@` of the reference without a word about it there."""

from typing import Any

import numpy as np

from blackswan.reference.table import Array

OPERAND_ROUNDOFF = 2.0**-11
"""Of an operand: 10 bits of fraction, to nearest."""
_DROPPED = 13
"""Bits of float32's fraction that TF32 does not have."""


def round_operand(array: Array) -> Array:
    """A float32 array's values as TF32 holds them, to nearest even; what is not finite stays. Other dtypes are left alone."""
    if array.dtype != np.float32:
        return array
    bits = np.ascontiguousarray(array).view(np.uint32)
    last, below = np.uint32(_DROPPED), np.uint32((1 << (_DROPPED - 1)) - 1)
    rounded = ((bits + below + ((bits >> last) & np.uint32(1))) >> last << last).view(np.float32)
    return np.where(np.isfinite(array), rounded, array)


class Tf32(np.ndarray[Any, Any]):
    """A float32 array whose matrix products, and those of what is computed from it, round both operands to TF32.

    With a generator in `replay` each element of an operand moves by a unit roundoff first. Hardware does not say whether it rounds to
    nearest or cuts off, and near a number of TF32 the one makes next to no error and the other a whole unit.

    What NumPy makes of it by other means than its ufuncs may be a plain array; a product rounds as long as one of its operands is not.
    """

    replay: np.random.Generator | None = None

    @classmethod
    def of(cls, array: Array, replay: np.random.Generator | None = None) -> "Tf32":
        """A view of the array."""
        view = np.asarray(array).view(cls)
        view.replay = replay
        return view

    def __array_finalize__(self, source: Any) -> None:
        """NumPy's hook for views and copies."""
        self.replay = getattr(source, "replay", None)

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        """NumPy's hook for ufuncs, `@` among them."""
        plain = [np.asarray(value) if isinstance(value, Tf32) else value for value in inputs]
        if ufunc is np.matmul:
            plain = [self._operand(value) for value in plain]
        if "out" in options:
            options["out"] = tuple(np.asarray(value) if isinstance(value, Tf32) else value for value in options["out"])
        result = getattr(ufunc, method)(*plain, **options)
        return Tf32.of(result, self.replay) if isinstance(result, np.ndarray) else result

    def _operand(self, value: Any) -> Array:
        array = np.asarray(value)
        if self.replay is not None and array.dtype == np.float32:
            signs = self.replay.integers(0, 2, array.shape, dtype=np.int8) * 2 - 1
            array = array + array * (signs.astype(np.float32) * np.float32(OPERAND_ROUNDOFF))
        return round_operand(array)
