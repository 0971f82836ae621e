"""Results that a changed function keeps, by its arguments: a cache that knows nothing of what else the results depend on."""

import weakref
from collections.abc import Callable, Hashable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

_results: dict[Hashable, Any] = {}
_alive: dict[int, Any] = {}


def forget() -> None:
    """Forgets all results."""
    _results.clear()
    _alive.clear()


def kept(function: Callable[..., Any], arguments: tuple[Any, ...], by: tuple[Any, ...]) -> Any:
    """Call the function, unless it was called before with the same values of the arguments that its results are kept by."""
    key = _key(by)
    if key not in _results:
        _results[key] = by, function(*arguments)  # the arguments stay alive, so that their addresses are not given to others
    return _results[key][1]


def _key(value: Any) -> Hashable:
    """Equal for equal numbers, texts and collections of them, for a tensor that nobody has written to, and for the same object."""
    if value is None or isinstance(value, bool | int | float | str | bytes | PurePath | torch.dtype | torch.device | type):
        return type(value).__name__, str(value)
    if isinstance(value, torch.Tensor):
        return "tensor", value.data_ptr() if value.device.type != "meta" else 0, value.shape, value.stride(), value.dtype, value._version
    if isinstance(value, np.ndarray):
        return "array", value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(_key, value))
    if isinstance(value, Mapping):
        return type(value).__name__, tuple((name, _key(one)) for name, one in value.items())
    return _same(value)


def _same(value: Any) -> Hashable:
    """A number of the object while it lives: its address, and how many objects have been there."""
    place = id(value)
    known, times = _alive.get(place, (None, 0))
    if known is None or known() is not value:
        times += 1
        try:
            _alive[place] = weakref.ref(value), times
        except TypeError:  # some of Python's own objects have no weak references
            _alive[place] = (lambda: value), times
    return type(value).__name__, place, times
