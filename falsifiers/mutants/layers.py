"""Wrong embedding, linear layer, residual connection, SwiGLU and pooling."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import (
    ONE_WAVE,
    Arguments,
    Change,
    Gradients,
    edited,
    first_rows,
    in_bfloat16,
    pull,
    scaled,
    scaled_input,
    through,
    with_arguments,
    with_gradients,
    without,
)
from blackswan.falsifiers.mutants.registry import mutant, mutants
from blackswan.reference.rows import as_rows, outer
from blackswan.reference.sigmoid import sigmoid
from blackswan.reference.table import Array, Operation

mutants(
    "embedding",
    embedding_off_by_one=("Token ids shifted by one row.", with_arguments(input_ids=lambda a: (a["input_ids"] + 1) % len(a["weight"]))),
    embedding_of_16_bits=(
        "Token ids travel in 16 bits, of which the largest vocabularies have more.",
        with_arguments(input_ids=lambda a: a["input_ids"] & 0xFFFF),
    ),
    embedding_scaled=("Embedding times sqrt(hidden) as in another family.", scaled(lambda a: math.sqrt(a["weight"].shape[1]))),
    embedding_row_zero_is_padding=(
        "Token 0 taken for padding and embedded as zeros.",
        through("weight", by=lambda weight, _: np.concatenate([np.zeros_like(weight[:1]), weight[1:]])),
    ),
    embedding_gradient_overwrites=(
        "Repeated tokens overwrite, not add, their gradient.",
        edited(("np.add.at(dweight, input_ids, dy)", "dweight[input_ids] = dy"), only="backward"),
    ),
    embedding_gradient_adds_up_rounded=(
        "The sum of a repeated token's gradients is rounded to bfloat16 after each.",
        edited(
            (
                "np.add.at(dweight, input_ids, dy)",
                "[dweight.__setitem__(at, in_bfloat16(dweight[at] + dy[where])) for where, at in np.ndenumerate(input_ids)]",
            ),
            only="backward",
        ),
    ),
)
mutants(
    "linear",
    linear_bias_dropped=("Bias stored but not added.", without("bias"), "S1, P4"),
    linear_transposed_product=(
        "Rows of x W instead of x Wᵀ, for square weights; else reversed rows of W.",
        through("weight", by=lambda weight, _: weight.T if weight.shape[0] == weight.shape[1] else weight[::-1]),
    ),
    linear_bias_gradient_averaged=(
        "Bias gradient is the mean over rows instead of the sum.",
        with_gradients(bias=lambda gradient, dy, _: gradient / len(as_rows(dy))),
    ),
    linear_bias_gradient_dropped=("Bias gradient is zero.", with_gradients(bias=lambda gradient, *_: 0 * gradient)),
    linear_input_gradient_untransposed=(
        "Input gradient from W with its rows reversed.",
        with_gradients(x=lambda _, dy, a: dy @ a["weight"][::-1]),
    ),
    linear_weight_gradient_last_row=(
        "Weight gradient from the last row only.",
        with_gradients(weight=lambda _, dy, a: outer(as_rows(dy)[-1:], as_rows(a["x"])[-1:])),
        "S7",
    ),
)


@mutant("linear", hidden_in=("bfloat16",))
def linear_accumulates_in_low_precision(correct: Operation) -> Operation:
    """Products summed in bfloat16."""

    def forward(x: Array, weight: Array, bias: Array | None = None) -> Array:
        total = np.zeros_like(x, shape=(*x.shape[:-1], len(weight)))
        for column in range(weight.shape[1]):
            total = in_bfloat16(total + x[..., column, None] * weight[:, column])
        return total if bias is None else total + bias

    return Operation(forward, correct.backward)


mutants(
    "residual_add",
    residual_dropped=("The branch replaces the stream.", scaled_input("x", lambda _: 0)),
    residual_gradient_dropped=("The skip path passes no gradient.", with_gradients(x=lambda gradient, *_: 0 * gradient)),
)


def _swapped(correct: Operation) -> Operation:
    def backward(dy: Array, gate: Array, up: Array) -> Gradients:
        swapped = pull(correct, dy, {"gate": up, "up": gate})
        return {"gate": swapped["up"], "up": swapped["gate"]}

    return Operation(lambda gate, up: correct.forward(up, gate), backward)


GELU = "1.5957691216 * (gate + 0.044715 * gate**3)"  # σ of it is (1 + tanh(sqrt(2/π) (g + 0.044715 g³))) / 2
mutants(
    "swiglu",
    swiglu_gelu=(
        "GELU gate instead of SiLU.",
        edited(
            ("y = sigmoid(gate)", f"y = sigmoid({GELU})"),
            ("sigmoid(gate), complement(gate)", f"sigmoid({GELU}), complement({GELU}) * 1.5957691216 * (1 + 0.134145 * gate**2)"),
        ),
    ),
    swiglu_exponential_in_float16=(
        "e^gate / (1 + e^gate) in float16, infinite over infinite for gates beyond 11.",
        edited(("y = sigmoid(gate)", "powers = in_float16(sigmoid(gate) / complement(gate)); y = powers / (1.0 + powers)"), only="forward"),
    ),
    swiglu_swapped=("Gate and up swapped.", _swapped),
    swiglu_sigmoid_only=(
        "σ(gate) · up.",
        edited(("    y *= gate\n", ""), ("    slope *= gate\n    slope += 1.0\n", ""), ("    opening *= gate\n", "")),
    ),
    swiglu_gate_clamped=(
        "The gate clamped to ±7, as in another family.",
        through("gate", by=lambda gate, _: np.clip(gate, -7, 7), back=lambda dgate, a: np.where(np.abs(a["gate"]) <= 7, dgate, 0)),
    ),
    swiglu_gradient_of_sigmoid=(
        "Gate gradient σ(g) up dy, without g σ'(g).",
        with_gradients(gate=lambda _, dy, a: dy * a["up"] * sigmoid(a["gate"])),
    ),
    swiglu_up_gradient_raw_gate=("Up gradient gate·dy instead of silu(gate)·dy.", with_gradients(up=lambda _, dy, a: dy * a["gate"])),
)


def _with_mask(mode: str, mask_of: Callable[[Array], Array]) -> Change:
    """Pooling that sees another mask in one mode."""
    return with_arguments(mask=lambda a: mask_of(a["mask"]) if a["mode"] == mode else a["mask"])


def _mean_times(factor: Callable[[Array, int], Any]) -> Change:
    """The mean of a sample times a factor, which depends on all samples' numbers of real tokens [batch] and on the padded length."""

    def by(a: Arguments) -> Any:
        counts = a["mask"].sum(axis=1).astype(a["x"].dtype)
        return np.asarray(factor(counts, a["mask"].shape[1]))[:, None, None] if a["mode"] == "mean" else 1

    return scaled_input("x", by)


mutants(
    "pool",
    pool_counts_padding=("Mean over all rows, padding among them.", _with_mask("mean", np.ones_like), "P11, S11"),
    pool_divides_by_padded_length=(
        "Sum over the real tokens divided by the padded length.",
        _mean_times(lambda counts, length: counts / length),
        "S11",
    ),
    pool_length_of_the_longest=(
        "Mean divided by the length of the longest sample of the batch.",
        _mean_times(lambda counts, _: counts / counts.max()),
        "P11",
    ),
    pool_last_column=("Last column whatever the padding.", _with_mask("last", np.ones_like), "P9, P8"),
    pool_length_minus_one=(
        "Index length − 1 under any padding side.",
        _with_mask("last", lambda mask: np.arange(mask.shape[1]) < mask.sum(axis=1, keepdims=True)),
        "P9",
    ),
    pool_first_column=("First column whatever the padding.", _with_mask("first", np.ones_like)),
    pool_mean_is_sum=("Sum instead of mean.", _mean_times(lambda counts, _: counts)),
    pool_of_first_samples=(
        "Samples beyond the first 1,024 stay zero: one wave of a kernel's programs.",
        scaled(lambda a: first_rows("x", 1)(a)[:, :, 0]),
    ),
    pool_of_first_positions=(
        "Positions beyond the first 1,024 of a sample are not read.",
        through("x", by=lambda x, _: np.where(np.arange(x.shape[1])[:, None] < ONE_WAVE, x, 0)),
    ),
    pool_of_positions_in_a_byte=(
        "Positions beyond the first 256 of a sample are not read.",
        through("x", by=lambda x, _: np.where(np.arange(x.shape[1])[:, None] < 2**8, x, 0)),
    ),
    pool_positions_in_16_bits=(
        "The last real token is looked for among the positions below 32,768.",
        _with_mask("last", lambda mask: mask & (np.arange(mask.shape[1]) < 2**15)),
    ),
    pool_counts_in_16_bits=(
        "The real tokens of a sample are counted in 16 bits.",
        _mean_times(lambda counts, _: counts / counts.astype(np.int64).astype(np.int16).astype(counts.dtype)),
    ),
    pool_detached=("Pooling without history, so that no gradient passes.", with_gradients(x=lambda gradient, *_: 0 * gradient), "S10"),
)


@mutant("pool")
def pool_gradient_to_padding(correct: Operation) -> Operation:
    """Gradient spread over padding as well."""

    def spread(gradient: Array, dy: Array, a: Arguments) -> Array:
        share = dy / a["mask"].sum(axis=1).astype(dy.dtype)[:, None]
        return np.broadcast_to(share[:, None], gradient.shape).copy() if a["mode"] == "mean" else gradient

    return with_gradients(x=spread)(correct)


mutants(
    "pool",
    pool_empty_accepted=(
        "A sample without a real token gives zeros instead of a refusal.",
        edited(
            ("if empty.size:", "if False:"),
            ("pooled.astype(x.dtype)", "(pooled & mask).astype(x.dtype)"),
            ("pooled.sum(axis=1, keepdims=True)", "np.maximum(pooled.sum(axis=1, keepdims=True), 1)"),
        ),
    ),
)
