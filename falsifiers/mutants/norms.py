"""Wrong RMSNorm and per-head norm."""

import math

import numpy as np

from blackswan.falsifiers.mutants.changes import Arguments, Gradients, in_bfloat16, pull, scaled, through, with_arguments, with_gradients
from blackswan.falsifiers.mutants.registry import mutant
from blackswan.reference.rows import over_rows
from blackswan.reference.table import Array, Operation


def _root_mean_square(x: Array) -> Array:
    return np.asarray(np.sqrt(np.mean(x * x, axis=-1, keepdims=True)))


@mutant("rms_norm", "S2")
def rms_norm_eps_hard_coded(correct: Operation) -> Operation:
    """Epsilon 1e-5 whatever the config says."""
    return with_arguments(correct, eps=lambda _: 1e-5)


@mutant("rms_norm", "own")
def rms_norm_eps_outside_root(_: Operation) -> Operation:
    """x / (sqrt(mean x²) + ε)."""

    def forward(x: Array, weight: Array, eps: float) -> Array:
        return x / (_root_mean_square(x) + eps) * weight

    def backward(dy: Array, x: Array, weight: Array, eps: float) -> Gradients:
        root = _root_mean_square(x)
        inverse = 1.0 / (root + eps)
        normalised, dnormalised = x * inverse, dy * weight
        projection = np.mean(dnormalised * x, axis=-1, keepdims=True)
        return {"x": inverse * (dnormalised - normalised * projection / root), "weight": over_rows(dy * normalised)}

    return Operation(forward, backward)


@mutant("rms_norm", "own")
def rms_norm_eps_dropped(correct: Operation) -> Operation:
    """No epsilon at all."""
    return with_arguments(correct, eps=lambda _: 0.0)


@mutant("rms_norm", "own")
def rms_norm_mean_subtracted(correct: Operation) -> Operation:
    """LayerNorm instead of RMSNorm."""

    def centred(x: Array, _: Arguments) -> Array:
        return np.asarray(x - x.mean(axis=-1, keepdims=True))

    return through(correct, centred, centred, "x")


@mutant("rms_norm", "own")
def rms_norm_sum_not_mean(correct: Operation) -> Operation:
    """Sum of squares instead of their mean."""
    smaller = with_arguments(correct, eps=lambda a: a["eps"] / a["x"].shape[-1])
    return scaled(smaller, lambda a: 1 / math.sqrt(a["x"].shape[-1]))


def _without_weight(correct: Operation) -> Operation:
    return through(correct, lambda weight, _: np.ones_like(weight), lambda gradient, _: np.zeros_like(gradient), "weight")


@mutant("rms_norm", "own")
def rms_norm_weight_dropped(correct: Operation) -> Operation:
    """Weight not applied."""
    return _without_weight(correct)


@mutant("rms_norm", "own")
def rms_norm_weight_plus_one(correct: Operation) -> Operation:
    """1 + w as in another family."""
    return with_arguments(correct, weight=lambda a: 1.0 + a["weight"])


@mutant("rms_norm", "P10", hidden_in=("bfloat16",))
def rms_norm_weight_rounded(correct: Operation) -> Operation:
    """Weight applied in bfloat16 whatever the model's precision."""
    return with_arguments(correct, weight=lambda a: in_bfloat16(a["weight"]))


@mutant("rms_norm", "own", hidden_in=("bfloat16",))
def rms_norm_statistics_in_low_precision(correct: Operation) -> Operation:
    """Mean square and root computed in bfloat16."""

    def forward(x: Array, weight: Array, eps: float) -> Array:
        mean_square = in_bfloat16(np.mean(x * x, axis=-1, keepdims=True))
        return x / in_bfloat16(np.sqrt(mean_square + eps)) * weight

    return Operation(forward, correct.backward)


@mutant("rms_norm", "own")
def rms_norm_gradient_without_projection(correct: Operation) -> Operation:
    """The norm treated as a constant in backward."""

    def constant_norm(_: Gradients, dy: Array, a: Arguments) -> Gradients:
        return {"x": dy * a["weight"] / np.sqrt(np.mean(a["x"] * a["x"], axis=-1, keepdims=True) + a["eps"])}

    return with_gradients(correct, constant_norm)


@mutant("rms_norm", "own")
def rms_norm_weight_gradient_unnormalised(correct: Operation) -> Operation:
    """Dw from x instead of the normalised x."""
    return with_gradients(correct, lambda _, dy, a: {"weight": over_rows(dy * a["x"])})


@mutant("qk_norm", "P3", "S16")
def qk_norm_dropped(_: Operation) -> Operation:
    """Queries and keys not normalised."""

    def forward(x: Array, weight: Array, eps: float) -> Array:
        del weight, eps
        return x

    def backward(dy: Array, x: Array, weight: Array, eps: float) -> Gradients:
        del x, eps
        return {"x": dy, "weight": np.zeros_like(weight)}

    return Operation(forward, backward)


@mutant("qk_norm", "own")
def qk_norm_over_all_heads(correct: Operation) -> Operation:
    """One norm over all heads together."""

    def joined(arguments: Arguments) -> dict[str, Array]:
        batch, seq, heads, head_dim = arguments["x"].shape
        return {**arguments, "x": arguments["x"].reshape(batch, seq, heads * head_dim), "weight": np.tile(arguments["weight"], heads)}

    def forward(**arguments: Array) -> Array:
        y: Array = correct.forward(**joined(arguments))
        return y.reshape(arguments["x"].shape)

    def backward(dy: Array, **arguments: Array) -> Gradients:
        changed = joined(arguments)
        gradients = pull(correct, dy.reshape(changed["x"].shape), changed)
        per_head = gradients["weight"].reshape(-1, arguments["weight"].size)
        return {"x": gradients["x"].reshape(dy.shape), "weight": per_head.sum(axis=0)}

    return Operation(forward, backward)


@mutant("qk_norm", "S16")
def qk_norm_weight_dropped(correct: Operation) -> Operation:
    """Norm weights not given to the block."""
    return _without_weight(correct)


@mutant("qk_norm", "S2")
def qk_norm_eps_hard_coded(correct: Operation) -> Operation:
    """Epsilon 1e-5 whatever the config says."""
    return with_arguments(correct, eps=lambda _: 1e-5)
