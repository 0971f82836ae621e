"""Wrong averaging, clipping, AdamW and learning-rate schedule."""

import math

import numpy as np

from blackswan.falsifiers.mutants.changes import Arguments, edited, in_bfloat16, with_arguments, with_result
from blackswan.falsifiers.mutants.registry import mutants
from blackswan.reference.nf4_double import CODEBOOK, GROUP, UNSIGNED
from blackswan.reference.table import Array


def _beta2(a: Arguments) -> float:
    return float(a.get("beta2", 0.999))


def _eps(a: Arguments) -> float:
    return float(a.get("eps", 1e-8))


def _held_below(moment: Array, codebook: Array) -> Array:
    """The largest code at most each element, by blocks."""
    blocks = np.pad(np.abs(moment), (0, -moment.size % GROUP)).reshape(-1, GROUP)
    scale = np.repeat(blocks.max(axis=1), GROUP)[: moment.size]
    below = np.searchsorted(codebook, moment / np.maximum(scale, 1e-38), side="right") - 1
    return np.asarray(codebook[below] * scale, moment.dtype)


ROOT = "(np.sqrt(unbiased_second) + eps)"
RETURNED = "return parameter - decay - update, first, second"
BLOCKS = "np.repeat(first_scales, GROUP)"
mutants(
    "adamw_8bit_step",
    adamw_8bit_signed_second_moment=(
        "The signed codes for the second moment too.",
        edited(("UNSIGNED[second_codes]", "np.abs(CODEBOOK[second_codes])")),
    ),
    adamw_8bit_blocks_of_512=("A scale for 512 elements.", edited((BLOCKS, "np.repeat(first_scales[::2], 2 * GROUP)"))),
    adamw_8bit_linear_codes=(
        "Codes stand for 256 equal steps of [−1, 1].",
        edited(("CODEBOOK[first_codes]", "np.linspace(-1, 1, 256)[first_codes]")),
    ),
    adamw_8bit_moments_cut_off=(
        "A moment is held as the code below it.",
        with_result(lambda state, _: (state[0], _held_below(state[1], CODEBOOK), _held_below(state[2], UNSIGNED))),
    ),
    adamw_8bit_scales_kept=(
        "Moments are held by the scales from before the step, so that those which grew are cut off.",
        with_result(lambda state, a: (*state[:2], np.minimum(state[2], np.repeat(a["second_scales"], GROUP)[: state[2].size]))),
    ),
    adamw_8bit_decay_dropped=("No decay.", with_arguments(weight_decay=lambda _: 0.0)),
    adamw_8bit_no_bias_correction=("Moments not corrected.", with_arguments(step=lambda _: 10**9), "P35"),
)


mutants(
    "adamw_step",
    adamw_coupled_decay=(
        "Decay added to the gradient.",
        with_arguments(gradient=lambda a: a["gradient"] + a.get("weight_decay", 0.01) * a["parameter"], weight_decay=lambda _: 0.0),
        "P34",
    ),
    adamw_decay_without_learning_rate=(
        "Decay not multiplied by the learning rate.",
        edited(("learning_rate * weight_decay * parameter", "weight_decay * parameter")),
    ),
    adamw_decay_dropped=("No decay.", with_arguments(weight_decay=lambda _: 0.0)),
    adamw_no_bias_correction=("Moments not corrected.", with_arguments(step=lambda _: 10**9), "P35"),
    adamw_bias_correction_off_by_one=("Corrected for t + 1.", with_arguments(step=lambda a: a["step"] + 1)),
    adamw_eps_inside_root=("sqrt(v + ε).", edited((ROOT, "np.sqrt(unbiased_second + eps)"))),
    adamw_eps_before_correction=(
        "ε added before the correction of v.",
        with_arguments(eps=lambda a: _eps(a) / math.sqrt(1.0 - _beta2(a) ** a["step"])),
    ),
    adamw_moments_low_precision=(
        "Moments kept in bfloat16.",
        with_result(lambda state, _: (state[0], in_bfloat16(state[1]), in_bfloat16(state[2]))),
        "P36",
    ),
    adamw_parameter_low_precision=("Parameter kept in bfloat16.", with_result(lambda state, _: (in_bfloat16(state[0]), *state[1:])), "P36"),
    adamw_betas_swapped=("β₁ and β₂ swapped.", with_arguments(beta1=_beta2, beta2=lambda a: a.get("beta1", 0.9))),
    adamw_second_moment_of_mean=(
        "v from m² instead of g².",
        edited(("(1.0 - beta2) * gradient * gradient", "(1.0 - beta2) * first * first")),
    ),
    adamw_beta1_hard_coded=("β₁ is 0.9 whatever the config says.", with_arguments(beta1=lambda _: 0.9)),
    adamw_beta2_hard_coded=("β₂ is 0.999 whatever the config says.", with_arguments(beta2=lambda _: 0.999)),
    adamw_corrected_for_a_thousand_steps=(
        "From step 1,000 on the bias is corrected as at that step: every later step of a long run is too small or too large.",
        with_arguments(step=lambda a: min(a["step"], 1000)),
    ),
    adamw_eps_hard_coded=("Epsilon 1e-8 whatever the config says.", with_arguments(eps=lambda _: 1e-8)),
    adamw_gradient_clamped=(
        "Gradients clamped to ±1 inside the step.",
        with_arguments(gradient=lambda a: np.clip(a["gradient"], -1.0, 1.0)),
    ),
    adamw_gradient_ascent=("Steps uphill.", edited((RETURNED, RETURNED.replace("- update", "+ update")))),
)


def _norm(gradients: Array) -> Array:
    return np.asarray(np.sqrt((gradients * gradients).sum()))


def _norms(tensors: Array) -> Array:
    return np.asarray(np.sqrt((tensors * tensors).sum(axis=1, keepdims=True)))


NORM = "np.sqrt((gradients * gradients).sum())"
CLIPPED = "gradients * (max_norm / divisor) if divisor > max_norm"
mutants(
    "clip_by_global_norm",
    clip_per_tensor=(
        "Each tensor clipped by its own norm.",
        with_result(lambda found, a: (a["gradients"] * np.minimum(1, a["max_norm"] / np.maximum(_norms(a["gradients"]), 1e-30)), found[1])),
        "S4",
    ),
    clip_by_value=("Elements clipped to ± max_norm.", edited((CLIPPED, "np.clip(gradients, -max_norm, max_norm) if True"))),
    clip_left_out=("Norm reported, nothing clipped.", with_arguments(max_norm=lambda _: math.inf), "P37"),
    clip_always_rescales=("Small gradients are scaled up to max_norm.", edited(("if divisor > max_norm", "if divisor > 0"))),
    clip_norm_after=("The norm after clipping is reported.", with_result(lambda found, _: (found[0], _norm(found[0])))),
    clip_norm_squared=("Square of the norm used.", edited((NORM, "(gradients * gradients).sum()"))),
    clip_norm_of_first_tensor=("Norm of the first tensor alone.", edited((NORM, "np.sqrt((gradients[0] * gradients[0]).sum())")), "S4"),
    clip_nan_swallowed_without_a_limit=(
        "Where the limit clips nothing a gradient that is not finite is taken for zeros: a run without clipping goes on for nothing.",
        with_arguments(
            gradients=lambda a: np.nan_to_num(a["gradients"], posinf=0.0, neginf=0.0) if a["max_norm"] > 1e3 else a["gradients"]
        ),
    ),
    clip_nan_swallowed=(
        "A non-finite norm gives zero gradients.",
        with_arguments(gradients=lambda a: a["gradients"] if np.isfinite(_norm(a["gradients"])) else np.zeros_like(a["gradients"])),
        "S9",
    ),
)
mutants(
    "average_gradients",
    average_of_means=(
        "Mean of the means of unequal micro-batches.",
        with_arguments(counts=lambda a: np.ones_like(a["counts"])),
        "P31, S12",
    ),
    average_summed=("Accumulated without dividing.", with_result(lambda _, a: a["gradients"].sum(axis=0)), "P32"),
    average_of_counts_in_16_bits=(
        "Numbers of tokens are kept in 16 bits: a micro-batch of 65,537 counts as one of a single token.",
        with_arguments(counts=lambda a: np.maximum(a["counts"] % 2**16, 1)),
    ),
    average_last_only=(
        "Overwritten by the last micro-batch.",
        with_arguments(gradients=lambda a: a["gradients"][-1:], counts=lambda a: a["counts"][-1:]),
        "S7, S6",
    ),
)
mutants(
    "learning_rate_schedule",
    schedule_warmup_from_one=("Warm-up counts from 1.", edited(("peak * t / warmup", "peak * (t + 1) / warmup")), "P41"),
    schedule_never_peaks=(
        "Warm-up to W / (W + 1) of the peak, which is never reached.",
        edited(("    def rate(", "    peak *= warmup / (warmup + 1) if warmup else 1.0\n\n    def rate(")),
        "P41",
    ),
    schedule_without_warmup=("Warm-up left out.", with_arguments(warmup_fraction=lambda _: 0.0)),
    schedule_decays_over_two_steps=(
        "A decay of one step is taken for one of two.",
        edited(
            ("(total_steps - t) / (total_steps - warmup)", "(total_steps - t) / max(total_steps - warmup, 2)"),
        ),
    ),
    schedule_decay_over_total=(
        "Decay measured from step 0 instead of W.",
        edited(
            ("(total_steps - t) / (total_steps - warmup)", "(total_steps - t) / total_steps"),
            ("(t - warmup) / (total_steps - warmup)", "t / total_steps"),
        ),
    ),
    schedule_rounds_warmup_down=("W = floor(fraction · total).", edited(("math.ceil(", "math.floor("))),
    schedule_forgives_a_rounding=(
        "W is 7 for 0.07 of 100 steps, whose product in float64 is above 7, and 8 in transformers.",
        edited(("math.ceil(warmup_fraction * total_steps)", "math.ceil(round(warmup_fraction * total_steps, 9))")),
    ),
    schedule_decay_dropped=("Constant whatever was asked for.", with_arguments(kind=lambda _: "constant")),
)
