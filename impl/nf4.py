"""Frozen weights kept in NF4 (Dettmers et al. 2023, QLoRA §3)."""

import torch
from torch import Tensor, nn

from blackswan.impl.dispatch import call

BLOCK_SIZE = 64


class Nf4Weight(nn.Module):
    """A weight [out, in] as codes and the float32 absmax of every block: 4.5 bits a parameter.

    `path` is the name of the projection that the weight belongs to.
    """

    codes: Tensor
    absmax: Tensor

    def __init__(self, path: str, weight: Tensor, block_size: int = BLOCK_SIZE) -> None:
        super().__init__()
        self.path, self.block_size = path, block_size
        self.rows, self.columns = weight.shape
        codes, absmax = call(f"{path}.weight.nf4", "nf4_quantize", weight=weight, block_size=block_size)
        self.register_buffer("codes", codes)
        self.register_buffer("absmax", absmax)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in `dtype`."""
        weight: Tensor = call(
            f"{self.path}.weight.dequantized",
            "nf4_dequantize",
            codes=self.codes,
            absmax=self.absmax,
            rows=self.rows,
            columns=self.columns,
            block_size=self.block_size,
            dtype=dtype,
        )
        return weight
