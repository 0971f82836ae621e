"""Wrong adapters, merges and saves: one step of `impl` replaced while the subject runs."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from blackswan.falsifiers.mutants.patches import step_mutant

Tensors = Mapping[str, Any]
Save = Callable[..., Any]


def _saved(change: Callable[[Tensors], Tensors]) -> Callable[[Save], Save]:
    """`save_file` that writes other tensors than it was given."""
    return lambda save: lambda tensors, *rest, **options: save(dict(change(tensors)), *rest, **options)


def _without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def _each(part: str, change: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(tensor) if part in name else tensor for name, tensor in tensors.items()}


def _swapped(tensors: Tensors) -> Tensors:
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}
    return {name.replace(part, other[part]) if part else name: tensor for name, tensor in tensors.items() for part in [_factor(name)]}


def _factor(name: str) -> str:
    return next((part for part in ("lora_A", "lora_B") if part in name), "")


step_mutant("adapter_head_not_saved", "blackswan.impl.adapter", "save_file")(_saved(_without("score.")))
step_mutant("adapter_head_bias_dropped", "blackswan.impl.adapter", "save_file")(_saved(_without("score.bias")))
step_mutant("adapter_factors_swapped", "blackswan.impl.adapter", "save_file")(_saved(_swapped))
step_mutant("adapter_rounded_to_bfloat16", "blackswan.impl.adapter", "save_file")(
    _saved(_each("", lambda tensor: tensor.bfloat16().float()))
)
step_mutant("adapter_prefix_left_out", "blackswan.impl.adapter", "PREFIX")(lambda _: "")
step_mutant("checkpoint_saved_without_biases", "blackswan.impl.checkpoint", "save_file")(
    _saved(_each("_proj.bias", lambda tensor: 0 * tensor))
)
step_mutant("checkpoint_saved_in_float16", "blackswan.impl.checkpoint", "save_file")(_saved(_each("", lambda tensor: tensor.half())))
step_mutant("checkpoint_layers_swapped_when_saved", "blackswan.impl.checkpoint", "save_file")(
    _saved(lambda tensors: {_other_norm(name): tensor for name, tensor in tensors.items()})
)


def _other_norm(name: str) -> str:
    one, other = "input_layernorm", "post_attention_layernorm"
    return name.replace(one, other) if one in name else name.replace(other, one)


@step_mutant("adapter_b_premultiplied", "blackswan.impl.adapter", "save_adapter")
def _(save: Save) -> Save:
    def wrong(folder: Path, config: Any, adaptation: Any, trainable: Tensors, **options: Any) -> None:
        scaled = _each("lora_B", lambda tensor: tensor * (adaptation.alpha / adaptation.rank))(trainable)
        save(folder, config, adaptation, scaled, **options)

    return wrong


@step_mutant("adapter_alpha_not_written", "blackswan.impl.adapter", "_peft_config")
def _(config: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda *arguments: {**config(*arguments), "lora_alpha": 8}


def _loaded(change: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`load_adapter` that returns another adapter than the one it read."""
    return lambda load: lambda *arguments: change(load(*arguments))


def _settings(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change(found: Any) -> Any:
        new = {name: value(found.adaptation) for name, value in changes.items()}
        return replace(found, adaptation=replace(found.adaptation, **new))

    return change


def _fresh_head(found: Any) -> Any:
    head = {name: tensor.roll(1, 0) for name, tensor in found.trainable.items() if name == "score.weight"}
    return replace(found, trainable=found.trainable | head)


def _zero_bias(found: Any) -> Any:
    return replace(found, trainable=dict(_each("score.bias", lambda tensor: 0 * tensor)(found.trainable)))


step_mutant("adapter_head_not_restored", "blackswan.impl.adapter", "load_adapter")(_loaded(_fresh_head))
step_mutant("adapter_head_bias_not_restored", "blackswan.impl.adapter", "load_adapter")(_loaded(_zero_bias))
step_mutant("adapter_scaled_by_alpha", "blackswan.impl.adapter", "load_adapter")(
    _loaded(_settings(alpha=lambda settings: settings.alpha * settings.rank))
)
step_mutant("adapter_alpha_taken_as_twice_the_rank", "blackswan.impl.adapter", "load_adapter")(
    _loaded(_settings(alpha=lambda settings: 2.0 * settings.rank))
)
step_mutant("adapter_pooling_forgotten", "blackswan.impl.adapter", "load_adapter")(_loaded(_settings(pooling=lambda _: "mean")))
step_mutant("adapter_nf4_forgotten", "blackswan.impl.adapter", "load_adapter")(_loaded(_settings(nf4=lambda _: False)))
step_mutant("adapter_widened_when_loaded", "blackswan.impl.adapter", "read_tensors")(
    lambda read: lambda *arguments: {name: tensor.float() for name, tensor in read(*arguments).items()}
)
step_mutant("adapter_variants_ignored", "blackswan.impl.adapter", "_PeftConfig.refuse_unsupported")(lambda _: lambda *_: None)
step_mutant("adapter_of_another_base_accepted", "blackswan.impl.adapter", "_architecture")(lambda _: lambda *_: {})


@step_mutant("adapter_missing_tensors_made_up", "blackswan.impl.adapter", "load_adapter")
def _(load: Callable[..., Any]) -> Callable[..., Any]:
    """As `load_state_dict(strict=False)` on a fresh model does."""
    import torch

    from blackswan.impl import adapter

    def lenient(expected: Mapping[str, tuple[int, ...]], tensors: Any, source: str) -> None:
        del source
        for name, shape in expected.items():
            tensors.setdefault(name, torch.zeros(shape))

    def wrong(*arguments: Any) -> Any:
        strict, adapter.require_named = adapter.require_named, lenient
        try:
            return load(*arguments)
        finally:
            adapter.require_named = strict

    return wrong


def _merging(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`lora_merge` of another B or alpha, both of which `change` takes and gives, with the rank behind them."""

    def changed(merge: Callable[..., Any]) -> Callable[..., Any]:
        return lambda weight, a, b, alpha: merge(weight, a, *change(b, (alpha, a.shape[0])))

    return changed


step_mutant("merge_with_scale_one", "blackswan.impl.merge", "lora_merge")(_merging(lambda b, scale: (b, scale[1])))
step_mutant("merge_with_scale_alpha", "blackswan.impl.merge", "lora_merge")(_merging(lambda b, scale: (b, scale[0] * scale[1])))
step_mutant("merge_left_out", "blackswan.impl.merge", "lora_merge")(_merging(lambda b, scale: (0 * b, scale[0])))
step_mutant("merge_into_unquantised", "blackswan.impl.merge", "_dequantized")(lambda _: lambda *given: given[1])
step_mutant("merge_head_bias_dropped", "blackswan.impl.merge", "read_tensors")(
    lambda read: lambda *arguments: dict(_each("score.bias", lambda tensor: 0 * tensor)(read(*arguments)))
)


@step_mutant("merge_in_low_precision", "blackswan.impl.merge", "lora_merge")
def _(merge: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weight, a, b, alpha: merge(weight.bfloat16(), a.bfloat16(), b.bfloat16(), alpha).to(weight.dtype)


@step_mutant("merge_quantises_the_rest_not", "blackswan.impl.merge", "merge_adapter")
def _(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Projections without an update keep the weight that training never saw."""

    def wrong(checkpoint: Any, adapter: Any, **options: Any) -> Any:
        merged = merge(checkpoint, adapter, **options)
        return {name: tensor if _adapted(name, adapter) else checkpoint.tensors[name] for name, tensor in merged.items()}

    return wrong


step_mutant("merge_quantises_what_is_stored", "blackswan.impl.merge", "merge_adapter")(
    lambda merge: lambda *given, **options: merge(*given, **{**options, "quantized_as": None})
)


def _adapted(name: str, adapter: Any) -> bool:
    return f"{name.removesuffix('.weight')}.lora_A.weight" in adapter.trainable


@step_mutant("merged_checkpoint_quantised_again", "blackswan.impl.merge", "load_merged")
def _(load: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(folder: Path) -> Any:
        checkpoint, head = load(folder)
        return checkpoint, _settings(nf4=lambda _: True)(head)

    return wrong


@step_mutant("adapter_overwritten_in_place", "blackswan.impl.adapter", "whole_folder")
def _(_: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def wrong(folder: Path, *, replace: bool = False) -> Iterator[Path]:
        del replace
        folder.mkdir(parents=True, exist_ok=True)
        yield folder

    return wrong


@step_mutant("adapter_removed_before_it_is_replaced", "blackswan.impl.adapter", "whole_folder")
def _(whole: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def wrong(folder: Path, *, replace: bool = False) -> Iterator[Path]:
        shutil.rmtree(folder, ignore_errors=True)
        with whole(folder, replace=replace) as partial:
            yield partial

    return wrong


step_mutant("adapter_partial_left_behind", "blackswan.impl.folder", "shutil.rmtree")(lambda _: lambda *_, **__: None)
