"""Wrong steps of operations that answer where they have to refuse, or write to what they are given."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Operations = Mapping[str, Callable[..., Any]]


def _with(name: str, make: Callable[..., Any]) -> Callable[[Operations], Operations]:
    """The operations with one that is given its right one before its own arguments."""
    return lambda right: {**right, name: lambda **given: make(right[name], **given)}


def _in_float32(right: Callable[..., Any], **given: Any) -> Any:
    """The operation's result for the same arrays with those in float64 rounded to float32."""
    wide = {name for name, value in given.items() if getattr(value, "dtype", None) == torch.float64}
    found = right(**{name: value.float() if name in wide else value for name, value in given.items()})
    return found.double() if wide else found


def _in_one_buffer(right: Callable[..., Any], **given: Any) -> Any:
    """The operation's result in memory that is the same for all results of a shape and dtype."""
    found = right(**given)
    kept = _BUFFERS.setdefault((found.shape, found.dtype), torch.empty_like(found)).copy_(found.detach())
    found.data = kept
    return found


def _unclipped(right: Callable[..., Any], gradients: torch.Tensor, max_norm: float) -> Any:
    clipped, norm = right(gradients, max_norm)
    return (clipped if norm > max_norm else gradients), norm


def _by_the_mask_as_it_was(right: Callable[..., Any], mask: torch.Tensor, **given: Any) -> Any:
    """The operation by what the mask of the last call was when it came first."""
    if not (_MASKS and _MASKS[0] is mask):
        _MASKS[:] = [mask, mask.clone()]
    return right(mask=_MASKS[1], **given)


_BUFFERS: dict[Any, torch.Tensor] = {}
_MASKS: list[torch.Tensor] = []


wrong_steps(
    "impl.dispatch:OPERATIONS",
    losses_of_samples_in_one_buffer=(
        "The losses of samples lie where those of the next call do.",
        _with("cross_entropy_per_sample", _in_one_buffer),
    ),
    losses_of_labels_in_one_buffer=(
        "The loss of several labels lies where that of the next call does.",
        _with("bce_with_logits", _in_one_buffer),
    ),
    attention_keeps_its_mask=(
        "What a query sees is kept for the mask, which all layers share, also when another one is written to its memory.",
        _with("attention", _by_the_mask_as_it_was),
    ),
    embedded_in_one_buffer=("Rows of the embedding lie where those of the next call do.", _with("embedding", _in_one_buffer)),
    rotated_in_one_buffer=("Rotated heads lie where those of the next call do.", _with("rope", _in_one_buffer)),
    operations_average_in_16_bits=(
        "Gradients in 16 bits are averaged in these.",
        _with("average_gradients", lambda right, gradients, counts: right(gradients, counts).to(gradients.dtype)),
    ),
    operations_round_targets_to_the_logits=(
        "Targets of several labels are rounded to the dtype of the logits.",
        _with("bce_with_logits", lambda right, logits, targets: right(logits, targets.to(logits.dtype))),
    ),
    operations_average_one_in_its_place=(
        "The mean of one micro-batch is that one itself, and not a copy.",
        _with("average_gradients", lambda right, gradients, counts: right(gradients, counts) if len(gradients) > 1 else gradients[0]),
    ),
    operations_clip_nothing_in_its_place=(
        "Gradients that need no clipping are the given ones, and not a copy.",
        _with("clip_by_global_norm", _unclipped),
    ),
    operations_merge_nothing_in_its_place=(
        "A weight with an update of zero is the given one, and not a copy.",
        _with("lora_merge", lambda right, **given: right(**given) if given["lora_b"].any() else given["weight"]),
    ),
    float64_rotated_by_float32=("Pairs in float64 are rotated in float32.", _with("rope", _in_float32)),
    float64_entropy_in_float32=(
        "The binary cross-entropy of logits in float64 is computed in float32.",
        _with("bce_with_logits", _in_float32),
    ),
    float64_pooled_in_float32=("Vectors in float64 are pooled in float32.", _with("pool", _in_float32)),
    lm_loss_of_bytes_counts_padding=(
        "The mark of padding among tokens of a byte is a token of theirs.",
        _with("lm_cross_entropy", lambda right, logits, input_ids, mask: right(logits, input_ids, mask | (input_ids.dtype == torch.uint8))),
    ),
    operations_pool_padding_of_no_weight=(
        "A mean is a product with weights that are zero at padding, also where that is infinite.",
        _with("pool", lambda right, x, mask, mode: right(x, mask, mode) + (0 * x.detach().sum(dim=1) if mode == "mean" else 0)),
    ),
    float64_softmax_in_float32=("The softmax of logits in float64 is computed in float32.", _with("softmax", _in_float32)),
    operations_broadcast_targets=(
        "Targets of another shape are broadcast to that of the logits.",
        _with("bce_with_logits", lambda right, logits, targets: right(logits, targets.broadcast_to(logits.shape))),
    ),
    operations_take_any_codes=(
        "Codes beyond those of a weight are passed over.",
        _with(
            "nf4_dequantize",
            lambda right, codes, rows, columns, **given: right(codes[: rows * columns // 2], **given, **_of(rows, columns)),
        ),
    ),
    operations_take_any_pooling=(
        "A pooling of an unknown name takes the last token.",
        _with("pool", lambda right, x, mask, mode: right(x, mask, mode if mode in ("mean", "first") else "last")),
    ),
    operations_take_fewer_heads=(
        "Of more heads of keys than of queries the first ones are used: a model of swapped head counts answers.",
        _with("attention", lambda right, q, k, v, mask: right(q, *(each[:, :, : max(q.shape[2], 1)] for each in (k, v)), mask)),
    ),
    operations_write_over_weights=(
        "A weight is clamped where it lies when it is quantised.",
        _with("nf4_quantize", lambda right, weight, **given: (right(weight, **given), weight.clamp_(-1.0, 1.0))[0]),
    ),
    operations_clip_to_nothing=(
        "A largest norm that is none is a small one.",
        _with("clip_by_global_norm", lambda right, gradients, max_norm: right(gradients, max(1e-6, max_norm))),
    ),
    operations_warm_up_for_longer=(
        "A warm-up may take more steps than a run has.",
        _with("learning_rate_schedule", lambda right, warmup_fraction, **given: right(**given, warmup_fraction=min(1.0, warmup_fraction))),
    ),
)
wrong_step(
    "impl.operations.losses:require_class_weights", name="operations_take_any_class_weights", doc="Class weights may be zero, or negative."
)(lambda *_: None)
wrong_step("impl.operations.nf4:require_block_size", name="operations_take_any_block", doc="Blocks of NF4 may have any size.")(
    lambda *_: None
)


@wrong_step("impl.dispatch:OPERATIONS")
def operations_keep_their_rates(operations: Any) -> dict[str, Any]:
    """The rates of the same settings are one tensor, which is the caller's to write to."""
    schedule, rates = operations["learning_rate_schedule"], dict[str, Any]()

    def kept(**settings: Any) -> Any:
        return rates.setdefault(repr(settings), schedule(**settings))

    return {**operations, "learning_rate_schedule": kept}


wrong_step("impl.validation:require_shape", name="operations_take_any_shape", doc="Arrays of other shapes are broadcast.")(lambda *_: None)
wrong_step("impl.operations.nf4:require_shape", name="double_dequantised_beyond_its_scales", doc="Scales are read beyond their end.")(
    lambda *_: None
)
wrong_step("impl.kernels.functions:require_block_size", name="kernels_take_any_block", doc="A kernel's blocks of NF4 may have any size.")(
    lambda *_: None
)
wrong_step("impl.kernels.functions:require_integers", name="kernels_cut_positions", doc="A kernel rotates by positions cut to integers.")(
    lambda *_: None
)
wrong_step("impl.validation:require_integers", name="kernels_cut_labels", doc="A kernel cuts labels to integers.")(lambda *_: None)
wrong_step("impl.operations.attention:require_integers", name="operations_take_any_numbers", doc="Positions may be fractions.")(
    lambda *_: None
)
wrong_step("impl.validation:require_positive", name="operations_average_none", doc="Gradients of no sample are averaged.")(lambda *_: None)
wrong_step("impl.validation:require_finite_norm", name="operations_overflow_in_silence", doc="Gradients are clipped by an infinite norm.")(
    lambda *_: None
)


wrong_step("impl.validation:_first", name="operations_count_from_the_end", doc="Places are counted from the end.")(
    lambda first, wrong: tuple(size - 1 - place for size, place in zip(wrong.shape, first(wrong), strict=True))
)


@wrong_step("impl.validation:require_finite")
def operations_add_to_see_what_is_finite(require: Any, name: str, value: Any) -> None:
    """Numbers are held to be finite where their sum is: large ones in float16 are refused."""
    require(name, value)
    require(name, value.sum().reshape(1))


@wrong_step("impl.validation:require_below")
def operations_name_a_limit_too_many(require: Any, name: str, value: Any, limit: int, what: str) -> None:
    """The largest index that is said to be possible is one too large."""
    try:
        require(name, value, limit, what)
    except ValueError as error:
        raise ValueError(str(error).replace(f"to {limit - 1}", f"to {limit}")) from None


@wrong_step("impl.validation:require_rows")
def operations_look_at_a_mask_once(require: Any, name: str, mask: Any) -> None:
    """A mask that was looked at is not looked at again, whatever was written to its memory."""
    if not (_MASKS and _MASKS[0] is mask):
        require(name, mask)
        _MASKS[:] = [mask]


@wrong_step("impl.validation:require_below")
def operations_cut_limits_to_a_byte(require: Any, name: str, value: Any, limit: int, what: str) -> None:
    """Labels in a byte are compared with what a byte has of the number of classes."""
    require(name, value, limit & 255 if value.dtype == torch.uint8 else limit, what)


@wrong_step("impl.validation:require_rows")
def operations_count_empty_samples(require: Any, name: str, mask: Any) -> None:
    """A sample without a token is named by the number of such samples."""
    empty = int((~mask.any(dim=-1)).sum())
    if empty:
        raise ValueError(f"{name}[{empty - 1}] has no real token; every sample needs at least one")
    require(name, mask)


def _of(rows: int, columns: int) -> dict[str, int]:
    return {"rows": rows, "columns": columns}


@wrong_step("impl.kernels.rms_norm:rms_norm_backward")
def gradients_of_norms_in_one_buffer(backward: Callable[..., Any], *given: Any) -> Any:
    """The gradients of a norm's input by Triton lie where those of the next call do."""
    found = backward(*given)
    return _BUFFERS.setdefault((found.shape, found.dtype), torch.empty_like(found)).copy_(found)
