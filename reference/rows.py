"""Any number of leading axes, as `rows`."""

from collections.abc import Callable

import numpy as np

from blackswan.reference.table import Array

CACHED = 2**15
"""Numbers of an array that are worked on at a time: a few such arrays fit in a core's cache."""


def as_rows(x: Array) -> Array:
    """[..., n] → [rows, n]."""
    return x.reshape(-1, x.shape[-1])


def outer(dy: Array, x: Array) -> Array:
    """dyᵀ x summed over the leading axes: [..., m], [..., n] → [m, n]."""
    product: Array = as_rows(dy).T @ as_rows(x)
    return product


def by_rows(function: Callable[..., tuple[Array, ...]], *arrays: Array) -> tuple[Array, ...]:
    """What `function` makes of arrays [..., n]: arrays [..., m], each row of which depends on the same row of the given ones alone.

    It is called with [rows, n] for a few rows at a time: what it makes on the way then stays in the cache, which for large arrays takes
    less time than to read it from memory.
    """
    rows = [as_rows(array) for array in arrays]
    few = max(1, CACHED // max(1, arrays[0].shape[-1]))
    first = function(*(array[:few] for array in rows))
    whole = [np.empty_like(value, shape=(len(rows[0]), *value.shape[1:])) for value in first]

    for start in range(0, len(rows[0]), few):
        part = function(*(array[start : start + few] for array in rows)) if start else first
        for all_rows, value in zip(whole, part, strict=True):
            all_rows[start : start + few] = value
    return tuple(value.reshape(*arrays[0].shape[:-1], *value.shape[1:]) for value in whole)


def over_rows(x: Array) -> Array:
    """The sum over the leading axes: [..., n] → [n]."""
    total: Array = as_rows(x).sum(axis=0)
    return total
