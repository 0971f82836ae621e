"""Wrong adapters, checkpoints, merges and saves: one step of `impl` replaced while the subject runs."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.mutants.registry import named_step, wrong_step, wrong_steps

ADAPTER, CHECKPOINTS, MERGE = "blackswan.impl.adapter", "blackswan.impl.checkpoint", "blackswan.impl.merge"
Tensors = Mapping[str, Any]
Step = Callable[..., Any]


def _each(part: str, change: Callable[[Any], Any]) -> Callable[[Tensors], dict[str, Any]]:
    """The tensors whose name holds that part, changed."""
    return lambda tensors: {name: change(tensor) if part in name else tensor for name, tensor in tensors.items()}


def _without(part: str) -> Callable[[Tensors], dict[str, Any]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def _exchanged(one: str, other: str) -> Callable[[str], str]:
    """A name with the one part in the place of the other."""
    return lambda name: name.replace(one, other) if one in name else name.replace(other, one)


def _renamed(one: str, other: str) -> Callable[[Tensors], dict[str, Any]]:
    rename = _exchanged(one, other)
    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


def _saved(change: Callable[[Tensors], Tensors]) -> Step:
    """Other tensors saved than were given."""
    return lambda save, tensors, *rest, **options: save(dict(change(tensors)), *rest, **options)


def _result(change: Step) -> Step:
    """The result of the right step, changed."""
    return lambda right, *given: change(right(*given))


def _settings(**changes: Callable[[Any], Any]) -> Step:
    """A loaded adapter with other settings."""

    def change(found: Any) -> Any:
        new = {name: value(found.adaptation) for name, value in changes.items()}
        return replace(found, adaptation=replace(found.adaptation, **new))

    return change


def _tensors(part: str, change: Callable[[Any], Any]) -> Step:
    """A loaded adapter with other tensors."""
    return lambda found: replace(found, trainable=_each(part, change)(found.trainable))


wrong_steps(
    ADAPTER,
    "save_file",
    by=_saved,
    adapter_head_not_saved=("The file has LoRA factors only.", _without("score."), "P29"),
    adapter_head_bias_dropped=("Of the head, the weight alone is saved.", _without("score.bias"), "P4, P29"),
    adapter_factors_swapped=("A saved under the name of B and B under that of A.", _renamed("lora_A", "lora_B")),
    adapter_rounded_to_bfloat16=("Float32 masters saved rounded to bfloat16.", _each("", lambda tensor: tensor.bfloat16().float())),
)
wrong_steps(
    ADAPTER,
    "load_adapter",
    by=_result,
    adapter_head_not_restored=(
        "The loaded head is another one, here with its rows moved by one.",
        _tensors("score.weight", lambda tensor: tensor.roll(1, 0)),
        "P29",
    ),
    adapter_head_bias_not_restored=("Of the head, the weight alone is loaded.", _tensors("score.bias", lambda bias: 0 * bias), "P4, P29"),
    adapter_scaled_by_alpha=(
        "A loaded adapter acts with alpha instead of alpha/r.",
        _settings(alpha=lambda settings: settings.alpha * settings.rank),
        "P23",
    ),
    adapter_alpha_taken_as_twice_the_rank=(
        "Alpha by the rule of thumb, not from the file.",
        _settings(alpha=lambda settings: 2.0 * settings.rank),
    ),
    adapter_pooling_forgotten=(
        "A loaded classifier pools the mean whatever it was trained with.",
        _settings(pooling=lambda _: "mean"),
    ),
    adapter_nf4_forgotten=("Trained on NF4 weights, loaded on plain ones.", _settings(nf4=lambda _: False), "S27"),
)
wrong_steps(
    ADAPTER,
    "read_tensors",
    by=_result,
    adapter_widened_when_loaded=("A bfloat16 adapter arrives in float32.", _each("", lambda tensor: tensor.float())),
)
named_step(
    "adapter_prefix_left_out", "own", "Names without base_model.model., which PEFT skips in silence.", lambda _: "", ADAPTER, "PREFIX"
)


@wrong_step(ADAPTER, "_PeftConfig.refuse_unsupported", "own")
def adapter_variants_ignored(*_: Any) -> None:
    """DoRA, rsLoRA and ranks by module are taken for plain LoRA."""


@wrong_step(ADAPTER, "_architecture", "S28")
def adapter_of_another_base_accepted(*_: Any) -> dict[str, Any]:
    """An adapter goes onto any base whose shapes fit."""
    return {}


@wrong_step(ADAPTER, "save_adapter", "S14")
def adapter_b_premultiplied(save: Step, folder: Path, config: Any, adaptation: Any, trainable: Tensors, **options: Any) -> None:
    """B saved times alpha/r."""
    scaled = _each("lora_B", lambda tensor: tensor * (adaptation.alpha / adaptation.rank))(trainable)
    save(folder, config, adaptation, scaled, **options)


@wrong_step(ADAPTER, "_peft_config", "P23")
def adapter_alpha_not_written(config: Step, *given: Any) -> dict[str, Any]:
    """lora_alpha is PEFT's default, 8, whatever was trained."""
    return {**config(*given), "lora_alpha": 8}


@wrong_step(ADAPTER, "load_adapter", "P29")
def adapter_missing_tensors_made_up(load: Step, *given: Any) -> Any:
    """Tensors that are not in the file stay at zero without a word.

    As `load_state_dict(strict=False)` on a fresh model does.
    """
    import torch

    from blackswan.impl import adapter

    def lenient(expected: Mapping[str, tuple[int, ...]], tensors: Any, source: str) -> None:
        del source
        for name, shape in expected.items():
            tensors.setdefault(name, torch.zeros(shape))

    strict, adapter.require_named = adapter.require_named, lenient
    try:
        return load(*given)
    finally:
        adapter.require_named = strict


wrong_steps(
    CHECKPOINTS,
    "save_file",
    by=_saved,
    checkpoint_saved_without_biases=("Biases are zeros in the saved file.", _each("_proj.bias", lambda bias: 0 * bias), "P4, S1"),
    checkpoint_saved_in_float16=("Saved in float16 whatever the dtype.", _each("", lambda tensor: tensor.half())),
    checkpoint_layers_swapped_when_saved=(
        "The two norm weights of a layer saved under each other's name.",
        _renamed("input_layernorm", "post_attention_layernorm"),
        "S29",
    ),
)
_other_layer = _exchanged("model.layers.0.", "model.layers.1.")
wrong_steps(
    CHECKPOINTS,
    "StoredTensors.__getitem__",
    checkpoint_biases_dropped=(
        "Bias tensors of the file arrive as zeros.",
        lambda read, self, name: 0 * read(self, name) if name.endswith("_proj.bias") else read(self, name),
        "S1, P4",
    ),
    checkpoint_layers_swapped=(
        "Tensors of the first two layers change places.",
        lambda read, self, name: read(self, _other_layer(name)),
        "S29",
    ),
    checkpoint_rounded_to_bfloat16=(
        "A float32 file arrives rounded to bfloat16.",
        lambda read, self, name: read(self, name).bfloat16().to(read(self, name).dtype),
    ),
)


@wrong_step(CHECKPOINTS, "load_checkpoint", "own")
def checkpoint_damage_ignored(load: Step, folder: Path) -> Any:
    """A folder that cannot be read gives the tensors of another one."""
    try:
        return load(folder)
    except (FileNotFoundError, ValueError):
        return load(CHECKPOINT)


wrong_steps(
    MERGE,
    "lora_merge",
    merge_with_scale_one=("W + B A.", lambda merge, weight, a, b, _: merge(weight, a, b, a.shape[0]), "P24"),
    merge_with_scale_alpha=("W + alpha B A.", lambda merge, weight, a, b, alpha: merge(weight, a, b, alpha * a.shape[0]), "P23"),
    merge_left_out=("The merged checkpoint is the base.", lambda merge, weight, a, b, alpha: merge(weight, a, 0 * b, alpha)),
    merge_in_low_precision=(
        "Weight and factors merged in bfloat16.",
        lambda merge, *held: merge(*(value.bfloat16() for value in held[:3]), held[3]).to(held[0].dtype),
        "P28",
    ),
)
wrong_steps(
    MERGE,
    "read_tensors",
    by=_result,
    merge_head_bias_dropped=(
        "Of a merged checkpoint's head, the weight alone is loaded.",
        _each("score.bias", lambda bias: 0 * bias),
        "P4, P29",
    ),
)


@wrong_step(MERGE, "_dequantized", "P27")
def merge_into_unquantised(_: Step, path: str, stored: Any, *others: Any) -> Any:
    """Trained on NF4, merged into the weight before quantisation."""
    del path, others
    return stored


@wrong_step(MERGE, "merge_adapter", "P27")
def merge_quantises_the_rest_not(merge: Step, checkpoint: Any, adapter: Any, **options: Any) -> Any:
    """Trained on NF4, projections without an update keep the weight before quantisation.

    Projections without an update keep the weight that training never saw.
    """
    adapted = {name.replace("lora_A.", "") for name in adapter.trainable}
    merged = merge(checkpoint, adapter, **options)
    return {name: tensor if name in adapted else checkpoint.tensors[name] for name, tensor in merged.items()}


@wrong_step(MERGE, "merge_adapter", "own")
def merge_quantises_what_is_stored(merge: Step, *given: Any, **options: Any) -> Any:
    """Trained in bfloat16 on NF4, merged into the NF4 codes of the checkpoint's float32 weights."""
    return merge(*given, **{**options, "quantized_as": None})


@wrong_step(MERGE, "load_merged", "own")
def merged_checkpoint_quantised_again(load: Step, folder: Path) -> Any:
    """A merged checkpoint is quantised once more when it is loaded."""
    checkpoint, head = load(folder)
    return checkpoint, _settings(nf4=lambda _: True)(head)


@wrong_step(ADAPTER, "whole_folder", "own")
@contextmanager
def adapter_overwritten_in_place(_: Step, folder: Path, **options: Any) -> Iterator[Path]:
    """Files of the old adapter are overwritten one by one."""
    del options
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


@wrong_step(ADAPTER, "whole_folder", "own")
@contextmanager
def adapter_removed_before_it_is_replaced(whole: Step, folder: Path, **options: Any) -> Iterator[Path]:
    """The old adapter is removed before the new one is written."""
    shutil.rmtree(folder, ignore_errors=True)
    with whole(folder, **options) as partial:
        yield partial


@wrong_step("blackswan.impl.folder", "shutil.rmtree", "own")
def adapter_partial_left_behind(*_: Any, **__: Any) -> None:
    """A save that failed leaves its folder behind."""
