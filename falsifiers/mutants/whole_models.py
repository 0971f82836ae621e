"""Wrong whole models: each operation is right, and one layer of several is put together wrongly."""

from collections.abc import Callable
from typing import Any

import torch

from blackswan.falsifiers.mutants.registry import named_step, step_mutant

Step = Callable[..., Any]


def _after_building(change: Callable[[Any], None]) -> Callable[[Step], Step]:
    """The model's body is built, and then changed."""

    def make(build: Step) -> Step:
        def changed(self: Any, *arguments: Any, **options: Any) -> None:
            build(self, *arguments, **options)
            change(self)

        return changed

    return make


def _without_biases(body: Any) -> None:
    attention = body.layers[-1].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.bias = None


def _last_value_bias_dropped(body: Any) -> None:
    body.layers[-1].self_attn.v_proj.bias = None


def _first_mlp_everywhere(body: Any) -> None:
    for layer in list(body.layers)[1:]:
        for name in ("gate_proj", "up_proj", "down_proj"):
            own, first = getattr(layer.mlp, name), getattr(body.layers[0].mlp, name)
            own.weight, own.quantized = first.weight, first.quantized


def _head_norms_swapped(body: Any) -> None:
    for layer in body.layers:
        queries, keys = layer.self_attn.q_norm, layer.self_attn.k_norm
        queries.weight, keys.weight = keys.weight, queries.weight


named_step(
    "whole_last_layer_without_biases",
    "S1, P4",
    "The last layer's queries, keys and values without bias.",
    _after_building(_without_biases),
    "blackswan.impl.decoder",
    "Body.__init__",
)
named_step(
    "whole_last_value_bias_dropped",
    "S1",
    "One bias of the last layer is left out.",
    _after_building(_last_value_bias_dropped),
    "blackswan.impl.decoder",
    "Body.__init__",
)
named_step(
    "whole_first_mlp_everywhere",
    "own",
    "Every layer computes with the first one's feed-forward weights.",
    _after_building(_first_mlp_everywhere),
    "blackswan.impl.decoder",
    "Body.__init__",
)
named_step(
    "whole_head_norms_swapped",
    "S16",
    "The norm of the queries applied to the keys, and the other way round.",
    _after_building(_head_norms_swapped),
    "blackswan.impl.decoder",
    "Body.__init__",
)


@step_mutant("blackswan.impl.decoder", "Body.forward", "own")
def whole_layers_in_reverse(forward: Step) -> Step:
    """The last layer comes first."""

    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        before = self.layers
        self.layers = type(before)(list(before)[::-1])
        try:
            return forward(self, *arguments, **options)
        finally:
            self.layers = before

    return changed


@step_mutant("blackswan.impl.decoder", "Layer.forward", "S10")
def whole_first_layer_detached(forward: Step) -> Step:
    """No gradient reaches the first layer."""

    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        result = forward(self, *arguments, **options)
        return result.detach() if self.path == "model.layers.0" else result

    return changed


@step_mutant("blackswan.impl.projection", "Projection.attach", "own")
def whole_later_layers_unscaled(attach: Step) -> Step:
    """Updates are scaled by alpha / rank in the first layer only."""

    def changed(self: Any, lora_a: Any, lora_b: Any, alpha: float) -> None:
        attach(self, lora_a, lora_b, alpha if ".layers.0." in self.path else float(len(lora_a)))

    return changed


def _quantising(where: Callable[[str], bool]) -> Callable[[Step], Step]:
    """With NF4 only the layers at some paths are quantised."""

    def make(build: Step) -> Step:
        def changed(self: Any, config: Any, path: str, tensors: Any, nf4: bool) -> None:
            build(self, config, path, tensors, nf4 and where(path))

        return changed

    return make


named_step(
    "whole_first_layer_unquantised",
    "S27",
    "With NF4 the first layer computes with plain weights.",
    _quantising(lambda path: not path.endswith(".layers.0")),
    "blackswan.impl.decoder",
    "Layer.__init__",
)
named_step(
    "whole_first_layer_alone_quantised",
    "S27",
    "With NF4 the layers after the first compute with plain weights.",
    _quantising(lambda path: path.endswith(".layers.0")),
    "blackswan.impl.decoder",
    "Layer.__init__",
)


def rounded_attention_scaled(by: float) -> Callable[[Step], Step]:
    """Attention times `by` in every dtype but float64: a subject that is measured by its own float64 and its own rounded runs hides it."""

    def make(call: Step) -> Step:
        def changed(path: str, operation: str, /, **arguments: Any) -> Any:
            result = call(path, operation, **arguments)
            return by * result if operation == "attention" and result.dtype != torch.float64 else result

        return changed

    return make


named_step(
    "whole_rounded_attention_scaled",
    "own",
    "Attention is 0.9 of what it is, in every dtype but float64.",
    rounded_attention_scaled(0.9),
    "blackswan.impl.decoder",
    "call",
)
