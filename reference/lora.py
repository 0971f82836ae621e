"""Low-rank adaptation of a linear layer (Hu et al. 2021, arXiv:2106.09685, §4.1): y = x Wᵀ + b + s · (x Aᵀ) Bᵀ, s = alpha / rank.

Derivation: with h = x Aᵀ and dh = s · dy B,

    dx = dy W + dh A,   dW = Σ_rows dyᵀ x,   db = Σ_rows dy,   dA = Σ_rows dhᵀ x,   dB = s · Σ_rows dyᵀ h.
"""

from collections.abc import Collection

import blackswan.reference.linear as linear
from blackswan.reference.rows import outer
from blackswan.reference.table import Array


def _scale(alpha: float, lora_a: Array) -> float:
    rank: int = lora_a.shape[0]
    return alpha / rank


def forward(x: Array, weight: Array, lora_a: Array, lora_b: Array, alpha: float, bias: Array | None = None) -> Array:
    """x [..., in], weight [out, in], lora_a [rank, in], lora_b [out, rank], bias [out] → [..., out]."""
    base = linear.forward(x, weight, bias)  # [..., out]
    update = (x @ lora_a.T) @ lora_b.T  # [..., out]
    return base + _scale(alpha, lora_a) * update


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    lora_a: Array,
    lora_b: Array,
    alpha: float,
    bias: Array | None = None,
    needs: Collection[str] = ("x", "weight", "bias", "lora_a", "lora_b"),
) -> dict[str, Array]:
    """Gradients of those of x, weight, bias, lora_a and lora_b that are in `needs`; dy [..., out]."""
    scaled = _scale(alpha, lora_a) * dy  # [..., out]
    dprojected = scaled @ lora_b  # [..., rank]
    gradients = linear.backward(dy, x, weight, bias, needs)
    if "x" in needs:
        gradients["x"] = gradients["x"] + dprojected @ lora_a  # [..., in]
    if "lora_a" in needs:
        gradients["lora_a"] = outer(dprojected, x)  # [rank, in]
    if "lora_b" in needs:
        gradients["lora_b"] = outer(scaled, x @ lora_a.T)  # [out, rank]
    return gradients


def merge(weight: Array, lora_a: Array, lora_b: Array, alpha: float) -> Array:
    """W + s · B A, [out, in]."""
    return weight + _scale(alpha, lora_a) * (lora_b @ lora_a)


def unmerge(weight: Array, lora_a: Array, lora_b: Array, alpha: float) -> Array:
    """W − s · B A, [out, in]."""
    return weight - _scale(alpha, lora_a) * (lora_b @ lora_a)
