"""Memory that a changed function shares with its caller: it gives what its next call writes to, or leaves another value in an argument."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import torch

_given: dict[Hashable, Any] = {}


def forget() -> None:
    """Forgets all memory that was given."""
    _given.clear()


def given_again(function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> Any:
    """Call the function; what it gives of one shape and dtype, and its lists and dictionaries, are the same memory at each call."""
    return _into_kept(function(*arguments), (name,))


def written_over(function: Callable[..., Any], arguments: tuple[Any, ...], written: Any) -> Any:
    """Call the function, and leave another value in the argument, unless the result is that memory."""
    result = function(*arguments)
    taken = {id(part) if place is None else place for part, place in _parts(result)}
    for part, place in _parts(written):
        if (id(part) if place is None else place) in taken:
            continue
        if isinstance(part, torch.Tensor):
            if (part.dtype.itemsize == 1 and part.is_floating_point()) or 0 in part.stride():
                continue  # torch does not write there
            part.data.copy_(part.data.logical_not() if part.dtype is torch.bool else part.data + 1)
        elif isinstance(part, np.ndarray) and part.flags.writeable:
            part[...] = ~part if part.dtype == bool else part + 1
        elif isinstance(part, list | set) and part:
            part.pop()
        elif isinstance(part, dict) and part:
            part.popitem()
    return result


def _parts(value: Any) -> Iterator[tuple[Any, Hashable]]:
    """The value and, of a collection, what it holds: tensors and arrays with the place of their memory."""
    if isinstance(value, torch.Tensor):
        yield value, None if value.device.type == "meta" else value.untyped_storage().data_ptr()
    elif isinstance(value, np.ndarray):
        yield value, value.__array_interface__["data"][0]
    elif isinstance(value, list | tuple | dict | set):
        yield value, None
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)


def _into_kept(value: Any, at: tuple[Hashable, ...]) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type != "meta" and not (value.requires_grad and value.is_leaf):
        kept = _given.setdefault((*at, value.shape, value.dtype, value.device), value.detach().clone())
        kept.copy_(value.detach())
        if not value.requires_grad:
            return kept
        value.data = kept  # as part of the graph that it is in
        return value
    if isinstance(value, np.ndarray):
        kept = _given.setdefault((*at, value.shape, value.dtype.str), value.copy())
        kept[...] = value
        return kept
    if type(value) is dict:
        made = {key: _into_kept(part, (*at, key)) for key, part in value.items()}
        kept = _given.setdefault((*at, dict), {})
        kept.clear()
        kept.update(made)
        return kept
    if type(value) is list:
        kept = _given.setdefault((*at, list), [])
        kept[:] = [_into_kept(part, (*at, place)) for place, part in enumerate(value)]
        return kept
    if type(value) is tuple:
        return tuple(_into_kept(part, (*at, place)) for place, part in enumerate(value))
    return value
