"""Wrong averaging, clipping, AdamW and learning-rate schedule."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import Arguments, call, in_bfloat16, with_arguments
from blackswan.falsifiers.mutants.registry import mutant
from blackswan.reference.table import Array, Operation

State = tuple[Array, Array, Array]


def _beta2(a: Arguments) -> float:
    return float(a.get("beta2", 0.999))


def _eps(a: Arguments) -> float:
    return float(a.get("eps", 1e-8))


def _decay(a: Arguments) -> float:
    return float(a.get("weight_decay", 0.01))


@mutant("adamw_step", "P34")
def adamw_coupled_decay(correct: Operation) -> Operation:
    """Decay added to the gradient."""
    return with_arguments(correct, gradient=lambda a: a["gradient"] + _decay(a) * a["parameter"], weight_decay=lambda _: 0.0)


@mutant("adamw_step", "own")
def adamw_decay_without_learning_rate(correct: Operation) -> Operation:
    """Decay not multiplied by the learning rate."""

    def forward(**a: Any) -> State:
        parameter, first, second = call(correct, {**a, "weight_decay": 0.0})
        return parameter - _decay(a) * a["parameter"], first, second

    return replace(correct, forward=forward)


@mutant("adamw_step", "own")
def adamw_decay_dropped(correct: Operation) -> Operation:
    """No decay."""
    return with_arguments(correct, weight_decay=lambda _: 0.0)


@mutant("adamw_step", "P35")
def adamw_no_bias_correction(correct: Operation) -> Operation:
    """Moments not corrected."""
    return with_arguments(correct, step=lambda _: 10**9)


@mutant("adamw_step", "own")
def adamw_bias_correction_off_by_one(correct: Operation) -> Operation:
    """Corrected for t + 1."""
    return with_arguments(correct, step=lambda a: a["step"] + 1)


def _without_decay_and_eps(correct: Operation, a: Arguments) -> State:
    """Both moments after the step, and the second one corrected: what a wrong update starts from."""
    _, first, second = call(correct, a)
    return first / (1.0 - a.get("beta1", 0.9) ** a["step"]), first, second


@mutant("adamw_step", "own")
def adamw_eps_inside_root(correct: Operation) -> Operation:
    """sqrt(v + ε)."""

    def forward(**a: Any) -> State:
        unbiased, first, second = _without_decay_and_eps(correct, a)
        root = np.sqrt(second / (1.0 - _beta2(a) ** a["step"]) + _eps(a))
        return a["parameter"] - a["learning_rate"] * (_decay(a) * a["parameter"] + unbiased / root), first, second

    return replace(correct, forward=forward)


@mutant("adamw_step", "own")
def adamw_eps_before_correction(correct: Operation) -> Operation:
    """ε added before the correction of v."""
    return with_arguments(correct, eps=lambda a: _eps(a) / math.sqrt(1.0 - _beta2(a) ** a["step"]))


@mutant("adamw_step", "P36")
def adamw_moments_low_precision(correct: Operation) -> Operation:
    """Moments kept in bfloat16."""

    def forward(**a: Any) -> State:
        parameter, first, second = call(correct, a)
        return parameter, in_bfloat16(first), in_bfloat16(second)

    return replace(correct, forward=forward)


@mutant("adamw_step", "P36")
def adamw_parameter_low_precision(correct: Operation) -> Operation:
    """Parameter kept in bfloat16."""

    def forward(**a: Any) -> State:
        parameter, first, second = call(correct, a)
        return in_bfloat16(parameter), first, second

    return replace(correct, forward=forward)


@mutant("adamw_step", "own")
def adamw_betas_swapped(correct: Operation) -> Operation:
    """β₁ and β₂ swapped."""
    return with_arguments(correct, beta1=_beta2, beta2=lambda a: a.get("beta1", 0.9))


@mutant("adamw_step", "own")
def adamw_second_moment_of_mean(correct: Operation) -> Operation:
    """v from m² instead of g²."""

    def forward(**a: Any) -> State:
        unbiased, first, _ = _without_decay_and_eps(correct, a)
        second = _beta2(a) * a["exp_avg_sq"] + (1.0 - _beta2(a)) * first * first
        root = np.sqrt(second / (1.0 - _beta2(a) ** a["step"]))
        return a["parameter"] - a["learning_rate"] * (_decay(a) * a["parameter"] + unbiased / (root + _eps(a))), first, second

    return replace(correct, forward=forward)


@mutant("adamw_step", "own")
def adamw_eps_hard_coded(correct: Operation) -> Operation:
    """Epsilon 1e-8 whatever the config says."""
    return with_arguments(correct, eps=lambda _: 1e-8)


@mutant("adamw_step", "own")
def adamw_gradient_clamped(correct: Operation) -> Operation:
    """Gradients clamped to ±1 inside the step."""
    return with_arguments(correct, gradient=lambda a: np.clip(a["gradient"], -1.0, 1.0))


@mutant("adamw_step", "own")
def adamw_gradient_ascent(correct: Operation) -> Operation:
    """Steps uphill."""

    def forward(**a: Any) -> State:
        parameter, first, second = call(correct, {**a, "gradient": -a["gradient"], "exp_avg": -a["exp_avg"]})
        return parameter, -first, second

    return replace(correct, forward=forward)


def _norm(gradients: Array, axis: int | None = None) -> Array:
    return np.asarray(np.sqrt((gradients * gradients).sum(axis=axis, keepdims=axis is not None)))


@mutant("clip_by_global_norm", "S4")
def clip_per_tensor(correct: Operation) -> Operation:
    """Each tensor clipped by its own norm."""

    def forward(gradients: Array, max_norm: float) -> tuple[Array, Array]:
        _, norm = call(correct, {"gradients": gradients, "max_norm": max_norm})
        own = _norm(gradients, axis=1)
        return np.where(own > max_norm, gradients * (max_norm / np.where(own > 0, own, 1.0)), gradients), norm

    return replace(correct, forward=forward)


@mutant("clip_by_global_norm", "own")
def clip_by_value(correct: Operation) -> Operation:
    """Elements clipped to ± max_norm."""

    def forward(gradients: Array, max_norm: float) -> tuple[Array, Array]:
        _, norm = call(correct, {"gradients": gradients, "max_norm": max_norm})
        return np.clip(gradients, -max_norm, max_norm), norm

    return replace(correct, forward=forward)


@mutant("clip_by_global_norm", "P37")
def clip_left_out(correct: Operation) -> Operation:
    """Norm reported, nothing clipped."""
    return with_arguments(correct, max_norm=lambda _: math.inf)


@mutant("clip_by_global_norm", "own")
def clip_always_rescales(correct: Operation) -> Operation:
    """Small gradients are scaled up to max_norm."""

    def forward(gradients: Array, max_norm: float) -> tuple[Array, Array]:
        _, norm = call(correct, {"gradients": gradients, "max_norm": max_norm})
        return gradients * (max_norm / norm) if norm > 0 else gradients.copy(), norm

    return replace(correct, forward=forward)


@mutant("clip_by_global_norm", "own")
def clip_norm_after(correct: Operation) -> Operation:
    """The norm after clipping is reported."""

    def forward(gradients: Array, max_norm: float) -> tuple[Array, Array]:
        clipped, _ = call(correct, {"gradients": gradients, "max_norm": max_norm})
        return clipped, _norm(clipped)

    return replace(correct, forward=forward)


@mutant("clip_by_global_norm", "own")
def clip_norm_squared(correct: Operation) -> Operation:
    """Square of the norm used."""

    def forward(gradients: Array, max_norm: float) -> tuple[Array, Array]:
        _, norm = call(correct, {"gradients": gradients, "max_norm": max_norm})
        squared = norm * norm
        return gradients * (max_norm / squared) if squared > max_norm else gradients.copy(), squared

    return replace(correct, forward=forward)


@mutant("clip_by_global_norm", "S4")
def clip_norm_of_first_tensor(correct: Operation) -> Operation:
    """Norm of the first tensor alone."""

    def forward(gradients: Array, max_norm: float) -> tuple[Array, Array]:
        call(correct, {"gradients": gradients, "max_norm": max_norm})
        norm = _norm(gradients[0])
        return gradients * (max_norm / norm) if norm > max_norm else gradients.copy(), norm

    return replace(correct, forward=forward)


@mutant("clip_by_global_norm", "S9")
def clip_nan_swallowed(correct: Operation) -> Operation:
    """A non-finite norm gives zero gradients."""

    def forward(gradients: Array, max_norm: float) -> tuple[Array, Array]:
        if np.isfinite(_norm(gradients)):
            clipped, norm = call(correct, {"gradients": gradients, "max_norm": max_norm})
            return clipped, norm
        return np.zeros_like(gradients), np.zeros_like(gradients, shape=())

    return replace(correct, forward=forward)


@mutant("average_gradients", "P31", "S12")
def average_of_means(correct: Operation) -> Operation:
    """Mean of the means of unequal micro-batches."""
    return with_arguments(correct, counts=lambda a: np.ones_like(a["counts"]))


@mutant("average_gradients", "P32")
def average_summed(correct: Operation) -> Operation:
    """Accumulated without dividing."""
    return replace(correct, forward=lambda gradients, counts: gradients.sum(axis=0))  # noqa: ARG005  the signature names counts


@mutant("average_gradients", "S7", "S6")
def average_last_only(correct: Operation) -> Operation:
    """Overwritten by the last micro-batch."""
    return with_arguments(correct, gradients=lambda a: a["gradients"][-1:], counts=lambda a: a["counts"][-1:])


def _schedule(correct: Operation, warmup_of: Callable[[float], int], progress_from_zero: bool = False, first: int = 0) -> Operation:
    """The schedule with another number of warm-up steps, with decay measured from step 0, or with warm-up counted from `first`."""

    def forward(total_steps: int, peak: float, warmup_fraction: float, kind: str) -> Array:
        warmup = warmup_of(warmup_fraction * total_steps)
        start = 0 if progress_from_zero else warmup

        def rate(t: int) -> float:
            if t < warmup:
                return peak * (t + first) / warmup
            left = (total_steps - t) / (total_steps - start)
            return {"constant": peak, "linear": peak * left, "cosine": peak * (1.0 + math.cos(math.pi * (1.0 - left))) / 2.0}[kind]

        return np.array([rate(t) for t in range(total_steps)], np.float64)

    return replace(correct, forward=forward)


@mutant("learning_rate_schedule", "P41")
def schedule_warmup_from_one(correct: Operation) -> Operation:
    """Warm-up counts from 1."""
    return _schedule(correct, math.ceil, first=1)


@mutant("learning_rate_schedule", "P41")
def schedule_never_peaks(correct: Operation) -> Operation:
    """Warm-up to W / (W + 1) of the peak, which is never reached."""

    def forward(**a: Any) -> Array:
        warmup = math.ceil(a["warmup_fraction"] * a["total_steps"])
        return np.asarray(call(correct, a) * (warmup / (warmup + 1) if warmup else 1.0))

    return replace(correct, forward=forward)


@mutant("learning_rate_schedule", "own")
def schedule_without_warmup(correct: Operation) -> Operation:
    """Warm-up left out."""
    return with_arguments(correct, warmup_fraction=lambda _: 0.0)


@mutant("learning_rate_schedule", "own")
def schedule_decay_over_total(correct: Operation) -> Operation:
    """Decay measured from step 0 instead of W."""
    return _schedule(correct, math.ceil, progress_from_zero=True)


@mutant("learning_rate_schedule", "own")
def schedule_rounds_warmup_down(correct: Operation) -> Operation:
    """W = floor(fraction · total)."""
    return _schedule(correct, math.floor)


@mutant("learning_rate_schedule", "own")
def schedule_decay_dropped(correct: Operation) -> Operation:
    """Constant whatever was asked for."""
    return with_arguments(correct, kind=lambda _: "constant")
