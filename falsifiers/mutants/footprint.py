"""Wrong estimates of memory, and loading and training that take or keep what they do not need: one step of `impl` replaced each."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Callable[..., Any]
_estimate = partial(wrong_step, "blackswan.impl.memory", "estimate")


def _without(name: str, pedigree: str, doc: str, *parts: str) -> None:
    """An estimate without these parts, in its total as well."""

    def wrong(estimate: Step, *given: Any, **options: Any) -> Any:
        found = estimate(*given, **options)
        left = {part: count for part, count in found.parts.items() if part not in parts}
        return replace(found, parts=left, total=found.total - sum(found.parts.values()) + sum(left.values()))

    _estimate(pedigree, name=name, doc=doc)(wrong)


def _of_other(name: str, doc: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """An estimate of another training step than the one asked for."""

    def wrong(estimate: Step, *given: Any, **options: Any) -> Any:
        asked = inspect.signature(estimate).bind(*given, **options).arguments
        return estimate(**{**asked, **change(asked)})

    _estimate("own", name=name, doc=doc)(wrong)


_without("estimate_without_scales", "S30", "NF4 without its absmax.", "nf4_absmax")
_without("estimate_without_lora", "S30", "LoRA and head left out.", "lora", "head")
_without("estimate_without_optimiser", "S30", "Moments, gradients and their temporaries left out.", "moments", "gradients", "update")
_without("estimate_without_activations", "own", "What is saved for the backward pass left out.", "activations", "working")
_of_other("estimate_of_one_sample", "A batch of one, whatever the batch.", lambda _: {"batch": 1})
_of_other("estimate_always_in_bfloat16", "bfloat16 whatever the dtype.", lambda _: {"dtype": torch.bfloat16})
_of_other(
    "estimate_always_quantised",
    "NF4 whether or not it was asked for.",
    lambda asked: {"adaptation": replace(asked["adaptation"], nf4=True)},
)


@_estimate("own")
def estimate_calls_weights_activations(estimate: Step, *given: Any, **options: Any) -> Any:
    """Dequantised weights counted as saved activations."""
    found = estimate(*given, **options)
    parts = dict(found.parts)
    parts["activations"] += parts.pop("dequantised_weights", 0)
    return replace(found, parts=parts)


# loading with NF4


@wrong_step("blackswan.impl.classifier", "Converted", "own")
def load_all_before_quantising(converted: Step, *given: Any, **options: Any) -> Any:
    """Every tensor converted before the first is quantised."""
    return dict(converted(*given, **options))


@wrong_step("blackswan.impl.checkpoint", "load_checkpoint", "own")
def load_reads_all_shards(load: Step, folder: Any) -> Any:
    """All shards read before the model is built."""
    found = load(folder)
    return replace(found, tensors=dict(found.tensors))


@wrong_step("blackswan.impl.classifier", "Body", "S27")
def load_unquantised_with_warning(body: Step, config: Any, tensors: Any, nf4: bool) -> Any:
    """NF4 asked for, a warning, and the run goes on unquantised."""
    if nf4:
        warnings.warn("NF4 is not available: going on without", stacklevel=2)
    return body(config, tensors, False)


@wrong_step("blackswan.impl.decoder", "Layer", "own")
def load_last_layer_unquantised(layer: Step, config: Any, path: str, tensors: Any, nf4: bool) -> Any:
    """The last layer is left as it is."""
    return layer(config, path, tensors, nf4 and not path.endswith(f".{config.layers - 1}"))


# what training keeps


def _keep(self: Any, value: Any) -> None:
    vars(self).setdefault("history", []).append(value)


@wrong_step("blackswan.impl.classifier", "Classifier.loss", "own")
def training_keeps_every_loss(loss: Step, self: Any, *given: Any) -> Any:
    """Each batch's loss is kept with its graph."""
    _keep(self, found := loss(self, *given))
    return found


@wrong_step("blackswan.impl.trainer", "Trainer._micro_batch", "own")
def training_keeps_every_result(micro_batch: Step, self: Any, *given: Any) -> Any:
    """A list of metrics keeps their tensors."""
    found = micro_batch(self, *given)
    _keep(self, found.correct)
    return found


@wrong_step("blackswan.impl.optimiser", "AdamW.step", "own")
def optimiser_keeps_old_moments(step: Step, self: Any, *given: Any) -> None:
    """The moments before each step are kept."""
    _keep(self, self.exp_avg)
    step(self, *given)


@wrong_step("blackswan.impl.nf4", "Nf4Weight.__init__", "own")
def step_keeps_plain_weights(init: Step, self: Any, path: str, weight: Any, *given: Any, **options: Any) -> None:
    """The plain weights are kept beside their NF4 codes."""
    init(self, path, weight, *given, **options)
    self.register_buffer("plain", weight.clone())


@wrong_step("blackswan.impl.fused.weights", "JoinedWeight.__init__", "own")
def fused_stores_codes_twice(init: Step, self: Any, projections: Any, *given: Any) -> None:
    """The hand-written layers join the codes, and the projections keep theirs."""
    init(self, projections, *given)
    for projection in projections:
        if projection.quantized is not None:
            projection.quantized.codes = projection.quantized.codes.clone()


@wrong_step("blackswan.impl.nf4", "Nf4Weight.dequantized", "own")
def nf4_keeps_what_it_dequantised(dequantized: Step, self: Any, dtype: Any) -> Any:
    """A weight that was dequantised once is kept in that dtype."""
    return vars(self).setdefault("kept", {}).setdefault(dtype, dequantized(self, dtype))


@wrong_step("blackswan.impl.fused.weights", "JoinedWeight.dequantized", "own")
def fused_keeps_what_it_dequantised(dequantized: Step, self: Any, room: Any) -> Any:
    """The same in the hand-written layers."""
    if "kept" not in vars(self):
        self.kept = dequantized(self, room).clone()
    return self.kept


@wrong_step("blackswan.impl.decoder", "Body.__init__", "own")
def embedding_not_frozen(init: Step, self: Any, *given: Any) -> None:
    """The frozen embedding requires a gradient, and gets one."""
    init(self, *given)
    self.embed_tokens.weight.requires_grad_()
