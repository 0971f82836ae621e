"""Low-rank adaptation (Hu et al. 2021): A [rank, in], B [out, rank], scale alpha / rank."""

import torch
from torch import Tensor
from torch.nn import functional

from blackswan.impl.operations.layers import linear
from blackswan.impl.operations.precision import widen


def lora_linear(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b + (alpha/rank) · (x Aᵀ) Bᵀ; x [..., in] → [..., out]. A and B may be float32 masters: they compute in x's dtype."""
    base = linear(x, weight, bias)
    projected = functional.linear(x, lora_a.to(x.dtype)).flatten(0, -2)
    # Scaled and added inside the product: the update is not rounded by itself.
    y = torch.addmm(base.flatten(0, -2), projected, lora_b.to(x.dtype).T, alpha=alpha / lora_a.shape[0])
    return y.view(base.shape)


def lora_merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float) -> Tensor:
    """W + (alpha/rank) · B A, in float32, or in float64 where an argument is, rounded once to W's dtype."""
    return (widen(weight) + alpha / lora_a.shape[0] * (widen(lora_b) @ widen(lora_a))).to(weight.dtype)


def lora_unmerge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float) -> Tensor:
    """W − (alpha/rank) · B A, in float32, or in float64 where an argument is, rounded once to W's dtype."""
    return lora_merge(weight, lora_a, lora_b, -alpha)
