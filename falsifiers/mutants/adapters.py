"""Wrong adapters, merges and saves: one step of `impl` replaced while the subject runs."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.mutants.registry import named_step, step_mutant

Tensors = Mapping[str, Any]
Save = Callable[..., Any]
Read = Callable[[Any, str], Any]


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


named_step(
    "adapter_head_not_saved", "P29", "The file has LoRA factors only.", _saved(_without("score.")), "blackswan.impl.adapter", "save_file"
)
named_step(
    "adapter_head_bias_dropped",
    "P4, P29",
    "Of the head, the weight alone is saved.",
    _saved(_without("score.bias")),
    "blackswan.impl.adapter",
    "save_file",
)
named_step(
    "adapter_factors_swapped",
    "own",
    "A saved under the name of B and B under that of A.",
    _saved(_swapped),
    "blackswan.impl.adapter",
    "save_file",
)
named_step(
    "adapter_rounded_to_bfloat16",
    "own",
    "Float32 masters saved rounded to bfloat16.",
    _saved(_each("", lambda tensor: tensor.bfloat16().float())),
    "blackswan.impl.adapter",
    "save_file",
)
named_step(
    "adapter_prefix_left_out",
    "own",
    "Names without base_model.model., which PEFT skips in silence.",
    lambda _: "",
    "blackswan.impl.adapter",
    "PREFIX",
)
named_step(
    "checkpoint_saved_without_biases",
    "P4, S1",
    "Biases are zeros in the saved file.",
    _saved(_each("_proj.bias", lambda tensor: 0 * tensor)),
    "blackswan.impl.checkpoint",
    "save_file",
)
named_step(
    "checkpoint_saved_in_float16",
    "own",
    "Saved in float16 whatever the dtype.",
    _saved(_each("", lambda tensor: tensor.half())),
    "blackswan.impl.checkpoint",
    "save_file",
)
named_step(
    "checkpoint_layers_swapped_when_saved",
    "S29",
    "The two norm weights of a layer saved under each other's name.",
    _saved(lambda tensors: {_other_norm(name): tensor for name, tensor in tensors.items()}),
    "blackswan.impl.checkpoint",
    "save_file",
)


def _other_norm(name: str) -> str:
    one, other = "input_layernorm", "post_attention_layernorm"
    return name.replace(one, other) if one in name else name.replace(other, one)


def _read(change: Callable[[Any, str], Any]) -> Callable[[Read], Read]:
    """Another tensor than the one that is stored: (its reader, its name)."""
    return lambda read: lambda self, name: change(lambda other: read(self, other), name)


def _other_layer(name: str) -> str:
    one, other = "model.layers.0.", "model.layers.1."
    return name.replace(one, other) if one in name else name.replace(other, one)


named_step(
    "checkpoint_biases_dropped",
    "S1, P4",
    "Bias tensors of the file arrive as zeros.",
    _read(lambda read, name: 0 * read(name) if name.endswith("_proj.bias") else read(name)),
    "blackswan.impl.checkpoint",
    "StoredTensors.__getitem__",
)
named_step(
    "checkpoint_layers_swapped",
    "S29",
    "Tensors of the first two layers change places.",
    _read(lambda read, name: read(_other_layer(name))),
    "blackswan.impl.checkpoint",
    "StoredTensors.__getitem__",
)
named_step(
    "checkpoint_rounded_to_bfloat16",
    "own",
    "A float32 file arrives rounded to bfloat16.",
    _read(lambda read, name: read(name).bfloat16().to(read(name).dtype)),
    "blackswan.impl.checkpoint",
    "StoredTensors.__getitem__",
)


@step_mutant("blackswan.impl.checkpoint", "load_checkpoint", "own")
def checkpoint_damage_ignored(load: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A folder that cannot be read gives the tensors of another one."""

    def wrong(folder: Path) -> Any:
        try:
            return load(folder)
        except (FileNotFoundError, ValueError):
            return load(CHECKPOINT)

    return wrong


@step_mutant("blackswan.impl.adapter", "save_adapter", "S14")
def adapter_b_premultiplied(save: Save) -> Save:
    """B saved times alpha/r."""

    def wrong(folder: Path, config: Any, adaptation: Any, trainable: Tensors, **options: Any) -> None:
        scaled = _each("lora_B", lambda tensor: tensor * (adaptation.alpha / adaptation.rank))(trainable)
        save(folder, config, adaptation, scaled, **options)

    return wrong


@step_mutant("blackswan.impl.adapter", "_peft_config", "P23")
def adapter_alpha_not_written(config: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """lora_alpha is PEFT's default, 8, whatever was trained."""
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


named_step(
    "adapter_head_not_restored",
    "P29",
    "The loaded head is another one, here with its rows moved by one.",
    _loaded(_fresh_head),
    "blackswan.impl.adapter",
    "load_adapter",
)
named_step(
    "adapter_head_bias_not_restored",
    "P4, P29",
    "Of the head, the weight alone is loaded.",
    _loaded(_zero_bias),
    "blackswan.impl.adapter",
    "load_adapter",
)
named_step(
    "adapter_scaled_by_alpha",
    "P23",
    "A loaded adapter acts with alpha instead of alpha/r.",
    _loaded(_settings(alpha=lambda settings: settings.alpha * settings.rank)),
    "blackswan.impl.adapter",
    "load_adapter",
)
named_step(
    "adapter_alpha_taken_as_twice_the_rank",
    "own",
    "Alpha by the rule of thumb, not from the file.",
    _loaded(_settings(alpha=lambda settings: 2.0 * settings.rank)),
    "blackswan.impl.adapter",
    "load_adapter",
)
named_step(
    "adapter_pooling_forgotten",
    "own",
    "A loaded classifier pools the mean whatever it was trained with.",
    _loaded(_settings(pooling=lambda _: "mean")),
    "blackswan.impl.adapter",
    "load_adapter",
)
named_step(
    "adapter_nf4_forgotten",
    "S27",
    "Trained on NF4 weights, loaded on plain ones.",
    _loaded(_settings(nf4=lambda _: False)),
    "blackswan.impl.adapter",
    "load_adapter",
)
named_step(
    "adapter_widened_when_loaded",
    "own",
    "A bfloat16 adapter arrives in float32.",
    lambda read: lambda *arguments: {name: tensor.float() for name, tensor in read(*arguments).items()},
    "blackswan.impl.adapter",
    "read_tensors",
)
named_step(
    "adapter_variants_ignored",
    "own",
    "DoRA, rsLoRA and ranks by module are taken for plain LoRA.",
    lambda _: lambda *_: None,
    "blackswan.impl.adapter",
    "_PeftConfig.refuse_unsupported",
)
named_step(
    "adapter_of_another_base_accepted",
    "S28",
    "An adapter goes onto any base whose shapes fit.",
    lambda _: lambda *_: {},
    "blackswan.impl.adapter",
    "_architecture",
)


@step_mutant("blackswan.impl.adapter", "load_adapter", "P29")
def adapter_missing_tensors_made_up(load: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors that are not in the file stay at zero without a word.

    As `load_state_dict(strict=False)` on a fresh model does.
    """
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


named_step("merge_with_scale_one", "P24", "W + B A.", _merging(lambda b, scale: (b, scale[1])), "blackswan.impl.merge", "lora_merge")
named_step(
    "merge_with_scale_alpha",
    "P23",
    "W + alpha B A.",
    _merging(lambda b, scale: (b, scale[0] * scale[1])),
    "blackswan.impl.merge",
    "lora_merge",
)
named_step(
    "merge_left_out",
    "own",
    "The merged checkpoint is the base.",
    _merging(lambda b, scale: (0 * b, scale[0])),
    "blackswan.impl.merge",
    "lora_merge",
)
named_step(
    "merge_into_unquantised",
    "P27",
    "Trained on NF4, merged into the weight before quantisation.",
    lambda _: lambda *given: given[1],
    "blackswan.impl.merge",
    "_dequantized",
)
named_step(
    "merge_head_bias_dropped",
    "P4, P29",
    "Of a merged checkpoint's head, the weight alone is loaded.",
    lambda read: lambda *arguments: dict(_each("score.bias", lambda tensor: 0 * tensor)(read(*arguments))),
    "blackswan.impl.merge",
    "read_tensors",
)


@step_mutant("blackswan.impl.merge", "lora_merge", "P28")
def merge_in_low_precision(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Weight and factors merged in bfloat16."""
    return lambda weight, a, b, alpha: merge(weight.bfloat16(), a.bfloat16(), b.bfloat16(), alpha).to(weight.dtype)


@step_mutant("blackswan.impl.merge", "merge_adapter", "P27")
def merge_quantises_the_rest_not(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Trained on NF4, projections without an update keep the weight before quantisation.

    Projections without an update keep the weight that training never saw.
    """

    def wrong(checkpoint: Any, adapter: Any, **options: Any) -> Any:
        merged = merge(checkpoint, adapter, **options)
        return {name: tensor if _adapted(name, adapter) else checkpoint.tensors[name] for name, tensor in merged.items()}

    return wrong


named_step(
    "merge_quantises_what_is_stored",
    "own",
    "Trained in bfloat16 on NF4, merged into the NF4 codes of the checkpoint's float32 weights.",
    lambda merge: lambda *given, **options: merge(*given, **{**options, "quantized_as": None}),
    "blackswan.impl.merge",
    "merge_adapter",
)


def _adapted(name: str, adapter: Any) -> bool:
    return f"{name.removesuffix('.weight')}.lora_A.weight" in adapter.trainable


@step_mutant("blackswan.impl.merge", "load_merged", "own")
def merged_checkpoint_quantised_again(load: Callable[..., Any]) -> Callable[..., Any]:
    """A merged checkpoint is quantised once more when it is loaded."""

    def wrong(folder: Path) -> Any:
        checkpoint, head = load(folder)
        return checkpoint, _settings(nf4=lambda _: True)(head)

    return wrong


@step_mutant("blackswan.impl.adapter", "whole_folder", "own")
def adapter_overwritten_in_place(_: Callable[..., Any]) -> Callable[..., Any]:
    """Files of the old adapter are overwritten one by one."""

    @contextmanager
    def wrong(folder: Path, *, replace: bool = False) -> Iterator[Path]:
        del replace
        folder.mkdir(parents=True, exist_ok=True)
        yield folder

    return wrong


@step_mutant("blackswan.impl.adapter", "whole_folder", "own")
def adapter_removed_before_it_is_replaced(whole: Callable[..., Any]) -> Callable[..., Any]:
    """The old adapter is removed before the new one is written."""

    @contextmanager
    def wrong(folder: Path, *, replace: bool = False) -> Iterator[Path]:
        shutil.rmtree(folder, ignore_errors=True)
        with whole(folder, replace=replace) as partial:
            yield partial

    return wrong


named_step(
    "adapter_partial_left_behind",
    "own",
    "A save that failed leaves its folder behind.",
    lambda _: lambda *_, **__: None,
    "blackswan.impl.folder",
    "shutil.rmtree",
)
