"""The rule by which values are rounded, on NumPy arrays and on torch tensors; and products that round their operands to TF32."""

from typing import Any, TypeVar

import numpy as np

from blackswan.reference.table import Array

Values = TypeVar("Values")
"""NumPy arrays or torch tensors: what comes out is of the kind that went in."""

OPERAND_ROUNDOFF = 2.0**-11
"""The unit roundoff of an operand that is rounded to TF32: 10 bits of fraction, to nearest."""


def nearest(values: Values, storage: Any, compute: Any = None) -> Values:
    """As `storage` holds them, to nearest even, in the dtype `compute`, or in that in which they come. What is too large is infinite."""
    given: Any = values
    compute = compute or given.dtype
    rounded: Values
    if given.dtype == storage == compute:
        return values
    if isinstance(values, np.ndarray | np.generic):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            rounded = given.astype(storage).astype(compute)
    else:
        rounded = given.to(storage).to(compute)
    return rounded


def moved(values: Values, unit: float, generator: Any) -> Values:
    """Each value times 1 + `unit` or 1 − `unit`, by the toss of a coin: as much as another order of sums may do to it."""
    given: Any = values
    if isinstance(values, np.ndarray | np.generic):
        signed = np.copysign(given.dtype.type(unit), generator.random(given.shape, np.float32) - np.float32(0.5))
    else:
        torch = _library(values)
        tossed = torch.randint(0, 2, given.shape, generator=generator, device=given.device, dtype=torch.int8)
        signed = tossed.to(given.dtype) * (2 * unit) - unit
    shifted: Values = given + given * signed
    return shifted


def dithered(values: Values, unit: float, generator: Any) -> Values:
    """Moved by up to half an ulp either way, so that rounding to nearest afterwards is stochastic rounding; a zero has none to move by."""
    given: Any = values
    library = _library(values)
    if isinstance(values, np.ndarray | np.generic):
        uniform = generator.random(given.shape, dtype=np.float32)
    else:
        uniform = library.rand(given.shape, generator=generator, device=given.device)
    _, exponent = library.frexp(given)
    shift = library.ldexp((uniform - 0.5) * (2 * unit), exponent - 1)
    shifted: Values = library.where(given == 0, given, (given + shift).astype(given.dtype) if library is np else given + shift)
    return shifted


def to_tf32(values: Values) -> Values:
    """Float32 values as TF32 holds them, to nearest even; what is not finite stays. Other dtypes are left alone."""
    given: Any = values
    library = _library(values)
    if given.dtype != library.float32:
        return values
    bits = given.view(library.int32)
    dropped = 13  # bits of float32's fraction that TF32 does not have
    cut = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped << dropped
    rounded: Values = library.where(library.isfinite(given), cut.view(library.float32), given)
    return rounded


def _library(values: Any) -> Any:
    """NumPy or torch, whichever the values belong to."""
    if isinstance(values, np.ndarray | np.generic):
        return np
    import torch

    return torch


class Rounded(np.ndarray[Any, Any]):
    """A float32 array whose computations, and those of what is computed from it, round somewhere; `replay` is the generator of a replay.

    A result of NumPy's functions that are no ufuncs may be a plain array.
    """

    replay: np.random.Generator | None = None

    def __array_finalize__(self, source: Any) -> None:
        """NumPy's hook for views and copies."""
        self.replay = getattr(source, "replay", None)

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        """NumPy's hook for ufuncs, `@` and sums among them."""
        plain = [self._operand(ufunc, value) for value in inputs]
        if "out" in options:
            options["out"] = tuple(np.asarray(value) if isinstance(value, Rounded) else value for value in options["out"])
        return self._result(getattr(ufunc, method)(*plain, **options))

    def _operand(self, ufunc: np.ufunc, value: Any) -> Any:
        """An operand as it enters, as a plain array."""
        raise NotImplementedError

    def _result(self, result: Any) -> Any:
        """A result as it leaves."""
        raise NotImplementedError


class Stored(Rounded):
    """An array in which every result is rounded to the dtype `storage`, stochastically in a replay, as where each step is stored.

    So is a plain array that meets it, such as the cosines of angles, which come of no stored value and are computed in float32.
    """

    storage: np.dtype[Any]
    unit: float

    @classmethod
    def of(cls, array: Array, storage: np.dtype[Any], unit: float, replay: np.random.Generator | None = None) -> "Stored":
        """A view of the array; `unit` is the unit roundoff of `storage`."""
        view = np.asarray(array).view(cls)
        view.storage, view.unit, view.replay = storage, unit, replay
        return view

    def __array_finalize__(self, source: Any) -> None:
        """NumPy's hook for views and copies."""
        super().__array_finalize__(source)
        if isinstance(source, Stored) and hasattr(source, "storage"):
            self.storage, self.unit = source.storage, source.unit

    def _operand(self, ufunc: np.ufunc, value: Any) -> Any:
        del ufunc
        if isinstance(value, Stored):
            return np.asarray(value)
        return nearest(value, self.storage) if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim else value

    def _result(self, result: Any) -> Any:
        array = np.asarray(result)
        if array.dtype.kind != "f":
            return result
        rounded = nearest(array, self.storage)
        if self.replay is not None:
            moving = nearest(dithered(array, self.unit, self.replay), self.storage)
            rounded = np.where(rounded == array, array, moving)
        rounded = np.where(np.isfinite(rounded), rounded, array)  # overflow is no rounding: honest code has that step in a wider dtype
        if isinstance(result, np.ndarray):  # which may be the array that the caller wants written
            array[...] = rounded
            rounded = array
        return Stored.of(rounded, self.storage, self.unit, self.replay)


class Tf32(Rounded):
    """A float32 array whose matrix products, and those of what is computed from it, round both operands to TF32.

    With a generator in `replay` each element of an operand moves by a unit roundoff first. Hardware does not say whether it rounds to
    nearest or cuts off, and near a number of TF32 the one makes next to no error and the other a whole unit.

    A product rounds as long as one of its operands is no plain array.
    """

    @classmethod
    def of(cls, array: Array, replay: np.random.Generator | None = None) -> "Tf32":
        """A view of the array."""
        view = np.asarray(array).view(cls)
        view.replay = replay
        return view

    def _operand(self, ufunc: np.ufunc, value: Any) -> Any:
        if ufunc is not np.matmul:
            return np.asarray(value) if isinstance(value, Tf32) else value
        array = np.asarray(value)
        if self.replay is not None and array.dtype == np.float32:
            array = moved(array, OPERAND_ROUNDOFF, self.replay)
        return to_tf32(array)

    def _result(self, result: Any) -> Any:
        return Tf32.of(result, self.replay) if isinstance(result, np.ndarray) else result
