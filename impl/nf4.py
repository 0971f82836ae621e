"""Frozen weights kept in NF4 (Dettmers et al. 2023, QLoRA §3)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from blackswan.impl.dispatch import call

BLOCK_SIZE = 64


class Nf4Weight(nn.Module):
    """A weight [out, in] as codes and the absmax of every block, float32: 4.5 bits a parameter.

    After `double_quantize` the absmax are 8-bit codes, with a float32 for each 256 of them and their mean: 4.127 bits. `path` is the name
    of the projection that the weight belongs to.
    """

    codes: Tensor
    absmax: Tensor
    absmax_scales: Tensor
    absmax_offset: Tensor

    def __init__(self, path: str, weight: Tensor, block_size: int = BLOCK_SIZE) -> None:
        super().__init__()
        self.path, self.block_size, self.doubly_quantized = path, block_size, False
        self.rows, self.columns = weight.shape
        codes, absmax = call(f"{path}.weight.nf4", "nf4_quantize", weight=weight, block_size=block_size)
        self.register_buffer("codes", codes)
        self.register_buffer("absmax", absmax)

    def double_quantize(self) -> None:
        """Quantises the absmax (QLoRA §3, double quantisation), once."""
        codes, scales, offset = call(f"{self.path}.weight.absmax.nf4", "nf4_double_quantize", absmax=self.absmax)
        self.absmax, self.doubly_quantized = codes, True
        self.register_buffer("absmax_scales", scales)
        self.register_buffer("absmax_offset", offset)

    def scales(self) -> Tensor:
        """The absmax of every block that the weight is computed with, float32 [blocks]."""
        if not self.doubly_quantized:
            return self.absmax
        stored = {"codes": self.absmax, "scales": self.absmax_scales, "offset": self.absmax_offset}
        restored: Tensor = call(f"{self.path}.weight.absmax", "nf4_double_dequantize", **stored)
        return restored

    def restoring(self, scales: Tensor) -> AbstractContextManager[object]:
        """Inside the block automatic differentiation does not keep what `scales` has restored: the backward pass restores it anew.

        Kept for every weight until the backward pass, it would take the memory that double quantisation saves.
        """
        if not self.doubly_quantized:
            return nullcontext()
        storage = scales.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            return self.scales if tensor.untyped_storage()._cdata == storage else tensor

        return saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept())

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in `dtype`."""
        weight: Tensor = call(
            f"{self.path}.weight.dequantized",
            "nf4_dequantize",
            codes=self.codes,
            absmax=self.scales(),
            rows=self.rows,
            columns=self.columns,
            block_size=self.block_size,
            dtype=dtype,
        )
        return weight
