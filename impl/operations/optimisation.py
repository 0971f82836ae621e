"""Gradient averaging, clipping, AdamW and the learning-rate schedule: float32, or float64 for float64 tensors."""

import math

import torch
from torch import Tensor

from blackswan.impl import validation
from blackswan.impl.operations.precision import widen


def average_gradients(gradients: Tensor, counts: Tensor) -> Tensor:
    """Σ counts[i] · gradients[i] / Σ counts: gradients [micro_batches, count] are means over counts [micro_batches] samples → [count]."""
    validation.require_shape("counts", counts, gradients.shape[:1])
    validation.require_positive("counts", counts)
    wide = widen(gradients)
    weights = counts.to(wide.dtype)
    return (weights[:, None] * wide).sum(dim=0) / weights.sum()


def clip_by_global_norm(gradients: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Gradients [tensors, count] times min(1, max_norm / norm), and the L2 norm over all of them before (Pascanu et al. 2013).

    Raises a FloatingPointError for a non-finite norm and a ValueError for max_norm ≤ 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}: expected a positive number")
    wide = widen(gradients)
    norm = torch.linalg.vector_norm(wide)
    validation.require_finite_norm(norm, wide)
    return wide * torch.clamp(max_norm / norm, max=1.0), norm


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW step (Loshchilov & Hutter 2019, Algorithm 2); `step` counts from 1. Returns new parameter, exp_avg, exp_avg_sq.

    As in PyTorch, the decay is multiplied by the rate; the paper's is multiplied by its schedule's factor alone. Raises a ValueError for
    step < 1, and for tensors of several shapes.
    """
    if step < 1:
        raise ValueError(f"step is {step}: AdamW's bias correction counts steps from 1")
    for name, value in (("gradient", gradient), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        validation.require_shape(name, value, parameter.shape)
    corrections = 1 - beta1**step, 1 - beta2**step
    wide, wide_gradient, average, square = (widen(value) for value in (parameter, gradient, exp_avg, exp_avg_sq))
    decay = learning_rate * weight_decay
    return adamw_moved(wide, wide_gradient, average, square, learning_rate, corrections, decay, (beta1, beta2), eps)


def adamw_moved(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: float | Tensor,
    corrections: tuple[float | Tensor, float | Tensor],
    decay: float | Tensor,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW with 1 − β^step in `corrections` and rate · weight decay in `decay`, tensors [] where a captured step reads them."""
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * gradient
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * gradient * gradient
    update = exp_avg / corrections[0] / ((exp_avg_sq / corrections[1]).sqrt() + eps)
    return parameter - decay * parameter - rate * update, exp_avg, exp_avg_sq


def learning_rate_schedule(total_steps: int, peak: float, warmup_fraction: float, kind: str) -> Tensor:
    """The rate of each step 0 … total_steps − 1, float64: linear warm-up over ceil(warmup_fraction · total_steps) steps, then `kind`."""
    if kind not in ("constant", "linear", "cosine"):
        raise ValueError(f"schedule {kind!r}: expected one of 'constant', 'linear', 'cosine'")
    if not 0 <= warmup_fraction <= 1:
        raise ValueError(f"warmup_fraction is {warmup_fraction}: expected 0 to 1")
    warmup = math.ceil(warmup_fraction * total_steps)
    return torch.tensor([_rate(step, total_steps, peak, warmup, kind) for step in range(total_steps)], dtype=torch.float64, device="cpu")


def _rate(step: int, total: int, peak: float, warmup: int, kind: str) -> float:
    if step < warmup:
        return peak * step / warmup
    if kind == "linear":
        return peak * ((total - step) / (total - warmup))
    if kind == "cosine":
        return peak * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2.0
    return peak
