"""Causal grouped-query attention within packed sequences, forward and backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

_flash_forward, _flash_backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Attended:
    """What the backward pass needs: the result [tokens, heads, head_dim], and on the GPU the logarithms of the softmax's sums."""

    y: Tensor
    kept: tuple[Tensor, ...]


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Attended:
    """softmax(q kᵀ / √d) v: q [tokens, heads, d], k and v [tokens, kv_heads, d]; each token sees those before it in its own sequence.

    `longest` is the most tokens that a sequence may have. FlashAttention-2 (Dao 2023) in half precision on a GPU, elsewhere all scores.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        y, sums, state, offset, _ = _flash_forward(q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=q.shape[-1] ** -0.5)
        return Attended(y, (sums, state, offset))
    return Attended(_all_scores(q, k, v, bounds).contiguous(), ())


def attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, forward: Attended, bounds: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if forward.kept:
        sums, state, offset = forward.kept
        limits = (longest, longest, 0.0, True)
        gradients = _flash_backward(dy, q, k, v, forward.y, sums, bounds, bounds, *limits, state, offset, scale=q.shape[-1] ** -0.5)
        dq, dk, dv = gradients
        return dq, dk, dv
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in (q, k, v)]
        dq, dk, dv = (gradient.contiguous() for gradient in torch.autograd.grad(_all_scores(*leaves, bounds), leaves, dy))
    return dq, dk, dv


def _all_scores(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    tokens, groups = q.shape[0], q.shape[1] // k.shape[1]
    index = torch.arange(tokens, device=q.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), index.to(bounds.dtype), right=True)
    allowed = (sequence[:, None] == sequence) & (index[:, None] >= index)
    keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1), values)
