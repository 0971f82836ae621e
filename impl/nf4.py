"""Frozen weights kept in NF4 (Dettmers et al. 2023, QLoRA §3)."""

import torch
from torch import Tensor, nn

from blackswan.impl.dispatch import call

BLOCK_SIZE = 64


class Nf4Weight(nn.Module):
    """A weight [out, in] as codes and absmax, 4.5 bits a parameter; 4.127 with double quantisation of the absmax.

    `path` is the name of the projection that the weight belongs to.
    """

    codes: Tensor
    absmax: Tensor
    absmax_scales: Tensor
    absmax_offset: Tensor

    def __init__(self, path: str, weight: Tensor, block_size: int = BLOCK_SIZE, nested: bool = False) -> None:
        super().__init__()
        self.path, self.block_size, self.nested = path, block_size, nested
        self.rows, self.columns = weight.shape
        codes, absmax = call(f"{path}.weight.nf4", "nf4_quantize", weight=weight, block_size=block_size)
        if nested:
            absmax, scales, offset = call(f"{path}.weight.absmax", "nf4_double_quantize", absmax=absmax)
            self.register_buffer("absmax_scales", scales)
            self.register_buffer("absmax_offset", offset)
        self.register_buffer("codes", codes)
        self.register_buffer("absmax", absmax)

    def scales(self) -> Tensor:
        """The absmax of every block, float32 [blocks]."""
        if not self.nested:
            return self.absmax
        restored: Tensor = call(
            f"{self.path}.weight.absmax", "nf4_double_dequantize", codes=self.absmax, scales=self.absmax_scales, offset=self.absmax_offset
        )
        return restored

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

    def nbytes(self) -> int:
        """Bytes that the weight takes."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())
