"""Wrong estimates of memory, and loading and training that take or keep what they do not need: one step of `impl` replaced each."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from blackswan.falsifiers.mutants.registry import named_step, step_mutant

Step = Callable[..., Any]
_estimate = partial(named_step, module="blackswan.impl.memory", attribute="estimate")


def _without(*names: str) -> Callable[[Step], Step]:
    """An estimate without these parts, in its total as well."""

    def make(estimate: Step) -> Step:
        def changed(*arguments: Any, **options: Any) -> Any:
            found = estimate(*arguments, **options)
            left = {name: count for name, count in found.parts.items() if name not in names}
            return replace(found, parts=left, total=found.total - sum(found.parts.values()) + sum(left.values()))

        return changed

    return make


def _of_other(change: Callable[[dict[str, Any]], None]) -> Callable[[Step], Step]:
    """An estimate of another training step than the one asked for."""

    def make(estimate: Step) -> Step:
        def changed(*arguments: Any, **options: Any) -> Any:
            bound = inspect.signature(estimate).bind(*arguments, **options)
            change(bound.arguments)
            return estimate(*bound.args, **bound.kwargs)

        return changed

    return make


_estimate("estimate_without_scales", "S30", "NF4 without its absmax.", _without("nf4_absmax"))
_estimate("estimate_without_lora", "S30", "LoRA and head left out.", _without("lora", "head"))
_estimate(
    "estimate_without_optimiser", "S30", "Moments, gradients and their temporaries left out.", _without("moments", "gradients", "update")
)
_estimate("estimate_without_activations", "own", "What is saved for the backward pass left out.", _without("activations", "working"))
_estimate("estimate_of_one_sample", "own", "A batch of one, whatever the batch.", _of_other(lambda asked: asked.update(batch=1)))
_estimate("estimate_always_in_bfloat16", "own", "bfloat16 whatever the dtype.", _of_other(lambda asked: asked.update(dtype=torch.bfloat16)))
_estimate(
    "estimate_always_quantised",
    "own",
    "NF4 whether or not it was asked for.",
    _of_other(lambda asked: asked.update(adaptation=replace(asked["adaptation"], nf4=True))),
)


@step_mutant("blackswan.impl.memory", "estimate", "own")
def estimate_calls_weights_activations(estimate: Step) -> Step:
    """Dequantised weights counted as saved activations."""

    def changed(*arguments: Any, **options: Any) -> Any:
        found = estimate(*arguments, **options)
        parts = dict(found.parts)
        parts["activations"] += parts.pop("dequantised_weights", 0)
        return replace(found, parts=parts)

    return changed


# loading with NF4


@step_mutant("blackswan.impl.classifier", "Converted", "own")
def load_all_before_quantising(converted: Step) -> Step:
    """Every tensor converted before the first is quantised."""
    return lambda *arguments, **options: dict(converted(*arguments, **options))


@step_mutant("blackswan.impl.checkpoint", "load_checkpoint", "own")
def load_reads_all_shards(load: Step) -> Step:
    """All shards read before the model is built."""
    return lambda folder: replace(found := load(folder), tensors=dict(found.tensors))


@step_mutant("blackswan.impl.classifier", "Body", "S27")
def load_unquantised_with_warning(body: Step) -> Step:
    """NF4 asked for, a warning, and the run goes on unquantised."""

    def changed(config: Any, tensors: Any, nf4: bool) -> Any:
        if nf4:
            warnings.warn("NF4 is not available: going on without", stacklevel=2)
        return body(config, tensors, False)

    return changed


@step_mutant("blackswan.impl.decoder", "Layer", "own")
def load_last_layer_unquantised(layer: Step) -> Step:
    """The last layer is left as it is."""
    return lambda config, path, tensors, nf4: layer(config, path, tensors, nf4 and not path.endswith(f".{config.layers - 1}"))


# what training keeps


def _kept(self: Any, value: Any) -> Any:
    vars(self).setdefault("history", []).append(value)
    return value


@step_mutant("blackswan.impl.classifier", "Classifier.loss", "own")
def training_keeps_every_loss(loss: Step) -> Step:
    """Each batch's loss is kept with its graph."""
    return lambda self, *arguments: _kept(self, loss(self, *arguments))


@step_mutant("blackswan.impl.trainer", "Trainer._micro_batch", "own")
def training_keeps_every_result(micro_batch: Step) -> Step:
    """A list of metrics keeps their tensors."""

    def changed(self: Any, *arguments: Any) -> Any:
        found = micro_batch(self, *arguments)
        _kept(self, found.correct)
        return found

    return changed


@step_mutant("blackswan.impl.optimiser", "AdamW.step", "own")
def optimiser_keeps_old_moments(step: Step) -> Step:
    """The moments before each step are kept."""

    def changed(self: Any, *arguments: Any) -> None:
        _kept(self, self.exp_avg)
        step(self, *arguments)

    return changed


@step_mutant("blackswan.impl.nf4", "Nf4Weight.__init__", "own")
def step_keeps_plain_weights(init: Step) -> Step:
    """The plain weights are kept beside their NF4 codes."""

    def changed(self: Any, path: str, weight: Any, *arguments: Any, **options: Any) -> None:
        init(self, path, weight, *arguments, **options)
        self.register_buffer("plain", weight.clone())

    return changed


@step_mutant("blackswan.impl.fused.weights", "JoinedWeight.__init__", "own")
def fused_stores_codes_twice(init: Step) -> Step:
    """The hand-written layers join the codes, and the projections keep theirs."""

    def changed(self: Any, projections: Any, *arguments: Any) -> None:
        init(self, projections, *arguments)
        for projection in projections:
            if projection.quantized is not None:
                projection.quantized.codes = projection.quantized.codes.clone()

    return changed


@step_mutant("blackswan.impl.nf4", "Nf4Weight.dequantized", "own")
def nf4_keeps_what_it_dequantised(dequantized: Step) -> Step:
    """A weight that was dequantised once is kept in that dtype."""

    def changed(self: Any, dtype: Any) -> Any:
        return vars(self).setdefault("kept", {}).setdefault(dtype, dequantized(self, dtype))

    return changed


@step_mutant("blackswan.impl.fused.weights", "JoinedWeight.dequantized", "own")
def fused_keeps_what_it_dequantised(dequantized: Step) -> Step:
    """The same in the hand-written layers."""

    def changed(self: Any, room: Any) -> Any:
        if "kept" not in vars(self):
            self.kept = dequantized(self, room).clone()
        return self.kept

    return changed


@step_mutant("blackswan.impl.decoder", "Body.__init__", "own")
def embedding_not_frozen(init: Step) -> Step:
    """The frozen embedding requires a gradient, and gets one."""

    def changed(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.embed_tokens.weight.requires_grad_()

    return changed
