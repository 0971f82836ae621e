"""Named tensors that are read, selected and converted one at a time, when they are asked for."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


def seeded(seed: int) -> torch.Generator:
    """Random numbers of a seed from 0 on, on the CPU. Torch uses the lower 32 bits of a seed only: a larger seed is hashed to 32 bits, so
    that its upper bits count too."""
    if seed >= 2**32:
        seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return torch.Generator().manual_seed(seed)


def laid_out(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors on the CPU, row by row, no two of them in one memory, as a safetensors file has them; copied where they are not so."""
    found, taken = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        found[name] = value.clone() if value.untyped_storage().data_ptr() in taken else value
        taken.add(value.untyped_storage().data_ptr())
    return found


class LazyTensors(Mapping[str, Tensor]):
    """Tensors whose names and shapes are known before they are read. Each look-up reads anew and keeps nothing."""

    @property
    @abstractmethod
    def shapes(self) -> Shapes:
        """Name and shape of every tensor; reads none."""

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name; reads none."""
        return name in self.shapes


class Converted(LazyTensors):
    """`tensors` without the names in `without`, each one converted to `dtype` on `device` when it is asked for."""

    def __init__(self, tensors: Tensors, *, dtype: torch.dtype, device: torch.device | str, without: Collection[str] = ()) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._shapes = {name: shape for name, shape in shapes_of(tensors).items() if name not in without}

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor; reads none."""
        return self._shapes

    def __getitem__(self, name: str) -> Tensor:
        """The tensor; it shares the memory of a tensor that is there already in that form. KeyError for a name that is not there."""
        if name not in self._shapes:
            raise KeyError(name)
        return self._tensors[name].to(device=self._device, dtype=self._dtype)


def shapes_of(tensors: Tensors) -> Shapes:
    """Name and shape of every tensor; those of LazyTensors without reading one."""
    if isinstance(tensors, LazyTensors):
        return tensors.shapes
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def kept_on_devices(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Calls `make` once for each device and other arguments, and keeps the tensor; on the device `meta` it is called each time.

    An estimate of memory computes on `meta`, and has to count the constant whether or not another estimate was made before.
    """
    keeping = functools.cache(make)

    @functools.wraps(make)
    def constant(*given: Any) -> Tensor:
        return (make if torch.device("meta") in given else keeping)(*given)

    constant.cache_clear = keeping.cache_clear  # type: ignore[attr-defined]  # as functions of functools.cache have it
    return constant


@contextmanager
def with_gradients() -> Iterator[None]:
    """Inside the block automatic differentiation is on, whatever the caller has switched off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
