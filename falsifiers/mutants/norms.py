"""Wrong RMSNorm and per-head norm."""

import math
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import (
    Arguments,
    Gradients,
    edited,
    in_bfloat16,
    pull,
    scaled,
    through,
    with_arguments,
    with_gradients,
)
from blackswan.falsifiers.mutants.registry import mutants
from blackswan.reference.rows import over_rows
from blackswan.reference.table import Array, Operation

_weight_is_one = through("weight", by=lambda weight, _: np.ones_like(weight), back=lambda gradient, _: 0 * gradient)


def _sum_not_mean(correct: Operation) -> Operation:
    smaller = with_arguments(eps=lambda a: a["eps"] / a["x"].shape[-1])(correct)
    return scaled(lambda a: 1 / math.sqrt(a["x"].shape[-1]))(smaller)


def _at_most(a: Arguments) -> float:
    return min(float(a["eps"]), 1e-5)


mutants(
    "rms_norm",
    rms_norm_eps_hard_coded=("Epsilon 1e-5 whatever the config says.", with_arguments(eps=lambda _: 1e-5), "S2"),
    rms_norm_large_eps_cut=(
        "Epsilon is 1e-5 at most: a model that was made with a larger one answers otherwise.",
        with_arguments(eps=_at_most),
    ),
    rms_norm_eps_outside_root=(
        "x / (sqrt(mean x²) + ε).",
        edited(
            ("1.0 / np.sqrt(mean_square + eps)", "1.0 / (np.sqrt(mean_square) + eps)"),
            ("normalised *= projection", "normalised *= projection / (1.0 - eps * inverse_rms)"),  # the root is 1 / inverse_rms − ε
        ),
    ),
    rms_norm_eps_dropped=("No epsilon at all.", with_arguments(eps=lambda _: 0.0)),
    rms_norm_mean_subtracted=("LayerNorm instead of RMSNorm.", through("x", by=lambda x, _: x - x.mean(axis=-1, keepdims=True))),
    rms_norm_sum_not_mean=("Sum of squares instead of their mean.", _sum_not_mean),
    rms_norm_weight_dropped=("Weight not applied.", _weight_is_one),
    rms_norm_weight_plus_one=("1 + w as in another family.", with_arguments(weight=lambda a: 1.0 + a["weight"])),
    rms_norm_weight_rounded=(
        "Weight applied in bfloat16 whatever the model's precision.",
        with_arguments(weight=lambda a: in_bfloat16(a["weight"])),
        "P10",
        "bfloat16",
    ),
    rms_norm_statistics_in_low_precision=(
        "Mean square and root computed in bfloat16.",
        edited(
            ("np.mean(x * x, axis=-1, keepdims=True)", "in_bfloat16(np.mean(x * x, axis=-1, keepdims=True))"),
            ("1.0 / np.sqrt(mean_square + eps)", "1.0 / in_bfloat16(np.sqrt(mean_square + eps))"),
            only="forward",
        ),
        "own",
        "bfloat16",
    ),
    rms_norm_squares_in_float16=(
        "Squares and their mean in float16, where those of more than 255 are infinite.",
        edited(("np.mean(x * x, axis=-1, keepdims=True)", "in_float16(np.mean(in_float16(x * x), axis=-1, keepdims=True))")),
        "own",
        "bfloat16",
    ),
    rms_norm_gradient_without_projection=(
        "The norm treated as a constant in backward.",
        edited(("dx -= normalised", "pass"), only="backward"),
    ),
    rms_norm_weight_gradient_of_first_rows=(
        "Dw from the first 1,024 rows: one wave of a kernel's programs.",
        edited(
            (
                "over_rows(dy * (x * _inverse_rms(x, eps)))",
                "over_rows((dy * (x * _inverse_rms(x, eps))).reshape(-1, x.shape[-1])[:1024])",
            ),
            only="backward",
        ),
    ),
    rms_norm_weight_gradient_unnormalised=(
        "Dw from x instead of the normalised x.",
        with_gradients(weight=lambda _, dy, a: over_rows(dy * a["x"])),
    ),
)


def _over_all_heads(correct: Operation) -> Operation:
    def joined(a: Arguments) -> dict[str, Any]:
        batch, seq, heads, head_dim = a["x"].shape
        return {**a, "x": a["x"].reshape(batch, seq, heads * head_dim), "weight": np.tile(a["weight"], heads)}

    def backward(dy: Array, **a: Any) -> Gradients:
        changed = joined(a)
        gradients = pull(correct, dy.reshape(changed["x"].shape), changed)
        return {"x": gradients["x"].reshape(dy.shape), "weight": gradients["weight"].reshape(-1, a["weight"].size).sum(axis=0)}

    return Operation(lambda **a: correct.forward(**joined(a)).reshape(a["x"].shape), backward)


mutants(
    "qk_norm",
    qk_norm_dropped=(
        "Queries and keys not normalised.",
        edited(
            ("(x * _inverse_rms(x, eps) * weight,)", "(x,)"),
            ("        return (dx,)", "        return (dy,)"),
            ("over_rows(dy * (x * _inverse_rms(x, eps)))", "0 * weight"),
        ),
        "P3, S16",
    ),
    qk_norm_over_all_heads=("One norm over all heads together.", _over_all_heads),
    qk_norm_weight_dropped=("Norm weights not given to the block.", _weight_is_one, "S16"),
    qk_norm_eps_hard_coded=("Epsilon 1e-5 whatever the config says.", with_arguments(eps=lambda _: 1e-5), "S2"),
)
