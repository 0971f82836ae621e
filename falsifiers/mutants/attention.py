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


@mutant("rope", "P1")
def rope_interleaved_pairs(correct: Operation) -> Operation:
    """Pairs (2i, 2i + 1) instead of (i, i + d/2)."""

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


@mutant("rope", "P2")
def rope_dropped(correct: Operation) -> Operation:
    """No rotation."""
    return with_arguments(correct, positions=lambda a: np.zeros_like(a["positions"]))


@mutant("rope", "own")
def rope_inverse(correct: Operation) -> Operation:
    """Rotation by the negative angle."""
    return with_arguments(correct, positions=lambda a: -a["positions"])


@mutant("rope", "own")
def rope_theta_hard_coded(correct: Operation) -> Operation:
    """θ = 10000 whatever the config says."""
    return with_arguments(correct, theta=lambda _: 10000.0)


@mutant("rope", "own")
def rope_positions_from_one(correct: Operation) -> Operation:
    """Positions start at 1 more than given."""
    return with_arguments(correct, positions=lambda a: a["positions"] + 1)


@mutant("rope", "own")
def rope_positions_ignored(correct: Operation) -> Operation:
    """Positions by column instead of as given."""
    return with_arguments(correct, positions=lambda a: np.broadcast_to(np.arange(a["positions"].shape[1]), a["positions"].shape))


@mutant("rope", "own")
def rope_frequency_exponent(correct: Operation) -> Operation:
    """θ^(−i/d) instead of θ^(−2i/d)."""
    return with_arguments(correct, theta=lambda a: math.sqrt(a["theta"]))


@mutant("rope", "own")
def rope_positions_rounded(_: Operation) -> Operation:
    """Angles computed in bfloat16."""

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


@mutant("rope", "own")
def rope_gradient_rotates_forward(correct: Operation) -> Operation:
    """The backward pass rotates the same way as the forward."""
    return with_gradients(correct, lambda _, dy, a: {"x": call(correct, {**a, "x": dy})})


@mutant("attention", "P13")
def attention_scale_from_hidden(correct: Operation) -> Operation:
    """1/sqrt(heads · head_dim) instead of 1/sqrt(head_dim)."""
    return scaled_input(correct, "q", lambda a: 1 / math.sqrt(a["q"].shape[2]))


@mutant("attention", "own")
def attention_scale_dropped(correct: Operation) -> Operation:
    """No scale."""
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


@mutant("attention", "P5")
def attention_not_causal(_: Operation) -> Operation:
    """Every query sees every real key."""

    class NotCausal(_Attention):
        def visible(self, mask: Array) -> Array:
            return np.broadcast_to(mask[:, None, :], (*mask.shape, mask.shape[1]))

    return NotCausal().operation()


@mutant("attention", "P5")
def attention_causal_off_by_one(_: Operation) -> Operation:
    """A query does not see its own key."""

    class NotItself(_Attention):
        def visible(self, mask: Array) -> Array:
            return np.tri(mask.shape[1], k=-1, dtype=bool) & mask[:, None, :]

    return NotItself().operation()


@mutant("attention", "P5")
def attention_sees_one_ahead(_: Operation) -> Operation:
    """A query sees the next key."""

    class OneAhead(_Attention):
        def visible(self, mask: Array) -> Array:
            return np.tri(mask.shape[1], k=1, dtype=bool) & mask[:, None, :]

    return OneAhead().operation()


@mutant("attention", "own")
def attention_window(_: Operation) -> Operation:
    """A query sees only itself and the three keys before."""

    class Window(_Attention):
        def visible(self, mask: Array) -> Array:
            return np.asarray(super().visible(mask) & ~np.tri(mask.shape[1], k=-4, dtype=bool))

    return Window().operation()


@mutant("attention", "own")
def attention_padding_ignored(correct: Operation) -> Operation:
    """Padding keys attended."""
    return with_arguments(correct, mask=lambda a: np.ones_like(a["mask"]))


@mutant("attention", "own")
def attention_mask_of_first_sample(correct: Operation) -> Operation:
    """The first sample's mask taken for every sample."""
    return with_arguments(correct, mask=lambda a: np.broadcast_to(a["mask"][:1], a["mask"].shape))


@mutant("attention", "P6", "P7")
def attention_masked_row_nan(_: Operation) -> Operation:
    """A row that sees no key gives 0/0."""

    class Undefined(_Attention):
        def normalised(self, masked: Array) -> Array:
            exponential = np.exp(masked - masked.max(axis=-1, keepdims=True))
            return np.asarray(exponential / exponential.sum(axis=-1, keepdims=True))

    return Undefined().operation()


@mutant("attention", "P7")
def attention_masked_row_uniform(_: Operation) -> Operation:
    """A row that sees no key averages all values."""

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


@mutant("attention", "own")
def attention_groups_tiled(correct: Operation) -> Operation:
    """Query head h reads key head h mod kv_heads."""
    return _reading(correct, lambda heads, kv_heads: np.arange(heads) % kv_heads)


@mutant("attention", "own")
def attention_first_kv_head_only(correct: Operation) -> Operation:
    """All query heads read the first key head."""
    return _reading(correct, lambda heads, _: np.zeros(heads, np.int64))


@mutant("attention", "P12")
def attention_without_max_shift(_: Operation) -> Operation:
    """Exp overflows for large scores."""

    class Unshifted(_Attention):
        def normalised(self, masked: Array) -> Array:
            exponential, sees = np.exp(masked), np.isfinite(masked).any(axis=-1, keepdims=True)
            return np.asarray(exponential / np.where(sees, exponential.sum(axis=-1, keepdims=True), 1.0))

    return Unshifted().operation()


@mutant("attention", "own", hidden_in=("bfloat16",))
def attention_probabilities_in_low_precision(_: Operation) -> Operation:
    """Probabilities rounded to bfloat16."""

    class Rounded(_Attention):
        def normalised(self, masked: Array) -> Array:
            return in_bfloat16(super().normalised(masked))

    return Rounded().operation()


@mutant("attention", "own")
def attention_value_gradient_ignores_groups(correct: Operation) -> Operation:
    """Key and value gradients of the first query head of each group only."""

    def first_of_group(_: Gradients, dy: Array, a: Arguments) -> Gradients:
        groups = dy.shape[2] // a["k"].shape[2]
        alone = np.where((np.arange(dy.shape[2]) % groups == 0)[:, None], dy, 0.0)
        gradients = pull(correct, alone, a)
        return {"k": gradients["k"], "v": gradients["v"]}

    return with_gradients(correct, first_of_group)


@mutant("attention", "own")
def attention_softmax_gradient_unprojected(correct: Operation) -> Operation:
    """Score gradient p·dp without subtracting the row's Σ p·dp."""

    class Unprojected(_Attention):
        def score_gradient(self, dp: Array, p: Array) -> Array:
            return p * dp

    return Operation(correct.forward, Unprojected().backward)


@mutant("attention", "own")
def attention_key_gradient_unscaled(correct: Operation) -> Operation:
    """Key gradient without 1/sqrt(head_dim)."""
    return with_gradients(correct, lambda g, _, a: {"k": g["k"] * math.sqrt(a["k"].shape[-1])})


@mutant("softmax", "P12")
def softmax_without_max_shift(correct: Operation) -> Operation:
    """Exp overflows."""

    def forward(x: Array) -> Array:
        exponential = np.exp(x)
        return np.asarray(exponential / exponential.sum(axis=-1, keepdims=True))

    def backward(dy: Array, x: Array) -> Gradients:
        return {"x": softmax.backward_from_probabilities(dy, forward(x))}

    return Operation(forward, backward, correct.outputs)


@mutant("softmax", "own")
def softmax_over_rows(correct: Operation) -> Operation:
    """Normalised over the wrong axis."""

    def forward(x: Array) -> Array:
        y: Array = call(correct, {"x": as_rows(x).T})
        return y.T.reshape(x.shape)

    def backward(dy: Array, x: Array) -> Gradients:
        return {"x": pull(correct, as_rows(dy).T, {"x": as_rows(x).T})["x"].T.reshape(x.shape)}

    return Operation(forward, backward)


@mutant("softmax", "own", hidden_in=("bfloat16",))
def softmax_unnormalised(_: Operation) -> Operation:
    """Divided by the sum plus 1e-3."""

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


@mutant("softmax", "own")
def softmax_gradient_diagonal(correct: Operation) -> Operation:
    """Dx = p (1 − p) dy, the diagonal of the Jacobian only."""

    def diagonal(_: Gradients, dy: Array, a: Arguments) -> Gradients:
        p = call(correct, a)
        return {"x": p * (1.0 - p) * dy}

    return with_gradients(correct, diagonal)
