"""Checks of tensor values, in one place because each of them waits for the device.

A captured CUDA graph cannot wait: a capturing caller validates its batch before the replay and wraps the capture in `unchecked()`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

_enabled = True
_lock, _blocks = Lock(), 0


class NonFiniteError(ValueError, FloatingPointError):
    """A value that must be finite is NaN or infinite: bad input to an operation, and a run that has to stop."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Leaves out the checks of values inside the block, for a caller that has made them itself (CUDA graph capture).

    For all threads; where blocks of several overlap, until the last of them ends.
    """
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(more: int) -> None:
    global _enabled, _blocks
    with _lock:
        _blocks += more
        _enabled = not _blocks


def enabled() -> bool:
    """Whether values are checked here."""
    return _enabled


@contextmanager
def counted_from(first: int) -> Iterator[None]:
    """An error inside, of a micro-batch that begins at that sample of its batch, names a sample by its place in the batch."""
    try:
        yield
    except ValueError as error:
        if first:
            named = re.compile(r"(input_ids|mask|labels|targets|logits)\[(\d+)")
            error.args = (named.sub(lambda found: f"{found[1]}[{first + int(found[2])}", str(error), count=1),)
        raise


def require_finite(name: str, value: Tensor) -> None:
    """Raises a NonFiniteError that names the first NaN or infinite entry of `value`."""
    if _enabled and not bool(torch.isfinite(value).all()):
        index = _first(~torch.isfinite(value))
        raise NonFiniteError(f"{name}{list(index)} is {value[index].item()}; every entry must be finite")


def require_between(name: str, value: Tensor, low: float, high: float) -> None:
    """Raises a ValueError that names the first entry of `value` outside low … high, NaN among them."""
    if not _enabled:
        return
    wrong = ~((value >= low) & (value <= high))
    if bool(wrong.any()):
        index = _first(wrong)
        raise ValueError(f"{name}{list(index)} is {value[index].item()}; expected {low:g} to {high:g}")


def require_above_zero(name: str, value: Tensor) -> None:
    """Raises a ValueError that names the first entry of `value` that is not a positive finite number."""
    if not _enabled:
        return
    wrong = ~((value > 0) & torch.isfinite(value))
    if bool(wrong.any()):
        index = _first(wrong)
        raise ValueError(f"{name}{list(index)} is {value[index].item()}; expected a positive finite number")


def require_shape(name: str, value: Tensor, shape: Sequence[int]) -> None:
    """Raises a ValueError for a tensor of another shape, also one that could be broadcast to it: a mean would count it several times."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(value.shape)}; expected {list(shape)}")


def require_integers(name: str, value: Tensor) -> None:
    """Raises a ValueError for a tensor of another kind of number: cut to integers, 0.9 would be 0."""
    if value.is_floating_point():
        raise ValueError(f"{name} has dtype {value.dtype}; expected integers")


def require_below(name: str, value: Tensor, limit: int, what: str) -> None:
    """Raises a ValueError for a tensor that is not of integers, and one that names the first entry outside 0 … limit − 1."""
    require_integers(name, value)
    if not _enabled or value.numel() == 0:
        return
    wide = value.to(torch.int64)  # a byte compares with the limit's last eight bits
    wrong = (wide < 0) | (wide >= limit)
    if bool(wrong.any()):
        index = _first(wrong)
        raise ValueError(f"{name}{list(index)} is {value[index].item()}, but the {what} go from 0 to {limit - 1}")


def require_rows(name: str, mask: Tensor) -> None:
    """Raises a ValueError that names the first row of the boolean `mask` [batch, seq] without a true entry."""
    if not _enabled:
        return
    empty = ~mask.any(dim=-1)
    if bool(empty.any()):
        raise ValueError(f"{name}[{_first(empty)[0]}] has no real token; every sample needs at least one")


def require_positive(name: str, counts: Tensor) -> None:
    """Raises a ValueError that names the first entry of the integer vector `counts` below one, and for an empty vector."""
    if not _enabled:
        return
    if counts.numel() == 0:
        raise ValueError(f"{name} is empty: a mean over no samples is undefined")
    if bool((counts < 1).any()):
        index = _first(counts < 1)
        raise ValueError(f"{name}{list(index)} is {counts[index].item()}; expected at least one sample in every micro-batch")


def require_finite_norm(norm: Tensor, gradients: Tensor) -> None:
    """Raises a FloatingPointError that names the first bad entry where the norm of `gradients` [tensors, count] is NaN or infinite."""
    if not _enabled or bool(torch.isfinite(norm)):
        return
    bad = ~torch.isfinite(gradients)
    if bool(bad.any()):
        index = _first(bad)
        raise FloatingPointError(f"the gradient norm is {norm.item()}: gradients{list(index)} is {gradients[index].item()}")
    raise FloatingPointError(f"the gradient norm is {norm.item()}: the sum of squares overflows {norm.dtype}")


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0])
