"""A frozen NF4 weight with a low-rank update (Dettmers et al. 2023, QLoRA eq. 5), which keeps codes for its gradient and no weight.

Products are cuBLAS's: with a rank of 8 to 64 the update is a percent of the work of the base product, and one kernel for both would have
to hold its own against cuBLAS on the other 99.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from impl.kernels.nf4_dequantize import nf4_dequantize


@dataclass(frozen=True)
class Nf4Base:
    """The frozen weight [rows, columns] = [out, in] as codes uint8 and absmax float32 of blocks of `block_size`.

    `buffer` [rows, columns] in the activations' dtype, where given, is what every use dequantises into; maps of one shape can share one.
    """

    codes: Tensor
    absmax: Tensor
    rows: int
    columns: int
    block_size: int
    buffer: Tensor | None = None

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The weight, dequantised."""
        return nf4_dequantize(self.codes, self.absmax, self.rows, self.columns, self.block_size, dtype, self.buffer)


def lora_forward(
    x: Tensor, base: Nf4Base, lora_a: Tensor, lora_b: Tensor, scale: float, bias: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ: x [tokens, in] → (y [tokens, out], x Aᵀ [tokens, rank]).

    bias, A [rank, in] and B [out, rank] have the dtype of x.
    """
    weight = base.weight(x.dtype)
    y = torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
    projected = x @ lora_a.T
    # Scaled and added inside the product: the update is not rounded by itself.
    return y.addmm_(projected, lora_b.T, alpha=scale), projected


def lora_backward(
    dy: Tensor, x: Tensor, projected: Tensor, base: Nf4Base, lora_a: Tensor, lora_b: Tensor, scale: float, dx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dA, dB) of `lora_forward`; `projected` is its second result."""
    inner = dy @ lora_b
    dx = torch.mm(dy, base.weight(dy.dtype), out=dx).addmm_(inner, lora_a, alpha=scale)
    return dx, scale * (inner.T @ x), scale * (dy.T @ projected)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lora_a: Tensor, lora_b: Tensor, base: Nf4Base, scale: float, bias: Tensor | None) -> Tensor:
        y, projected = lora_forward(x, base, lora_a, lora_b, scale, bias)
        ctx.save_for_backward(x, projected, lora_a, lora_b)
        ctx.base, ctx.scale = base, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, projected, lora_a, lora_b = ctx.saved_tensors
        return *lora_backward(dy.contiguous(), x, projected, ctx.base, lora_a, lora_b, ctx.scale), None, None, None


def lora_linear(x: Tensor, base: Nf4Base, lora_a: Tensor, lora_b: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b + (alpha/rank) · (x Aᵀ) Bᵀ, x [..., in] → [..., out], with gradients of x, A and B (which may be float32 masters)."""
    frozen = None if bias is None else bias.to(x.dtype)
    y: Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]  # torch
        x.flatten(0, -2), lora_a.to(x.dtype), lora_b.to(x.dtype), base, alpha / lora_a.shape[0], frozen
    )
    return y.view(*x.shape[:-1], base.rows)
