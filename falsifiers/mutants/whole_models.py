"""Wrong whole models: each operation is right, and one layer of several is put together wrongly."""

from collections.abc import Callable
from typing import Any

import torch

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Callable[..., Any]


@wrong_step("impl.decoder:Body.__init__", "S1", "P4")
def whole_last_layer_without_biases(build: Step, self: Any, *given: Any, **options: Any) -> None:
    """The last layer's queries, keys and values without bias."""
    build(self, *given, **options)
    attention = self.layers[-1].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.bias = None


@wrong_step("impl.decoder:Body.__init__", "S1")
def whole_last_value_bias_dropped(build: Step, self: Any, *given: Any, **options: Any) -> None:
    """One bias of the last layer is left out."""
    build(self, *given, **options)
    self.layers[-1].self_attn.v_proj.bias = None


@wrong_step("impl.decoder:Body.__init__")
def whole_first_mlp_everywhere(build: Step, self: Any, *given: Any, **options: Any) -> None:
    """Every layer computes with the first one's feed-forward weights."""
    build(self, *given, **options)
    for layer in list(self.layers)[1:]:
        for name in ("gate_proj", "up_proj", "down_proj"):
            own, first = getattr(layer.mlp, name), getattr(self.layers[0].mlp, name)
            own.weight, own.quantized = first.weight, first.quantized


@wrong_step("impl.decoder:Body.__init__", "S16")
def whole_head_norms_swapped(build: Step, self: Any, *given: Any, **options: Any) -> None:
    """The norm of the queries applied to the keys, and the other way round."""
    build(self, *given, **options)
    for layer in self.layers:
        queries, keys = layer.self_attn.q_norm, layer.self_attn.k_norm
        queries.weight, keys.weight = keys.weight, queries.weight


@wrong_step("impl.decoder:Body.forward")
def whole_layers_in_reverse(forward: Step, self: Any, *given: Any, **options: Any) -> Any:
    """The last layer comes first."""
    before = self.layers
    self.layers = type(before)(list(before)[::-1])
    try:
        return forward(self, *given, **options)
    finally:
        self.layers = before


@wrong_step("impl.decoder:Layer.forward", "S10")
def whole_first_layer_detached(forward: Step, self: Any, *given: Any, **options: Any) -> Any:
    """No gradient reaches the first layer."""
    result = forward(self, *given, **options)
    return result.detach() if self.path == "model.layers.0" else result


@wrong_step("impl.projection:Projection.attach")
def whole_later_layers_unscaled(attach: Step, self: Any, lora_a: Any, lora_b: Any, alpha: float) -> None:
    """Updates are scaled by alpha / rank in the first layer only."""
    attach(self, lora_a, lora_b, alpha if ".layers.0." in self.path else float(len(lora_a)))


@wrong_step("impl.decoder:Layer.__init__", "S27")
def whole_first_layer_unquantised(build: Step, self: Any, config: Any, path: str, tensors: Any, nf4: bool) -> None:
    """The first layer computes with plain weights, though NF4 was asked for."""
    build(self, config, path, tensors, nf4 and not path.endswith(".layers.0"))


@wrong_step("impl.decoder:Layer.__init__", "S27")
def whole_first_layer_alone_quantised(build: Step, self: Any, config: Any, path: str, tensors: Any, nf4: bool) -> None:
    """The layers after the first compute with plain weights, though NF4 was asked for."""
    build(self, config, path, tensors, nf4 and path.endswith(".layers.0"))


def rounded_attention_scaled(by: float) -> Callable[[Step], Step]:
    """Attention times `by` in every dtype but float64: a subject that is measured by its own float64 and its own rounded runs hides it."""

    def make(call: Step) -> Step:
        def changed(path: str, operation: str, /, **arguments: Any) -> Any:
            result = call(path, operation, **arguments)
            return by * result if operation == "attention" and result.dtype != torch.float64 else result

        return changed

    return make


wrong_step("impl.decoder:call", name="whole_rounded_attention_scaled", doc="Attention is 0.9 of what it is, in every dtype but float64.")(
    lambda call, path, operation, /, **arguments: rounded_attention_scaled(0.9)(call)(path, operation, **arguments)
)
