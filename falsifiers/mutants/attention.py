"""Wrong rotary positions, attention and softmax."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from blackswan.falsifiers.mutants.changes import (
    Arguments,
    Gradients,
    call,
    in_bfloat16,
    pull,
    scaled_input,
    through,
    with_arguments,
    with_gradients,
)
from blackswan.falsifiers.mutants.registry import mutant
from blackswan.reference import softmax
from blackswan.reference.rows import as_rows
from blackswan.reference.table import Array, Operation


@mutant("rope_interleaved_pairs")
def _(correct: Operation) -> Operation:
    def order(head_dim: int) -> Array:
        return np.concatenate([np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)])

    def conjugated(run: Callable[[Array], Array], x: Array) -> Array:
        split = order(x.shape[-1])
        return run(x[..., split])[..., np.argsort(split)]

    def forward(**a: Any) -> Array:
        return conjugated(lambda x: call(correct, {**a, "x": x}), a["x"])

    def backward(dy: Array, **a: Any) -> Gradients:
        return {"x": conjugated(lambda cotangent: pull(correct, cotangent, a)["x"], dy)}

    return Operation(forward, backward)


@mutant("rope_dropped")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, positions=lambda a: np.zeros_like(a["positions"]))


@mutant("rope_inverse")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, positions=lambda a: -a["positions"])


@mutant("rope_theta_hard_coded")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, theta=lambda _: 10000.0)


@mutant("rope_positions_from_one")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, positions=lambda a: a["positions"] + 1)


@mutant("rope_positions_ignored")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, positions=lambda a: np.broadcast_to(np.arange(a["positions"].shape[1]), a["positions"].shape))


@mutant("rope_frequency_exponent")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, theta=lambda a: math.sqrt(a["theta"]))


@mutant("rope_positions_rounded")
def _(_: Operation) -> Operation:
    def angles(x: Array, positions: Array, theta: float) -> Array:
        pairs = x.shape[-1] // 2
        frequency = np.array([theta ** (-pair / pairs) for pair in range(pairs)]).astype(ml_dtypes.bfloat16)
        return in_bfloat16((positions[..., None, None].astype(ml_dtypes.bfloat16) * frequency).astype(x.dtype))

    def rotate(x: Array, angle: Array) -> Array:
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def forward(x: Array, positions: Array, theta: float) -> Array:
        return rotate(x, angles(x, positions, theta))

    def backward(dy: Array, x: Array, positions: Array, theta: float) -> Gradients:
        return {"x": rotate(dy, -angles(x, positions, theta))}

    return Operation(forward, backward)


@mutant("rope_gradient_rotates_forward")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda _, dy, a: {"x": call(correct, {**a, "x": dy})})


@mutant("attention_scale_from_hidden")
def _(correct: Operation) -> Operation:
    return scaled_input(correct, "q", lambda a: 1 / math.sqrt(a["q"].shape[2]))


@mutant("attention_scale_dropped")
def _(correct: Operation) -> Operation:
    return scaled_input(correct, "q", lambda a: math.sqrt(a["q"].shape[3]))


class _Attention:
    """Attention from an explicit matrix of visible keys [batch, query, key], with its steps open to change."""

    def visible(self, mask: Array) -> Array:
        return np.tri(mask.shape[1], dtype=bool) & mask[:, None, :]

    def normalised(self, masked: Array) -> Array:
        """Scores with −∞ at hidden keys → probabilities; a row that sees no key is zero."""
        sees = np.isfinite(masked).any(axis=-1, keepdims=True)
        exponential = np.exp(masked - np.where(sees, masked.max(axis=-1, keepdims=True), 0.0))
        return np.asarray(exponential / np.where(sees, exponential.sum(axis=-1, keepdims=True), 1.0))

    def score_gradient(self, dp: Array, p: Array) -> Array:
        return softmax.backward_from_probabilities(dp, p)

    def _open(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values by query head, [batch, heads, seq, head_dim]."""
        groups = q.shape[2] // k.shape[2]
        return q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3).repeat(groups, axis=1), v.transpose(0, 2, 1, 3).repeat(groups, axis=1)

    def _probabilities(self, queries: Array, keys: Array, mask: Array) -> Array:
        scores = queries @ keys.swapaxes(-1, -2) / math.sqrt(queries.shape[-1])
        return self.normalised(np.where(self.visible(mask)[:, None], scores, -math.inf))

    def forward(self, q: Array, k: Array, v: Array, mask: Array) -> Array:
        queries, keys, values = self._open(q, k, v)
        y: Array = (self._probabilities(queries, keys, mask) @ values).transpose(0, 2, 1, 3)
        return y

    def backward(self, dy: Array, q: Array, k: Array, v: Array, mask: Array) -> Gradients:
        queries, keys, values = self._open(q, k, v)
        dout = dy.transpose(0, 2, 1, 3)
        p = self._probabilities(queries, keys, mask)
        dscores = self.score_gradient(dout @ values.swapaxes(-1, -2), p) / math.sqrt(q.shape[-1])

        def by_group(gradient: Array) -> Array:
            batch, heads, seq, head_dim = gradient.shape
            grouped = gradient.reshape(batch, k.shape[2], heads // k.shape[2], seq, head_dim)
            summed: Array = grouped.sum(axis=2).transpose(0, 2, 1, 3)
            return summed

        return {
            "q": (dscores @ keys).transpose(0, 2, 1, 3),
            "k": by_group(dscores.swapaxes(-1, -2) @ queries),
            "v": by_group(p.swapaxes(-1, -2) @ dout),
        }

    def operation(self) -> Operation:
        return Operation(self.forward, self.backward)


@mutant("attention_not_causal")
def _(_: Operation) -> Operation:
    class NotCausal(_Attention):
        def visible(self, mask: Array) -> Array:
            return np.broadcast_to(mask[:, None, :], (*mask.shape, mask.shape[1]))

    return NotCausal().operation()


@mutant("attention_causal_off_by_one")
def _(_: Operation) -> Operation:
    class NotItself(_Attention):
        def visible(self, mask: Array) -> Array:
            return np.tri(mask.shape[1], k=-1, dtype=bool) & mask[:, None, :]

    return NotItself().operation()


@mutant("attention_sees_one_ahead")
def _(_: Operation) -> Operation:
    class OneAhead(_Attention):
        def visible(self, mask: Array) -> Array:
            return np.tri(mask.shape[1], k=1, dtype=bool) & mask[:, None, :]

    return OneAhead().operation()


@mutant("attention_window")
def _(_: Operation) -> Operation:
    class Window(_Attention):
        def visible(self, mask: Array) -> Array:
            return np.asarray(super().visible(mask) & ~np.tri(mask.shape[1], k=-4, dtype=bool))

    return Window().operation()


@mutant("attention_padding_ignored")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, mask=lambda a: np.ones_like(a["mask"]))


@mutant("attention_mask_of_first_sample")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, mask=lambda a: np.broadcast_to(a["mask"][:1], a["mask"].shape))


@mutant("attention_masked_row_nan")
def _(_: Operation) -> Operation:
    class Undefined(_Attention):
        def normalised(self, masked: Array) -> Array:
            exponential = np.exp(masked - masked.max(axis=-1, keepdims=True))
            return np.asarray(exponential / exponential.sum(axis=-1, keepdims=True))

    return Undefined().operation()


@mutant("attention_masked_row_uniform")
def _(_: Operation) -> Operation:
    class Uniform(_Attention):
        def normalised(self, masked: Array) -> Array:
            sees = np.isfinite(masked).any(axis=-1, keepdims=True)
            return np.where(sees, super().normalised(masked), 1.0 / masked.shape[-1])

        def score_gradient(self, dp: Array, p: Array) -> Array:
            # The last query sees every real key. A key is hidden from any other, so that a row without a zero is one that saw none.
            constant: Array = np.asarray((p > 0).all(axis=-1, keepdims=True))
            constant[..., -1:, :] = False
            return np.where(constant, 0.0, super().score_gradient(dp, p))

    return Uniform().operation()


def _reading(correct: Operation, key_head_of: Callable[[int, int], Array]) -> Operation:
    """Attention whose query heads read the key heads that `key_head_of(heads, kv_heads)` says."""

    def heads_of(a: Arguments) -> Array:
        return key_head_of(a["q"].shape[2], a["k"].shape[2])

    def spread(value: Array, a: Arguments) -> Array:
        return np.asarray(value[:, :, heads_of(a)])

    def gathered(gradient: Array, a: Arguments) -> Array:
        summed: Array = np.zeros_like(a["k"])
        for head, key_head in enumerate(heads_of(a)):
            summed[:, :, key_head] += gradient[:, :, head]
        return summed

    return through(correct, spread, gathered, "k", "v")


@mutant("attention_groups_tiled")
def _(correct: Operation) -> Operation:
    return _reading(correct, lambda heads, kv_heads: np.arange(heads) % kv_heads)


@mutant("attention_first_kv_head_only")
def _(correct: Operation) -> Operation:
    return _reading(correct, lambda heads, _: np.zeros(heads, np.int64))


@mutant("attention_without_max_shift")
def _(_: Operation) -> Operation:
    class Unshifted(_Attention):
        def normalised(self, masked: Array) -> Array:
            exponential, sees = np.exp(masked), np.isfinite(masked).any(axis=-1, keepdims=True)
            return np.asarray(exponential / np.where(sees, exponential.sum(axis=-1, keepdims=True), 1.0))

    return Unshifted().operation()


@mutant("attention_probabilities_in_low_precision")
def _(_: Operation) -> Operation:
    class Rounded(_Attention):
        def normalised(self, masked: Array) -> Array:
            return in_bfloat16(super().normalised(masked))

    return Rounded().operation()


@mutant("attention_value_gradient_ignores_groups")
def _(correct: Operation) -> Operation:
    def first_of_group(_: Gradients, dy: Array, a: Arguments) -> Gradients:
        groups = dy.shape[2] // a["k"].shape[2]
        alone = np.where((np.arange(dy.shape[2]) % groups == 0)[:, None], dy, 0.0)
        gradients = pull(correct, alone, a)
        return {"k": gradients["k"], "v": gradients["v"]}

    return with_gradients(correct, first_of_group)


@mutant("attention_softmax_gradient_unprojected")
def _(correct: Operation) -> Operation:
    class Unprojected(_Attention):
        def score_gradient(self, dp: Array, p: Array) -> Array:
            return p * dp

    return Operation(correct.forward, Unprojected().backward)


@mutant("attention_key_gradient_unscaled")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda g, _, a: {"k": g["k"] * math.sqrt(a["k"].shape[-1])})


@mutant("softmax_without_max_shift")
def _(correct: Operation) -> Operation:
    def forward(x: Array) -> Array:
        exponential = np.exp(x)
        return np.asarray(exponential / exponential.sum(axis=-1, keepdims=True))

    def backward(dy: Array, x: Array) -> Gradients:
        return {"x": softmax.backward_from_probabilities(dy, forward(x))}

    return Operation(forward, backward, correct.outputs)


@mutant("softmax_over_rows")
def _(correct: Operation) -> Operation:
    def forward(x: Array) -> Array:
        y: Array = call(correct, {"x": as_rows(x).T})
        return y.T.reshape(x.shape)

    def backward(dy: Array, x: Array) -> Gradients:
        return {"x": pull(correct, as_rows(dy).T, {"x": as_rows(x).T})["x"].T.reshape(x.shape)}

    return Operation(forward, backward)


@mutant("softmax_unnormalised")
def _(_: Operation) -> Operation:
    def forward(x: Array) -> Array:
        exponential = np.exp(x - x.max(axis=-1, keepdims=True))
        return np.asarray(exponential / (exponential.sum(axis=-1, keepdims=True) + 1e-3))

    def backward(dy: Array, x: Array) -> Gradients:
        p = forward(x)
        expected = (dy * p).sum(axis=-1, keepdims=True)
        through_shift = np.zeros_like(x)
        largest = x.argmax(axis=-1, keepdims=True)
        np.put_along_axis(through_shift, largest, expected * (1.0 - p.sum(axis=-1, keepdims=True)), axis=-1)
        return {"x": p * (dy - expected) - through_shift}

    return Operation(forward, backward)


@mutant("softmax_gradient_diagonal")
def _(correct: Operation) -> Operation:
    def diagonal(_: Gradients, dy: Array, a: Arguments) -> Gradients:
        p = call(correct, a)
        return {"x": p * (1.0 - p) * dy}

    return with_gradients(correct, diagonal)
