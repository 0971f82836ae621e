"""Wrong embedding, linear layer, residual connection, SwiGLU and pooling."""

import math
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import (
    Arguments,
    Gradients,
    call,
    dropped,
    in_bfloat16,
    pull,
    scaled,
    through,
    with_arguments,
    with_gradients,
)
from blackswan.falsifiers.mutants.registry import mutant
from blackswan.reference.rows import as_rows, outer
from blackswan.reference.sigmoid import sigmoid
from blackswan.reference.table import Array, Operation


@mutant("embedding", "own")
def embedding_off_by_one(correct: Operation) -> Operation:
    """Token ids shifted by one row."""
    return with_arguments(correct, input_ids=lambda a: (a["input_ids"] + 1) % len(a["weight"]))


@mutant("embedding", "own")
def embedding_scaled(correct: Operation) -> Operation:
    """Embedding times sqrt(hidden) as in another family."""
    return scaled(correct, lambda a: math.sqrt(a["weight"].shape[1]))


@mutant("embedding", "own")
def embedding_row_zero_is_padding(correct: Operation) -> Operation:
    """Token 0 taken for padding and embedded as zeros."""

    def without_row_zero(weight: Array, _: Arguments) -> Array:
        return np.concatenate([np.zeros_like(weight[:1]), weight[1:]])

    return through(correct, without_row_zero, without_row_zero, "weight")


@mutant("embedding", "own")
def embedding_gradient_overwrites(correct: Operation) -> Operation:
    """Repeated tokens overwrite, not add, their gradient."""

    def overwritten(_: Gradients, dy: Array, a: Arguments) -> Gradients:
        gradient = np.zeros_like(a["weight"])
        gradient[a["input_ids"]] = dy
        return {"weight": gradient}

    return with_gradients(correct, overwritten)


@mutant("linear", "S1", "P4")
def linear_bias_dropped(correct: Operation) -> Operation:
    """Bias stored but not added."""
    return dropped(correct, "bias")


@mutant("linear", "own")
def linear_transposed_product(correct: Operation) -> Operation:
    """Rows of x W instead of x Wᵀ, for square weights; else reversed rows of W."""

    def turned(weight: Array, _: Arguments) -> Array:
        return weight.T if weight.shape[0] == weight.shape[1] else weight[::-1]

    return through(correct, turned, turned, "weight")


@mutant("linear", "own")
def linear_bias_gradient_averaged(correct: Operation) -> Operation:
    """Bias gradient is the mean over rows instead of the sum."""
    return with_gradients(correct, lambda g, dy, _: {"bias": g["bias"] / len(as_rows(dy))} if "bias" in g else {})


@mutant("linear", "own")
def linear_bias_gradient_dropped(correct: Operation) -> Operation:
    """Bias gradient is zero."""
    return with_gradients(correct, lambda g, *_: {"bias": np.zeros_like(g["bias"])} if "bias" in g else {})


@mutant("linear", "own")
def linear_input_gradient_untransposed(correct: Operation) -> Operation:
    """Input gradient from W with its rows reversed."""
    return with_gradients(correct, lambda _, dy, a: {"x": dy @ a["weight"][::-1]})


@mutant("linear", "S7")
def linear_weight_gradient_last_row(correct: Operation) -> Operation:
    """Weight gradient from the last row only."""
    return with_gradients(correct, lambda _, dy, a: {"weight": outer(as_rows(dy)[-1:], as_rows(a["x"])[-1:])})


@mutant("linear", "own", hidden_in=("bfloat16",))
def linear_accumulates_in_low_precision(correct: Operation) -> Operation:
    """Products summed in bfloat16."""

    def forward(x: Array, weight: Array, bias: Array | None = None) -> Array:
        total = np.zeros_like(x, shape=(*x.shape[:-1], len(weight)))
        for column in range(weight.shape[1]):
            total = in_bfloat16(total + x[..., column, None] * weight[:, column])
        return total if bias is None else total + bias

    return Operation(forward, correct.backward)


@mutant("residual_add", "own")
def residual_dropped(correct: Operation) -> Operation:
    """The branch replaces the stream."""
    return through(correct, lambda x, _: np.zeros_like(x), lambda dx, _: np.zeros_like(dx), "x")


@mutant("residual_add", "own")
def residual_gradient_dropped(correct: Operation) -> Operation:
    """The skip path passes no gradient."""
    return with_gradients(correct, lambda g, *_: {"x": np.zeros_like(g["x"])})


@mutant("swiglu", "own")
def swiglu_gelu(_: Operation) -> Operation:
    """GELU gate instead of SiLU."""
    root = math.sqrt(2 / math.pi)

    def opening(gate: Array) -> Array:
        return np.asarray(np.tanh(root * (gate + 0.044715 * gate * gate * gate)))

    def forward(gate: Array, up: Array) -> Array:
        return 0.5 * gate * (1.0 + opening(gate)) * up

    def backward(dy: Array, gate: Array, up: Array) -> Gradients:
        tanh = opening(gate)
        slope = 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * root * (1.0 + 3 * 0.044715 * gate * gate)
        return {"gate": dy * up * slope, "up": dy * 0.5 * gate * (1.0 + tanh)}

    return Operation(forward, backward)


@mutant("swiglu", "own")
def swiglu_swapped(correct: Operation) -> Operation:
    """Gate and up swapped."""

    def forward(gate: Array, up: Array) -> Any:
        return call(correct, {"gate": up, "up": gate})

    def backward(dy: Array, gate: Array, up: Array) -> Gradients:
        swapped = pull(correct, dy, {"gate": up, "up": gate})
        return {"gate": swapped["up"], "up": swapped["gate"]}

    return Operation(forward, backward)


@mutant("swiglu", "own")
def swiglu_sigmoid_only(_: Operation) -> Operation:
    """σ(gate) · up."""

    def forward(gate: Array, up: Array) -> Array:
        return sigmoid(gate) * up

    def backward(dy: Array, gate: Array, up: Array) -> Gradients:
        return {"gate": dy * up * sigmoid(gate) * sigmoid(-gate), "up": dy * sigmoid(gate)}

    return Operation(forward, backward)


@mutant("swiglu", "own")
def swiglu_gate_clamped(correct: Operation) -> Operation:
    """The gate clamped to ±7, as in another family."""
    return through(correct, lambda gate, _: np.clip(gate, -7, 7), lambda dgate, a: np.where(np.abs(a["gate"]) <= 7, dgate, 0), "gate")


@mutant("swiglu", "own")
def swiglu_gradient_of_sigmoid(correct: Operation) -> Operation:
    """Gate gradient σ(g) up dy, without g σ'(g)."""
    return with_gradients(correct, lambda _, dy, a: {"gate": dy * a["up"] * sigmoid(a["gate"])})


@mutant("swiglu", "own")
def swiglu_up_gradient_raw_gate(correct: Operation) -> Operation:
    """Up gradient gate·dy instead of silu(gate)·dy."""
    return with_gradients(correct, lambda _, dy, a: {"up": dy * a["gate"]})


def _masked_otherwise(correct: Operation, mode: str, mask_of: Any) -> Operation:
    """Pooling that sees another mask in one mode."""
    return with_arguments(correct, mask=lambda a: mask_of(a["mask"]) if a["mode"] == mode else a["mask"])


def _to_length(mask: Array) -> Array:
    """As many real tokens, all on the left."""
    return np.asarray(np.arange(mask.shape[1])[None, :] < mask.sum(axis=1, keepdims=True))


@mutant("pool", "P11", "S11")
def pool_counts_padding(correct: Operation) -> Operation:
    """Mean over all rows, padding among them."""
    return _masked_otherwise(correct, "mean", np.ones_like)


@mutant("pool", "S11")
def pool_divides_by_padded_length(correct: Operation) -> Operation:
    """Sum over the real tokens divided by the padded length."""

    def share(x: Array, a: Arguments) -> Array:
        counts = a["mask"].sum(axis=1).astype(x.dtype)[:, None, None]
        return x * counts / a["mask"].shape[1] if a["mode"] == "mean" else x

    return through(correct, share, share, "x")


@mutant("pool", "P11")
def pool_length_of_the_longest(correct: Operation) -> Operation:
    """Mean divided by the length of the longest sample of the batch."""

    def share(x: Array, a: Arguments) -> Array:
        counts = a["mask"].sum(axis=1)
        return x * (counts.astype(x.dtype) / int(counts.max()))[:, None, None] if a["mode"] == "mean" else x

    return through(correct, share, share, "x")


@mutant("pool", "P9", "P8")
def pool_last_column(correct: Operation) -> Operation:
    """Last column whatever the padding."""
    return _masked_otherwise(correct, "last", np.ones_like)


@mutant("pool", "P9")
def pool_length_minus_one(correct: Operation) -> Operation:
    """Index length − 1 under any padding side."""
    return _masked_otherwise(correct, "last", _to_length)


@mutant("pool", "own")
def pool_first_column(correct: Operation) -> Operation:
    """First column whatever the padding."""
    return _masked_otherwise(correct, "first", np.ones_like)


@mutant("pool", "own")
def pool_mean_is_sum(correct: Operation) -> Operation:
    """Sum instead of mean."""

    def summed(x: Array, a: Arguments) -> Array:
        return x * a["mask"].sum(axis=1).astype(x.dtype)[:, None, None] if a["mode"] == "mean" else x

    return through(correct, summed, summed, "x")


@mutant("pool", "S10")
def pool_detached(correct: Operation) -> Operation:
    """Pooling without history, so that no gradient passes."""
    return with_gradients(correct, lambda g, *_: {"x": np.zeros_like(g["x"])})


@mutant("pool", "own")
def pool_gradient_to_padding(correct: Operation) -> Operation:
    """Gradient spread over padding as well."""

    def spread(gradients: Gradients, dy: Array, a: Arguments) -> Gradients:
        if a["mode"] != "mean":
            return gradients
        return {"x": np.broadcast_to((dy / a["mask"].sum(axis=1).astype(dy.dtype)[:, None])[:, None, :], a["x"].shape).copy()}

    return with_gradients(correct, spread)


@mutant("pool", "own")
def pool_empty_accepted(correct: Operation) -> Operation:
    """A sample without a real token gives zeros instead of a refusal."""

    def real(a: Arguments) -> Array:
        """The mask, with all tokens of an empty sample taken for real."""
        return np.asarray(a["mask"] | ~a["mask"].any(axis=1, keepdims=True))

    def zeroed(value: Array, a: Arguments) -> Array:
        return np.asarray(value * a["mask"].any(axis=1).astype(value.dtype)[:, None])

    def forward(**a: Any) -> Array:
        return zeroed(call(correct, {**a, "mask": real(a)}), a)

    def backward(dy: Array, **a: Any) -> Gradients:
        return pull(correct, zeroed(dy, a), {**a, "mask": real(a)})

    return Operation(forward, backward)
