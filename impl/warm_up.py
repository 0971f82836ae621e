"""A device's kernels are compiled and its libraries' handles made by a small model, before any weight of the real one goes there.

What cannot be compiled, or finds no memory, is thus known before a model is loaded, and the first step is not the slow one.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from blackswan.impl.config import DecoderConfig
from blackswan.impl.tensors import LazyTensors, Shapes, with_gradients

COLD = ("cpu",)
"""Kinds of device for which nothing is compiled and no handle made."""
VOCAB = 16
"""No kernel of ours is compiled for a size of the vocabulary."""
SHAPES = ((2, 16), (3, 5))
"""[batch, seq] of the small model's batches: Triton compiles a kernel anew for numbers that 16 divides and for those that it does not."""
T = TypeVar("T")


class WarmUpFailed(RuntimeError):  # noqa: N818  a state of the device, named for what was found
    """The small model's computation failed on the device, on which no weight was put. A command ends with 1."""


def warmed(device: torch.device, rehearse: Callable[[], object], load: Callable[[], T]) -> T:
    """What `load` gives, which puts weights on the device; before it `rehearse` has computed there what the model will compute.

    On a CPU nothing is rehearsed. Raises WarmUpFailed where the rehearsal fails; nothing is loaded then.
    """
    if device.type in COLD:
        return load()
    try:
        with with_gradients():
            rehearse()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise WarmUpFailed(
            f"the model's computation cannot run on {device}, as a small model of its widths shows ({reason}); no weight was put there. "
            "Free memory there, choose the backend torch if the error names a kernel, or another device"
        ) from error
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return load()


def small(architecture: DecoderConfig) -> DecoderConfig:
    """Two layers of the architecture, over few tokens: no gradient passes through the input of the first, as one does in all others."""
    return replace(architecture, layers=min(2, architecture.layers), vocab=min(VOCAB, architecture.vocab))


class Constant(LazyTensors):
    """Tensors of those shapes on a device: vectors of ones, matrices of small numbers, from which every value stays finite."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor."""
        return self._shapes

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, made anew."""
        shape = self._shapes[name]
        return torch.full(shape, 1.0 if len(shape) == 1 else 0.01, dtype=self._dtype, device=self._device)
