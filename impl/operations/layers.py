"""Embedding, linear map, residual, norms, activation and pooling."""

import torch
from torch import Tensor
from torch.nn import functional

from blackswan.impl import validation
from blackswan.impl.operations.precision import widen


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Row look-up: input_ids [batch, seq], weight [vocab, hidden] → [batch, seq, hidden]; a ValueError for an id outside the vocabulary."""
    validation.require_below("input_ids", input_ids, weight.shape[0], "tokens of the vocabulary")
    if not weight.requires_grad:
        return functional.embedding(input_ids, weight)
    # The gradient of a frequent token is a sum of many rows: in bfloat16 it would stop growing.
    return functional.embedding(input_ids, widen(weight)).to(weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b: x [..., in], weight [out, in], bias [out] → [..., out], in x's dtype."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def residual_add(x: Tensor, branch: Tensor) -> Tensor:
    """y = x + branch."""
    return x + branch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x²) + ε) · w over the last axis, in float32, rounded once (Zhang & Sennrich 2019)."""
    return functional.rms_norm(widen(x), weight.shape, widen(weight), eps).to(x.dtype)


def qk_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over head_dim of x [batch, seq, heads, head_dim], one weight [head_dim] for all heads (Qwen3)."""
    return rms_norm(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """y = gate · σ(gate) · up, in float32, rounded once (Shazeer 2020, "GLU variants")."""
    return (functional.silu(widen(gate)) * widen(up)).to(gate.dtype)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis, in float32, rounded once."""
    return torch.softmax(widen(x), dim=-1).to(x.dtype)


def pool(x: Tensor, mask: Tensor, mode: str) -> Tensor:
    """One vector a sample from its real tokens: x [batch, seq, hidden], mask [batch, seq] → [batch, hidden].

    Raises a ValueError for an unknown mode, a mask of another shape and a sample without a real token.
    """
    if mode not in ("mean", "last", "first"):
        raise ValueError(f"pooling {mode!r}: expected one of 'mean', 'last', 'first'")
    validation.require_shape("mask", mask, x.shape[:2])
    validation.require_rows("mask", mask)
    if mode == "mean":
        total = widen(x).masked_fill(~mask[..., None], 0).sum(dim=1)
        return (total / mask.sum(dim=1, keepdim=True)).to(x.dtype)
    real = mask.to(torch.int64)
    index = real.argmax(dim=1) if mode == "first" else mask.shape[1] - 1 - real.flip(1).argmax(dim=1)
    return x[torch.arange(x.shape[0], device=x.device), index]
