"""What every kernel's launch needs: the buffers it writes into, and the device it runs on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from blackswan.impl.kernels import interpreted

STORAGE = (torch.float32, torch.bfloat16, torch.float16)
FUSED = {"enable_fp_fusion": True}
"""Products may be added without a rounding between, which Triton before 3.10 does by default and later ones do not."""


def buffer(name: str, given: Tensor | None, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`given`, or a new contiguous tensor of that shape on the device of `like`, in its dtype unless another one is named.

    Raises a ValueError where `given` has another shape, dtype or device, or its last axis is not contiguous.
    """
    dtype = dtype or like.dtype
    if given is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if tuple(given.shape) != tuple(shape) or given.dtype != dtype or given.device != like.device:
        raise ValueError(
            f"{name} is {given.dtype} {list(given.shape)} on {given.device}, expected {dtype} {list(shape)} on {like.device} to write into"
        )
    require_contiguous_rows(name, given)
    return given


def require_contiguous_rows(name: str, value: Tensor) -> None:
    """Raises a ValueError unless neighbours along the last axis are neighbours in memory."""
    if value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} has strides {list(value.stride())}: expected its last axis to be contiguous")


def require_same_shape(name: str, value: Tensor, other: str, reference: Tensor) -> None:
    """Raises a ValueError unless `value` has the shape of `reference`, and contiguous rows."""
    if value.shape != reference.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected that of {other}, {list(reference.shape)}")
    require_contiguous_rows(name, value)


def require_storage(name: str, dtype: torch.dtype) -> None:
    """Raises a ValueError for a dtype that the kernels do not hold values in; they compute in float32."""
    if dtype not in STORAGE:
        raise ValueError(f"{name} is {dtype}: the kernels take {', '.join(map(str, STORAGE))}")


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *others: Any, **options: Any) -> None:
    """Runs a kernel on the device of its first argument; where that has a shape and no content (`meta`) there is nothing to run."""
    if not first.is_meta:
        with on_device(first), _language_patched_once() if interpreted() else nullcontext():
            kernel[grid](first, *others, **FUSED, **options)


@contextmanager
def _language_patched_once() -> Iterator[None]:
    """Inside the block Triton's interpreter looks once a module for what it replaces in its language, not at each call of a function."""
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    patched: dict[str, Any] = {}

    def once(function: Any) -> Any:
        if function.__module__ not in patched:
            patched[function.__module__] = patch(function)
        return patched[function.__module__]

    interpreter._patch_lang = once
    try:
        yield
    finally:
        interpreter._patch_lang = patch


def on_device(value: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(value.device) if value.is_cuda else nullcontext()
