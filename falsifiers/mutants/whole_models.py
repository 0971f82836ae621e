"""Wrong whole models: each operation is right, and one layer of several is put together wrongly."""

from collections.abc import Callable
from typing import Any

import torch

from blackswan.falsifiers.mutants.patches import step_mutant

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


step_mutant("whole_last_layer_without_biases", "blackswan.impl.decoder", "Body.__init__")(_after_building(_without_biases))
step_mutant("whole_last_value_bias_dropped", "blackswan.impl.decoder", "Body.__init__")(_after_building(_last_value_bias_dropped))
step_mutant("whole_first_mlp_everywhere", "blackswan.impl.decoder", "Body.__init__")(_after_building(_first_mlp_everywhere))
step_mutant("whole_head_norms_swapped", "blackswan.impl.decoder", "Body.__init__")(_after_building(_head_norms_swapped))


@step_mutant("whole_layers_in_reverse", "blackswan.impl.decoder", "Body.forward")
def _(forward: Step) -> Step:
    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        before = self.layers
        self.layers = type(before)(list(before)[::-1])
        try:
            return forward(self, *arguments, **options)
        finally:
            self.layers = before

    return changed


@step_mutant("whole_first_layer_detached", "blackswan.impl.decoder", "Layer.forward")
def _(forward: Step) -> Step:
    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        result = forward(self, *arguments, **options)
        return result.detach() if self.path == "model.layers.0" else result

    return changed


@step_mutant("whole_later_layers_unscaled", "blackswan.impl.projection", "Projection.attach")
def _(attach: Step) -> Step:
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


step_mutant("whole_first_layer_unquantised", "blackswan.impl.decoder", "Layer.__init__")(
    _quantising(lambda path: not path.endswith(".layers.0"))
)
step_mutant("whole_first_layer_alone_quantised", "blackswan.impl.decoder", "Layer.__init__")(
    _quantising(lambda path: path.endswith(".layers.0"))
)


def rounded_attention_scaled(by: float) -> Callable[[Step], Step]:
    """Attention times `by` in every dtype but float64: a subject that is measured by its own float64 and its own rounded runs hides it."""

    def make(call: Step) -> Step:
        def changed(path: str, operation: str, /, **arguments: Any) -> Any:
            result = call(path, operation, **arguments)
            return by * result if operation == "attention" and result.dtype != torch.float64 else result

        return changed

    return make


step_mutant("whole_rounded_attention_scaled", "blackswan.impl.decoder", "call")(rounded_attention_scaled(0.9))
