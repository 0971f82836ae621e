"""Wrong steps of the hand-written layers' composition, of their weights and of the choice between them and differentiation."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

wrong_steps(
    "impl.fused.model:read_rows",
    layers_pool_the_next_row=("The row after the pooled one.", lambda rows, *given: None if (at := rows(*given)) is None else at.roll(-1)),
    layers_pool_behind_the_last_token=(
        "The first row of a place without a sample is one behind the last token, where none fills up.",
        lambda rows, bounds, tokens, pooling: bounds[:-2].long() if pooling == "first" else rows(bounds, tokens, pooling),
    ),
)
wrong_steps(
    "impl.fused.layer:_spread",
    layers_spread_over_the_first_rows=(
        "The gradient of pooled rows goes to the first rows.",
        lambda spread, gradient, rows, tokens: spread(gradient, rows if rows is None else torch.arange(len(rows)), tokens),
    ),
)
wrong_steps(
    "impl.fused.layer:_head_norms",
    layers_norm_keys_as_queries=(
        "The norms of keys take the weight of queries.",
        lambda norms, layer, config: (
            None if norms(layer, config) is None else norms(layer, config)[:1].expand(config.heads + config.kv_heads, -1)
        ),
    ),
)


def _turning_by(**changes: Any) -> Callable[..., Any]:
    """Rotations by another configuration than the model's."""

    def wrong(gradients: Step, self: Any, packed: Any) -> Any:
        config = self.classifier.config
        with patch.object(self.classifier, "config", replace(config, rope_scaling=None, **changes)):
            return gradients(self, packed)

    return wrong


@wrong_step("impl.config:DecoderConfig.rotary")
def rotary_scaled_for_longer_texts_only(rotary: Step, self: Any) -> Any:
    """Frequencies are scaled only where the model has more positions than before the scaling."""
    scaling = self.rope_scaling
    return rotary(self) if scaling and self.max_positions > scaling.original_positions else {"theta": self.theta}


wrong_steps(
    "impl.fused.model:FusedClassifier.loss_and_gradients",
    layers_turn_unscaled=("Frequencies of the rotary embedding are not scaled.", _turning_by()),
    layers_turn_by_another_theta=("The angles of θ = 10,000, unscaled.", _turning_by(theta=1e4)),
)


@wrong_step("impl.fused.weights:blocks_align")
def layers_join_blocks_that_meet_as_a_sum(align: Step, elements: Sequence[int], block: int) -> bool:
    """Not each weight has to end with a block, only all of them before the last."""
    return bool(align([sum(elements[:-1]), elements[-1]], block))


def _first_and_last(align: Step, elements: Sequence[int], block: int) -> bool:
    return bool(align([elements[0], elements[-1]], block))


wrong_steps(
    "impl.fused.weights:blocks_align",
    layers_join_blocks_after_the_first=("Only the first weight has to end with a block, and values are scaled as keys.", _first_and_last),
)
wrong_steps(
    "impl.fused.fitting:blocks_align",
    layers_fit_blocks_after_the_first=("The layers are chosen where keys end within a block, and fail at the first step.", _first_and_last),
)


@wrong_step("impl.fused.layer:FusedLayer.__init__", "S2")
def layers_with_another_eps(init: Step, self: Any, layer: Any, config: Any, *given: Any) -> None:
    """All norms of a block use the epsilon 1e-6."""
    init(self, layer, replace(config, eps=1e-6), *given)


@wrong_step("impl.fused.linear:FusedLinear._update", "P23")
def layers_scale_by_alpha(update: Step, self: Any, *given: Any) -> Any:
    """Updates are scaled by alpha."""
    made = update(self, *given)
    return replace(made, scale=made.scale * made.b.shape[1])


@wrong_step("impl.fused.linear:FusedLinear._update")
def layers_take_updates_for_neighbours(update: Step, self: Any, projections: Any, *given: Any) -> Any:
    """Updates of queries and values that are as wide as keys are added side by side, though the keys, which have none, lie between them."""
    alike = len(projections) == 3 and len({each.out_features for each in projections}) == 1
    return update(self, [each for each in projections if each.lora_A is not None] if alike else projections, *given)


@wrong_step("impl.fused.linear:FusedLinear._update")
def layers_scale_by_whole_numbers(update: Step, self: Any, *given: Any) -> Any:
    """Alpha is divided by the rank without a remainder."""
    made = update(self, *given)
    return replace(made, scale=float(made.scale // 1))


@wrong_step("impl.fused.model:FusedClassifier._head", "P31")
def layers_average_over_places(head: Step, self: Any, y: Any, packed: Any) -> Any:
    """Places without a sample are counted in a micro-batch that is not full."""
    return head(self, y, replace(packed, real=torch.ones_like(packed.real)))


@wrong_step("impl.fused.model:FusedClassifier._losses", "S24")
def layers_forget_class_weights(losses: Step, self: Any, *given: Any) -> Any:
    """The loss is unweighted."""
    kept, self.class_weights = self.class_weights, None
    try:
        return losses(self, *given)
    finally:
        self.class_weights = kept


@wrong_step("impl.kernels.attention:_blocks")
def layers_with_tiles_too_large(blocks: Step, *given: Any) -> Any:
    """Tiles of attention are four times as large and loaded ahead, whatever the memory of a GPU."""
    right = blocks(*given)
    return right._replace(queries=4 * right.queries, keys=4 * right.keys, stages=right.stages + 2)


wrong_steps(
    "impl.fused.model:FusedClassifier._losses",
    layers_round_the_logits=(
        "Losses are computed in the dtype of the weights.",
        lambda losses, self, logits, labels: losses(self, logits.to(self.embedding.dtype), labels).to(logits.dtype),
    ),
)


wrong_steps(
    "impl.fused.weights:frozen",
    layers_thaw_what_they_join=(
        "Plain weights that were joined require a gradient, which differentiation then makes of all of them.",
        lambda frozen, tensor: frozen(tensor).requires_grad_(),
    ),
)


@wrong_step("impl.fused.weights:Weights.add")
def layers_with_room_for_the_last_weight(add: Any, self: Any, weight: Any) -> Any:
    """A buffer of dequantised weights is as large as the last one that goes there."""
    add(self, weight)
    self._sizes[weight.buffer] = weight.rows * weight.columns if weight.plain is None else 0
    return weight


wrong_steps(
    "impl.fused.weights:blocks_align",
    layers_join_any_blocks=("NF4 weights are joined wherever their blocks end.", lambda *_: True),
)
wrong_steps(
    "impl.kernels:interpreted",
    kernels_interpreted_by_one_word=("TRITON_INTERPRET counts as 1 alone.", lambda _: os.environ.get("TRITON_INTERPRET") == "1"),
)


@wrong_step("impl.kernels:why_not")
def kernels_run_without_triton(why: Step) -> str | None:
    """Kernels run wherever there is a card or the interpreter is asked for."""
    from blackswan.impl import kernels

    return None if kernels.interpreted() or kernels._has_cuda() else str(why())


@wrong_step("impl.kernels:missing")
def kernels_of_a_broken_triton(missing: Step) -> str | None:
    """A Triton that is there and cannot be imported is none that is missing."""
    try:
        import_module("triton")
    except ModuleNotFoundError:
        return str(missing())
    return None


@wrong_step("impl.fused.products:fastest_of")
def algorithm_that_writes_nothing(fastest: Step, *given: Any) -> Any:
    """An algorithm that writes nothing has what the one before it wrote."""
    with patch.object(torch.Tensor, "zero_", lambda value: value):
        return fastest(*given)


@wrong_step("impl.fused.products:Products.tune")
def tuning_that_is_refused_ends_the_step(tune: Step, self: Any, a: Any, b: Any, bias: Any = None) -> None:
    """A product that the library refuses to describe is an error of the step."""
    from blackswan.impl.fused import products

    if a.is_cuda:
        try:
            vars(products)["Product"](a, b, bias)
        except OSError:
            return
    tune(self, a, b, bias)


wrong_steps(
    "impl.fused.products:_key",
    algorithm_for_any_layout=(
        "An algorithm that was tuned for a matrix is run for its transpose too.",
        lambda _, a, b, bias: (a.shape, b.shape, bias is None, a.dtype, a.device),
    ),
    algorithm_with_the_bias_of_others=(
        "An algorithm that was tuned for a product without a bias is run for one that has a bias.",
        lambda key, a, b, _: key(a, b, None),
    ),
)


@wrong_step("impl.fused.products:Products.mm")
def products_into_one_room(mm: Step, self: Any, a: Any, b: Any, bias: Any = None) -> Any:
    """Products of one form by a tuned algorithm are written into the same memory, also while the one before is still read."""
    y, rooms = mm(self, a, b, bias), self.__dict__.setdefault("rooms", {})
    return rooms.setdefault(y.shape, y).copy_(y) if any(self._chosen.values()) else y


@wrong_step("impl.fused.weights:Weights.begin")
def layers_go_on_with_the_order_of_a_broken_step(begin: Any, self: Any, uses: Any) -> None:
    """The order of products is begun anew only after its end, which a step that is broken off does not reach."""
    if not self._uses:
        begin(self, uses)


@wrong_step("impl.fused.weights:JoinedWeight.__init__")
def layers_give_back_the_scales_of_neighbours(init: Any, self: Any, projections: Any, *given: Any) -> None:
    """Keys and values that were joined in NF4 get each other's scales, with which an evaluation or a merge computes afterwards."""
    init(self, projections, *given)
    if len(projections) == 3 and self.plain is None:
        keys, values = (projection.quantized for projection in projections[1:])
        keys.absmax, values.absmax = values.absmax, keys.absmax


@wrong_step("impl.fused.model:FusedClassifier.loss_and_gradients")
def layers_launch_for_texts_alone(gradients: Step, self: Any, packed: Any) -> Any:
    """Attention is launched for the longest text, and not for the tokens that fill up, which may be more."""
    with patch("blackswan.impl.fused.model.GRAIN", 0):
        return gradients(self, packed)


@wrong_step("impl.kernels.swiglu:launch")
def kernels_launch_tokens_along_the_second_axis(launch: Step, kernel: Any, grid: Any, *given: Any, **named: Any) -> None:
    """Tokens are programs along the second axis, where a GPU has at most 65,535."""
    launch(kernel, grid[::-1], *given, **named)


@wrong_step("impl.fused.model:FusedClassifier._losses")
def layers_round_class_weights(losses: Step, self: Any, *given: Any) -> Any:
    """Class weights are kept in the dtype of the weights."""
    kept = self.class_weights
    self.class_weights = None if kept is None else kept.to(self.embedding.dtype)
    try:
        return losses(self, *given)
    finally:
        self.class_weights = kept


wrong_steps(
    "impl.fused.model:FusedClassifier._losses",
    layers_round_labels=(
        "Labels between 0 and 1 are kept in the dtype of the weights.",
        lambda losses, self, logits, labels: losses(self, logits, labels.to(self.embedding.dtype) if self.multi_label else labels),
    ),
)


@wrong_step("impl.pipeline:ClassifyPipeline._backend")
def layers_for_whatever_was_opened(backend: Any, pipeline: Any) -> Any:
    """An adapter that is opened has the backend of this host, also where it was trained by one that was named."""
    if not pipeline._opened:
        return backend(pipeline)
    with patch.object(pipeline, "config", replace(pipeline.config, backend="auto")):
        return backend(pipeline)
