"""Any number of leading axes, as `rows`."""

from reference.table import Array


def as_rows(x: Array) -> Array:
    """[..., n] → [rows, n]."""
    return x.reshape(-1, x.shape[-1])


def outer(dy: Array, x: Array) -> Array:
    """dyᵀ x summed over the leading axes: [..., m], [..., n] → [m, n]."""
    product: Array = as_rows(dy).T @ as_rows(x)
    return product


def over_rows(x: Array) -> Array:
    """The sum over the leading axes: [..., n] → [n]."""
    total: Array = as_rows(x).sum(axis=0)
    return total
