"""Wrong steps of the decoder and the classifier, planted into the modules that take them."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.planting import Planted, after_init, both, method, step
from blackswan.impl.classifier import Head
from blackswan.impl.decoder import Attention, Body, Decoder, Layer, Norm
from blackswan.impl.dispatch import call
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.projection import Projection


def _without_final_norm() -> Planted:
    return method(Norm, "forward", lambda original, self, x: x if self.path == "model.norm" else original(self, x))


@step("rms_norm")
def decoder_final_norm_dropped() -> Planted:
    """`model.norm` not called."""
    return _without_final_norm()


@step("rms_norm")
def classifier_pools_before_final_norm() -> Planted:
    """`model.norm` not called."""
    return _without_final_norm()


@step("linear")
def decoder_qkv_biases_dropped() -> Planted:
    """Projections keep no bias."""
    return after_init(Projection, lambda projection: setattr(projection, "bias", None))


@step("rms_norm")
def decoder_layers_swapped() -> Planted:
    """The tensors of the first and the last layer change places."""

    def swapped(original: Callable[..., None], self: Body, config: Any, tensors: Any, nf4: bool) -> None:
        first, last = "model.layers.0.", f"model.layers.{config.layers - 1}."
        other = {name: name.replace(first, last) if name.startswith(first) else name.replace(last, first) for name in tensors}
        original(self, config, {name: tensors[other[name]] for name in tensors}, nf4)

    return method(Body, "__init__", swapped)


@step("qk_norm")
def decoder_qk_norm_missing_in_one_block() -> Planted:
    """The last block's queries and keys go unnormalised."""

    def missing(body: Any) -> None:
        attention = body.layers[-1].self_attn
        if hasattr(attention, "q_norm"):
            attention.q_norm = attention.k_norm = torch.nn.Identity()

    return after_init(Body, missing)


def _head(change: Callable[[Tensor], Tensor]) -> Planted:
    def logits(_: Any, self: Decoder, hidden: Tensor) -> Any:
        weight = self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight
        return call("lm_head", "linear", x=hidden, weight=change(weight))

    return method(Decoder, "logits", logits)


@step("linear")
def decoder_head_untied() -> Planted:
    """The head's weight shifted by one row."""
    return _head(lambda weight: weight.roll(1, dims=0))


@step("linear")
def decoder_logits_flat() -> Planted:
    """An almost zero head."""
    return _head(lambda weight: (1e-3 * weight.float()).flip(0).to(weight.dtype))


def _positions_by_column() -> Planted:
    def columns(original: Callable[..., Tensor], self: Layer, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        return original(self, x, mask, torch.arange(mask.shape[1]).expand_as(positions).contiguous())

    return method(Layer, "forward", columns)


@step("rope")
def decoder_positions_count_padding() -> Planted:
    """Positions by column."""
    return _positions_by_column()


@step("rope")
def classifier_positions_count_padding() -> Planted:
    """Positions by column."""
    return _positions_by_column()


@step("rms_norm")
def decoder_last_layer_skipped() -> Planted:
    """One layer fewer."""
    return after_init(Body, lambda body: setattr(body, "layers", body.layers[:-1]))


@step("rms_norm")
def decoder_norms_swapped() -> Planted:
    """The two norm weights of every block change places."""

    def swap(layer: Any) -> None:
        one, other = layer.input_layernorm, layer.post_attention_layernorm
        one.weight, other.weight = other.weight, one.weight

    return after_init(Layer, swap)


@step("residual_add")
def decoder_residual_from_norm() -> Planted:
    """The residual of the MLP taken after the norm."""

    def forward(_: Any, self: Layer, x: Tensor, mask: Tensor, positions: Tensor) -> Any:
        attended = self.self_attn(self.input_layernorm(x), mask, positions)
        x = call(f"{self.path}.attention_residual", "residual_add", x=x, branch=attended)
        normalised = self.post_attention_layernorm(x)
        return call(f"{self.path}.mlp_residual", "residual_add", x=normalised, branch=self.mlp(normalised))

    return method(Layer, "forward", forward)


@step("attention")
def decoder_padding_ignored() -> Planted:
    """Attention sees no mask."""

    def unmasked(original: Callable[..., Tensor], self: Attention, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        return original(self, x, torch.ones_like(mask), positions)

    return method(Attention, "forward", unmasked)


@step("nf4_quantize")
def nf4_not_applied() -> Planted:
    """Weights stay unquantised."""
    return method(Body, "__init__", lambda original, self, config, tensors, nf4: original(self, config, tensors, False))  # noqa: ARG005


@step("nf4_quantize")
def classifier_one_projection_unquantised() -> Planted:
    """down_proj stays unquantised."""

    take = Projection.take.__func__  # type: ignore[attr-defined]  # a class method's function

    def unquantised(cls: type, path: str, tensors: Any, nf4: bool) -> Projection:
        projection: Projection = take(cls, path, tensors, nf4 and not path.endswith("down_proj"))
        return projection

    return patch.object(Projection, "take", classmethod(unquantised))


@step("linear")
def classifier_head_bias_dropped() -> Planted:
    """The head's bias not added."""
    return method(Head, "forward", lambda _, self, x: call("score", "linear", x=x, weight=self.weight, bias=None))


@step("linear")
def classifier_head_quantised() -> Planted:
    """Where NF4 is asked for, the head goes through it and back."""
    asked: dict[str, bool] = {}

    def noted(original: Callable[..., None], self: Body, config: Any, tensors: Any, nf4: bool) -> None:
        asked["nf4"] = nf4
        original(self, config, tensors, nf4)

    def forward(original: Callable[..., Any], self: Head, x: Tensor) -> Any:
        if not asked["nf4"]:
            return original(self, x)
        rows, columns = self.weight.shape
        codes, absmax = OPERATIONS["nf4_quantize"](self.weight, block_size=64)
        weight = OPERATIONS["nf4_dequantize"](codes, absmax, rows, columns, 64, dtype=self.weight.dtype)
        return call("score", "linear", x=x, weight=weight, bias=self.bias)

    return both(method(Body, "__init__", noted), method(Head, "forward", forward))


def _without_adapter(chosen: Callable[[Projection], bool]) -> Planted:
    def forward(original: Callable[..., Tensor], self: Projection, x: Tensor) -> Tensor:
        kept, self.alpha = self.alpha, 0.0 if chosen(self) else self.alpha
        try:
            return original(self, x)
        finally:
            self.alpha = kept

    return method(Projection, "forward", forward)


@step("lora_linear")
def classifier_targets_q_k() -> Planted:
    """v's adapter is loaded and not applied."""
    return _without_adapter(lambda projection: projection.path.endswith("v_proj"))


@step("lora_linear")
def classifier_adapters_of_last_layer_dropped() -> Planted:
    """The last layer runs without its adapters."""
    last: dict[str, str] = {}
    note = after_init(Body, lambda body: last.update(path=body.layers[-1].path + "."))
    return both(note, _without_adapter(lambda projection: projection.path.startswith(last["path"])))
