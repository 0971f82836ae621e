"""Wrong rotary positions, attention and softmax."""

import math
from collections.abc import Callable

import numpy as np

from blackswan.falsifiers.mutants.changes import (
    Arguments,
    Change,
    Gradients,
    call,
    edited,
    first_rows,
    in_bfloat16,
    pull,
    scaled,
    scaled_input,
    through,
    with_arguments,
    with_gradients,
)
from blackswan.falsifiers.mutants.registry import mutant, mutants
from blackswan.reference.table import Array, Operation


def _forward_rotation(correct: Operation) -> Operation:
    return with_gradients(x=lambda _, dy, a: call(correct, {**a, "x": dy}))(correct)


MIDDLE = "(turns > (self.low_freq_factor + self.high_freq_factor) / 2).astype(frequency.dtype)"

mutants(
    "rope",
    rope_interleaved_pairs=(
        "Pairs (2i, 2i + 1) instead of (i, i + d/2).",
        edited(
            ("x[..., :half], x[..., half:]", "x[..., 0::2], x[..., 1::2]"),
            ("np.concatenate([first", "np.stack([first"),
            ("first * sin], axis=-1)", "first * sin], axis=-1).reshape(x.shape)"),
        ),
        "P1",
    ),
    rope_dropped=("No rotation.", with_arguments(positions=lambda a: 0 * a["positions"]), "P2"),
    rope_inverse=("Rotation by the negative angle.", with_arguments(positions=lambda a: -a["positions"])),
    rope_theta_hard_coded=("θ = 10000 whatever the config says.", with_arguments(theta=lambda _: 10000.0)),
    rope_positions_from_one=("Positions start at 1 more than given.", with_arguments(positions=lambda a: a["positions"] + 1)),
    rope_positions_begin_again=("Positions from 4,096 on begin at 0 again.", with_arguments(positions=lambda a: a["positions"] % 4096)),
    rope_positions_ignored=(
        "Positions by column instead of as given.",
        with_arguments(positions=lambda a: np.broadcast_to(np.arange(a["positions"].shape[1]), a["positions"].shape)),
    ),
    rope_frequency_exponent=("θ^(−i/d) instead of θ^(−2i/d).", with_arguments(theta=lambda a: math.sqrt(a["theta"]))),
    rope_positions_in_bfloat16=(
        "Positions kept in bfloat16: beyond 256 neighbours are the same.",
        with_arguments(positions=lambda a: in_bfloat16(a["positions"].astype(np.float64)).astype(np.int64)),
        "P45",
    ),
    rope_table_too_short=(
        "Cosines and sines from a table of 4,096 positions; those beyond it take the last.",
        with_arguments(positions=lambda a: np.minimum(a["positions"], 4095)),
    ),
    rope_positions_rounded=(
        "Angles computed in bfloat16.",
        edited(
            (
                "positions.astype(x.dtype)[..., None, None] * frequency",
                "positions[..., None, None].astype(x.dtype) * in_bfloat16(frequency)",
            ),
            ("return angle", "return in_bfloat16(angle)"),
        ),
    ),
    rope_factor_ignored=("Frequencies are not scaled, whatever the factor.", with_arguments(factor=lambda _: 1.0)),
    rope_medium_band_not_smoothed=(
        "A frequency is divided or kept, with nothing between.",
        edited(("np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)", MIDDLE)),
    ),
    rope_wavelengths_swapped=(
        "Short waves are stretched and long ones kept.",
        edited(("(1.0 - kept) * frequency / self.factor + kept * frequency", "kept * frequency / self.factor + (1.0 - kept) * frequency")),
    ),
    rope_turns_in_radians=(
        "Turns are counted in radians.",
        edited((" * frequency / (2.0 * np.pi)", " * frequency")),
    ),
    rope_every_frequency_divided=(
        "Every frequency divided by the factor, as linear scaling does.",
        edited(("(1.0 - kept) * frequency / self.factor + kept * frequency", "frequency / self.factor")),
    ),
    rope_original_positions_fixed=(
        "8192 positions of pre-training, whatever the config says.",
        with_arguments(original_positions=lambda _: 8192),
    ),
    rope_of_first_wave=("Tokens beyond the first 1,024 stay zero: one wave of a kernel's programs.", scaled(first_rows("x", 2))),
    rope_gradient_rotates_forward=("The backward pass rotates the same way as the forward.", _forward_rotation),
)


def _reading(key_head_of: Callable[[int, int], Array]) -> Change:
    """Attention whose query heads read the key heads that `key_head_of(heads, kv_heads)` says."""

    def heads_of(a: Arguments) -> Array:
        return key_head_of(a["q"].shape[2], a["k"].shape[2])

    def gathered(gradient: Array, a: Arguments) -> Array:
        summed: Array = np.zeros_like(a["k"])
        for head, key_head in enumerate(heads_of(a)):
            summed[:, :, key_head] += gradient[:, :, head]
        return summed

    return through("k", "v", by=lambda value, a: value[:, :, heads_of(a)], back=gathered)


def _first_of_group(correct: Operation) -> Operation:
    def alone(name: str) -> Callable[[Array, Array, Arguments], Array]:
        def gradient(_: Array, dy: Array, a: Arguments) -> Array:
            first = np.arange(dy.shape[2]) % (dy.shape[2] // a["k"].shape[2]) == 0
            return pull(correct, np.where(first[:, None], dy, 0.0), a)[name]

        return gradient

    return with_gradients(k=alone("k"), v=alone("v"))(correct)


IN_ONE_BLOCK = ("QUERIES = 64", "QUERIES = 10**9")
mutants(
    "attention",
    attention_scale_from_hidden=(
        "1/sqrt(heads · head_dim) instead of 1/sqrt(head_dim).",
        scaled_input("q", lambda a: 1 / math.sqrt(a["q"].shape[2])),
        "P13",
    ),
    attention_scale_dropped=("No scale.", scaled_input("q", lambda a: math.sqrt(a["q"].shape[3]))),
    attention_not_causal=(
        "Every query sees every real key.",
        edited(IN_ONE_BLOCK, ("before & mask[:, None,", "(before | True) & mask[:, None,")),
        "P5",
    ),
    attention_causal_off_by_one=(
        "A query does not see its own key.",
        edited(("block.stop, block.start, dtype=bool", "block.stop, block.start - 1, dtype=bool")),
        "P5",
    ),
    attention_sees_one_ahead=(
        "A query sees the next key.",
        edited(IN_ONE_BLOCK, ("block.stop, block.start, dtype=bool", "block.stop, block.start + 1, dtype=bool")),
        "P5",
    ),
    attention_window=(
        "A query sees only itself and the three keys before.",
        edited(("before & mask[:, None,", "before & ~np.tri(*before.shape, block.start - 4, dtype=bool) & mask[:, None,")),
    ),
    attention_padding_ignored=("Padding keys attended.", with_arguments(mask=lambda a: a["mask"] | True)),
    attention_mask_of_first_sample=(
        "The first sample's mask taken for every sample.",
        with_arguments(mask=lambda a: np.broadcast_to(a["mask"][:1], a["mask"].shape)),
    ),
    attention_masked_row_nan=("A row that sees no key gives 0/0.", edited(("np.copyto(total, 1.0, where=sees_no_key)", "pass")), "P6, P7"),
    attention_masked_row_uniform=(
        "A row that sees no key averages all values.",
        edited(
            IN_ONE_BLOCK,
            (
                "    np.copyto(scores, -math.inf, where=hidden)",
                "    scores *= ~sees_no_key\n    np.copyto(scores, -math.inf, where=hidden)",
            ),
            (
                "sees_no_key = hidden.all(axis=-1, keepdims=True)",
                "sees_no_key = hidden.all(axis=-1, keepdims=True); hidden = hidden & ~sees_no_key",
            ),
            ("np.copyto(total, 1.0, where=sees_no_key)", "pass"),
            (
                "dqueries = dscores @ keys",
                "dscores *= np.tile(visible.any(axis=-1), q.shape[2] // kv_heads)[:, None, :, None]; dqueries = dscores @ keys",
            ),
        ),
        "P7",
    ),
    attention_groups_tiled=("Query head h reads key head h mod kv_heads.", _reading(lambda heads, kv_heads: np.arange(heads) % kv_heads)),
    attention_first_kv_head_only=("All query heads read the first key head.", _reading(lambda heads, _: np.zeros(heads, np.int64))),
    attention_of_first_wave=("Queries beyond the first 1,024 stay zero: one wave of a kernel's programs.", scaled(first_rows("q", 2))),
    attention_without_max_shift=("Exp overflows for large scores.", edited(("scores -= shift", "pass")), "P12"),
    attention_probabilities_in_low_precision=(
        "Probabilities rounded to bfloat16.",
        edited(("scores.reshape(products.shape)", "in_bfloat16(scores).reshape(products.shape)")),
        "own",
        "bfloat16",
    ),
    attention_value_gradient_ignores_groups=("Key and value gradients of the first query head of each group only.", _first_of_group),
    attention_softmax_gradient_unprojected=(
        "Score gradient p·dp without subtracting the row's Σ p·dp.",
        edited(("dscores -= projection", "pass"), only="backward"),
    ),
    attention_key_gradient_unscaled=(
        "Key gradient without 1/sqrt(head_dim).",
        with_gradients(k=lambda gradient, _, a: gradient * math.sqrt(a["k"].shape[-1])),
    ),
)


mutants(
    "softmax",
    softmax_without_max_shift=("Exp overflows.", edited(("x - x.max(axis=-1, keepdims=True)  #", "x  #")), "P12"),
    softmax_exponentials_in_float16=(
        "Exponentials in float16 of scores as they are, infinite beyond 11.",
        edited(("x - x.max(axis=-1, keepdims=True)  #", "x  #"), ("np.exp(shifted)", "in_float16(np.exp(shifted))")),
    ),
    softmax_over_rows=(
        "Normalised over the wrong axis.",
        edited(
            ("x.max(axis=-1", "x.max(axis=0"),
            ("exponential.sum(axis=-1", "exponential.sum(axis=0"),
            ("(dp * p).sum(axis=-1", "(dp * p).sum(axis=0"),
        ),
    ),
)


@mutant("softmax", hidden_in=("bfloat16",))
def softmax_unnormalised(correct: Operation) -> Operation:
    """Divided by the sum plus 1e-3."""

    def backward(dy: Array, x: Array) -> Gradients:
        p = wrong.forward(x)
        expected = (dy * p).sum(axis=-1, keepdims=True)
        of_shift = np.zeros_like(x)
        np.put_along_axis(of_shift, x.argmax(axis=-1, keepdims=True), expected * (1.0 - p.sum(axis=-1, keepdims=True)), axis=-1)
        return {"x": p * (dy - expected) - of_shift}

    wrong = edited(("exponential.sum(axis=-1, keepdims=True)", "(exponential.sum(axis=-1, keepdims=True) + 1e-3)"))(correct)
    return Operation(wrong.forward, backward)


@mutant("softmax")
def softmax_gradient_diagonal(correct: Operation) -> Operation:
    """Dx = p (1 − p) dy, the diagonal of the Jacobian only."""

    def diagonal(_: Array, dy: Array, a: Arguments) -> Array:
        p = call(correct, a)
        return np.asarray(p * (1.0 - p) * dy)

    return with_gradients(x=diagonal)(correct)
