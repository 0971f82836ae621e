"""One optimiser step: averaging of micro-batches, clipping by the global norm, AdamW, and the learning-rate schedule."""

import math

import numpy as np

from blackswan.reference.nf4_double import CODEBOOK, GROUP, UNSIGNED
from blackswan.reference.table import Array

SCHEDULES = ("constant", "linear", "cosine")


def average_gradients(gradients: Array, counts: Array) -> Array:
    """Σ counts[i] · gradients[i] / Σ counts: gradients [micro_batches, count], counts [micro_batches] → [count].

    The mean over samples. The mean of the micro-batches' means is another number when they differ in size.
    """
    bad = np.flatnonzero(counts <= 0)
    if bad.size or counts.size == 0:
        found = f"counts[{int(bad[0])}] is {int(counts[bad[0]])}" if bad.size else "counts are empty"
        raise ValueError(f"{found}; expected at least one sample in every micro-batch")
    weights = counts.astype(gradients.dtype)  # [micro_batches]
    gradient: Array = (weights[:, None] * gradients).sum(axis=0) / weights.sum()
    return gradient


def clip_by_global_norm(gradients: Array, max_norm: float, eps: float = 0.0) -> tuple[Array, Array]:
    """gradients [tensors, count] · min(1, max_norm / (norm + eps)), and the L2 norm [] over all of them before clipping.

    Source: Pascanu, Mikolov & Bengio 2013, arXiv:1211.5063, algorithm 1. FloatingPointError where the norm is not finite.
    """
    norm = np.sqrt((gradients * gradients).sum())  # []
    if not np.isfinite(norm):
        bad = np.flatnonzero(~np.isfinite(gradients).all(axis=1))
        reason = f"tensor {int(bad[0])} holds a non-finite gradient" if bad.size else "the sum of squares overflows"
        raise FloatingPointError(f"the gradient norm is {float(norm)}: {reason}")
    divisor = norm + eps
    return (gradients * (max_norm / divisor) if divisor > max_norm else gradients.copy()), norm


def adamw_step(
    parameter: Array,
    gradient: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    step: int,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Array, Array, Array]:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2, with the decay scaled by the rate as in PyTorch).

    All arrays [count]; `step` counts from 1. Returns the parameter and both moments after the step.
    """
    if step < 1:
        raise ValueError(f"step is {step}; it counts from 1")
    first = beta1 * exp_avg + (1.0 - beta1) * gradient
    second = beta2 * exp_avg_sq + (1.0 - beta2) * gradient * gradient
    unbiased_first = first / (1.0 - beta1**step)
    unbiased_second = second / (1.0 - beta2**step)
    decay = learning_rate * weight_decay * parameter
    update = learning_rate * unbiased_first / (np.sqrt(unbiased_second) + eps)
    return parameter - decay - update, first, second


def adamw_8bit_step(
    parameter: Array,
    gradient: Array,
    first_codes: Array,
    first_scales: Array,
    second_codes: Array,
    second_scales: Array,
    step: int,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Array, Array, Array]:
    """`adamw_step` from moments that are held in 8 bits (Dettmers et al. 2021, arXiv:2110.02861, §2), codebook[code] · scale.

    Codes [count] uint8, of the signed dynamic type for the first moment and the unsigned one for the second; scales [blocks] of 256
    elements. Returns the parameter and both moments [count] after the step, before they are held in 8 bits again.
    """
    first = CODEBOOK[first_codes].astype(first_scales.dtype) * np.repeat(first_scales, GROUP)[: first_codes.size]
    second = UNSIGNED[second_codes].astype(second_scales.dtype) * np.repeat(second_scales, GROUP)[: second_codes.size]
    return adamw_step(parameter, gradient, first, second, step, learning_rate, beta1, beta2, eps, weight_decay)


def learning_rate_schedule(total_steps: int, peak: float, warmup_fraction: float, kind: str) -> Array:
    """The rates [total_steps], in float64: a linear warm-up from 0 over W = ceil(warmup_fraction · total) steps, then

    constant, or linear to 0, or half a cosine to 0 (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5). The peak is reached at t = W.
    """
    warmup = math.ceil(warmup_fraction * total_steps)
    if kind not in SCHEDULES:
        raise ValueError(f"schedule is {kind!r}; expected one of {', '.join(SCHEDULES)}")

    def rate(t: int) -> float:
        if t < warmup:
            return peak * t / warmup
        if kind == "linear":
            return peak * (total_steps - t) / (total_steps - warmup)
        if kind == "cosine":
            return peak * (1.0 + math.cos(math.pi * (t - warmup) / (total_steps - warmup))) / 2.0
        return peak

    return np.array([rate(t) for t in range(total_steps)], np.float64)
