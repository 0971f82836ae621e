"""What the ranks of a group agree on: that none of them failed, and that all hold the same model.

A trainer does, on every rank:

    with together(group):                      # an error of one rank is raised on all of them
        ... forward and backward over this rank's shard: sums over its samples, zeros for an empty shard ...
        require_finite(gradient_sum)
    gradient = group.sum(gradient_sum) / group.sum(count)
    ... clip, step ...
    require_equal(group, {"weights": flat_weights})
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from blackswan.impl.group import Group

_CHUNK = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_MIX_FIRST, _MIX_SECOND = -7046029254386353131, -4658895280553007687  # splitmix64 (Steele et al. 2014), as signed 64-bit integers
_RAISED_ELSEWHERE = (FileExistsError, FileNotFoundError, FloatingPointError, IndexError, OSError, ValueError)


class WorkerFailed(RuntimeError):  # noqa: N818  a state of the run, not a defect of the program
    """One of the workers cannot go on, or they hold different weights: all of them stop."""


def require_finite(gradient: Tensor) -> None:
    """Raises a FloatingPointError that says how many elements of a rank's own gradient are not finite."""
    bad = int((~torch.isfinite(gradient)).sum())
    if bad:
        raise FloatingPointError(f"the gradient is not finite in {bad} of {gradient.numel()} elements")


@contextmanager
def together(group: Group) -> Iterator[None]:
    """An error inside the block on one rank is raised on every rank at the block's end and names the rank: nobody waits in vain.

    Errors of files (with the system's number), values, indices and floating point are raised as such, others as WorkerFailed.
    No collective may stand inside.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever stops this rank has to stop the others, which would wait for it
        error = caught
    if group.size == 1:
        if error is not None:
            raise error
        return
    failed = group.gather(torch.tensor(error is not None, device="cpu"))
    if failed.any():
        _raise_first(group.gather_text("" if error is None else _told(error)), group.rank, error)


def _shared_kind(error: Exception) -> type[Exception]:
    return next((kind for kind in _RAISED_ELSEWHERE if isinstance(error, kind)), WorkerFailed)


def _told(error: Exception) -> str:
    """The kind, the system's number of an error of files (0 where there is none), and the message."""
    number = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else 0
    return f"{_shared_kind(error).__name__} {number}\n{error}"


def _raise_first(texts: Sequence[str], rank: int, own: Exception | None) -> NoReturn:
    kinds = {kind.__name__: kind for kind in (*_RAISED_ELSEWHERE, WorkerFailed)}
    first = next(rank for rank, text in enumerate(texts) if text)
    head, _, message = texts[first].partition("\n")
    name, number = head.split()
    others = [str(other) for other, text in enumerate(texts) if text and other != first]
    also = f" (also on rank {', '.join(others)})" if others else ""
    error = kinds[name](f"rank {first} of {len(texts)}: {message}{also}")
    if isinstance(error, OSError) and int(number):
        error.errno = int(number)
    raise error from (own if first == rank else None)


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit linear hash of the bits of a tensor, int64 [], computed where the tensor is.

    One element that differs always shows; differences in several go unseen once in 2³² at most, as elements are read in parts of 32 bits:
    in a sum modulo 2⁶⁴ the topmost bits of an even number of 64-bit elements would cancel.
    """
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        weight = torch.arange(start + 1, start + 1 + len(part), device=bits.device) * _MIX_FIRST
        weight = (weight ^ (weight >> 32)) * _MIX_SECOND
        total += (part * (weight | 1)).sum()
    return total


def require_equal(group: Group, tensors: Mapping[str, Tensor]) -> None:
    """Raises WorkerFailed on every rank where a tensor is not the same, bit for bit, on all of them; it names tensor and ranks."""
    if group.size == 1 or not tensors:
        return
    # Some of a trainer's state is on the host and some on the device.
    hashes = group.gather(torch.stack([fingerprint(tensor).cpu() for tensor in tensors.values()]))
    different = hashes != hashes[0]
    if different.any():
        first = int(different.any(dim=0).int().argmax())
        ranks = ", ".join(str(rank) for rank in different[:, first].nonzero().flatten().tolist())
        raise WorkerFailed(
            f"{list(tensors)[first]} of rank {ranks} differ from those of rank 0: the workers do not train the same model any more; "
            "resume from the last state"
        )


def require_same(group: Group, what: str, text: str) -> None:
    """Raises a ValueError on every rank where the text is not the same on all of them; it names what it stands for and the ranks."""
    texts = group.gather_text(text)
    different = ", ".join(str(rank) for rank, other in enumerate(texts) if other != texts[0])
    if different:
        raise ValueError(f"rank {different}: another {what} than that of rank 0; give every worker the same")
