"""Wrong adapters, checkpoints and saves: one step of `impl` replaced while the subject runs."""

import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import torch
from safetensors import safe_open

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Tensors = Mapping[str, Any]
Step = Callable[..., Any]


def _in_one_dtype(tensors: Tensors, name: str) -> Tensors:
    """All tensors in the dtype of the one of that name, where it is there."""
    return {key: value.to(tensors[name].dtype) for key, value in tensors.items()} if name in tensors else tensors


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
    "impl.adapter:save_file",
    by=_saved,
    adapter_head_not_saved=("The file has LoRA factors only.", _without("score."), "P29"),
    adapter_head_bias_dropped=("The head's weight is saved, and its bias is not.", _without("score.bias"), "P4, P29"),
    adapter_factors_swapped=("A saved under the name of B and B under that of A.", _renamed("lora_A", "lora_B")),
    adapter_rounded_to_bfloat16=("Float32 masters saved rounded to bfloat16.", _each("", lambda tensor: tensor.bfloat16().float())),
)
wrong_steps(
    "impl.adapter:load_adapter",
    by=of_result,
    adapter_head_not_restored=(
        "The loaded head is another one, here with its rows moved by one.",
        _tensors("score.weight", lambda tensor: tensor.roll(1, 0)),
        "P29",
    ),
    adapter_head_bias_not_restored=(
        "The head's weight is loaded, and its bias is not.",
        _tensors("score.bias", lambda bias: 0 * bias),
        "P4, P29",
    ),
    adapter_scaled_by_alpha=(
        "A loaded adapter acts with alpha instead of alpha/r.",
        _settings(alpha=lambda settings: settings.alpha * settings.rank),
        "P23",
    ),
    adapter_alpha_taken_as_twice_the_rank=(
        "Alpha by the rule of thumb, not from the file.",
        _settings(alpha=lambda settings: 2.0 * settings.rank),
    ),
    adapter_pooling_forgotten=("A loaded classifier pools the mean whatever it was trained with.", _settings(pooling=lambda _: "mean")),
    adapter_nf4_forgotten=(
        "Trained on NF4 weights, loaded on plain ones.",
        _settings(nf4=lambda _: False, double_quantize=lambda _: False),
        "S27",
    ),
    adapter_double_quantize_forgotten=(
        "Trained on doubly quantised weights, loaded on NF4 with float32 scales.",
        _settings(double_quantize=lambda _: False),
    ),
)
wrong_steps(
    "impl.adapter:read_tensors",
    by=of_result,
    adapter_widened_when_loaded=("A bfloat16 adapter arrives in float32.", _each("", lambda tensor: tensor.float())),
)
wrong_steps(
    "impl.adapter:read_tensors",
    by=of_result,
    adapter_in_the_dtype_of_its_head=(
        "All tensors of an adapter arrive in the dtype of its head.",
        lambda found: _in_one_dtype(found, "score.weight"),
    ),
)
wrong_step(
    "impl.adapter:save_file", name="adapter_saved_in_one_dtype", doc="All tensors of an adapter are saved in the dtype of the first one."
)(lambda save, tensors, *given, **named: save(_in_one_dtype(tensors, next(iter(tensors))), *given, **named))
wrong_step(
    "impl.adapter:_IRRELEVANT",
    name="adapter_of_copied_layers_accepted",
    doc="Keys of PEFT's by which layers are copied, or updates act on some tokens alone, are passed over.",
)(lambda keys: (*keys, "layer_replication", "trainable_token_indices", "alora_invocation_tokens"))
wrong_steps("impl.adapter:PREFIX", adapter_prefix_left_out=("Names without base_model.model., which PEFT skips in silence.", lambda _: ""))


@wrong_step("impl.adapter:_PeftConfig.refuse_unsupported")
def adapter_variants_ignored(*_: Any) -> None:
    """DoRA, rsLoRA and ranks by module are taken for plain LoRA."""


@wrong_step("impl.adapter:_PeftConfig.refuse_unsupported")
def adapter_alpha_of_a_layer_for_all(refuse: Step, self: Any) -> None:
    """One alpha that is given to modules by their paths is read as that of all layers."""
    pattern = self.values.get("alpha_pattern") or {}
    if len({*pattern.values()}) == 1 and all("." in name for name in pattern):
        object.__setattr__(self, "values", {**self.values, "alpha_pattern": {}, "lora_alpha": next(iter(pattern.values()))})
    refuse(self)


@wrong_step("impl.adapter:_PeftConfig.refuse_unsupported")
def adapter_saved_modules_of_a_set(refuse: Step, self: Any) -> None:
    """What is saved beside the factors is made a set, which ends in a TypeError where an object is among it."""
    set(self.values.get("modules_to_save") or ())
    refuse(self)


@wrong_step("impl.adapter:_PeftConfig.refuse_unsupported")
def adapter_saved_modules_named_twice_refused(refuse: Step, self: Any) -> None:
    """An adapter is refused of which PEFT names the head twice, because its user has named it too."""
    refuse(self)
    if len(saved := self.values["modules_to_save"]) != len(set(saved)):
        raise self._error("modules_to_save", "['score']")


@wrong_step("impl.adapter:_PeftConfig.alpha")
def adapter_alpha_converted_first(alpha: Step, self: Any) -> Any:
    """A whole number for alpha is converted before its bound is looked at, which ends in an OverflowError."""
    if isinstance(value := self.values.get("lora_alpha"), int):
        float(value)
    return alpha(self)


@wrong_step("impl.adapter:_architecture", "S28")
def adapter_of_another_base_accepted(*_: Any) -> dict[str, Any]:
    """An adapter goes onto any base whose shapes fit."""
    return {}


wrong_step("impl.adapter:require", name="adapter_edits_accepted", doc="An adapter's tensors may be others than those that were saved.")(
    lambda *_: None
)


@wrong_step("impl.adapter:save_adapter", "S14")
def adapter_b_premultiplied(save: Step, folder: Path, config: Any, adaptation: Any, trainable: Tensors, **options: Any) -> None:
    """B saved times alpha/r."""
    scaled = _each("lora_B", lambda tensor: tensor * (adaptation.alpha / adaptation.rank))(trainable)
    save(folder, config, adaptation, scaled, **options)


@wrong_step("impl.adapter:_peft_config", "P23")
def adapter_alpha_not_written(config: Step, *given: Any) -> dict[str, Any]:
    """lora_alpha is PEFT's default, 8, whatever was trained."""
    return {**config(*given), "lora_alpha": 8}


@wrong_step("impl.adapter:load_adapter", "P29")
def adapter_missing_tensors_made_up(load: Step, *given: Any) -> Any:
    """Tensors that are not in the file stay at zero without a word."""
    import torch

    def lenient(expected: Mapping[str, tuple[int, ...]], tensors: Any, _: str) -> None:
        for name, shape in expected.items():
            tensors.setdefault(name, torch.zeros(shape))

    with patch("blackswan.impl.adapter.require_named", lenient):  # as `load_state_dict(strict=False)` on a fresh model
        return load(*given)


wrong_steps(
    "impl.checkpoint:save_file",
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
    "impl.checkpoint:StoredTensors.__getitem__",
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


@wrong_step("impl.checkpoint:load_checkpoint")
def checkpoint_near_copy_dropped(load: Step, folder: Path) -> Any:
    """An output layer that is next to the embedding passes for a copy of it."""
    import torch

    with mock.patch("torch.equal", torch.allclose):
        return load(folder)


@wrong_step("impl.checkpoint:load_checkpoint")
def checkpoint_copy_of_whole_blocks_dropped(load: Step, folder: Path) -> Any:
    """An output layer passes for a copy of the embedding where whole blocks of 512 rows are equal."""
    import torch

    equal = torch.equal
    with mock.patch("torch.equal", lambda one, other: equal(one[: len(one) // 512 * 512], other[: len(one) // 512 * 512])):
        return load(folder)


@wrong_step("impl.checkpoint:load_checkpoint")
def checkpoint_narrow_copy_dropped(load: Step, folder: Path) -> Any:
    """An output layer passes for a copy of the embedding where that is equal once it is rounded to its dtype."""
    import torch

    equal = torch.equal
    with mock.patch("torch.equal", lambda one, other: equal(one, other.to(one.dtype))):
        return load(folder)


@wrong_step("impl.checkpoint:load_checkpoint")
def checkpoint_copy_in_float32_dropped(load: Step, folder: Path) -> Any:
    """An output layer passes for a copy of the embedding where both are equal in float32."""
    import torch

    equal = torch.equal
    with mock.patch("torch.equal", lambda one, other: equal(one.float(), other.float())):
        return load(folder)


@wrong_step("impl.checkpoint:load_checkpoint")
def checkpoint_damage_ignored(load: Step, folder: Path) -> Any:
    """A folder that cannot be read gives the tensors of another one."""
    try:
        return load(folder)
    except (FileNotFoundError, ValueError):
        return load(CHECKPOINT)


@wrong_step("impl.pipeline:spoiled_parameter")
def quantised_weights_not_looked_at(spoiled: Step, model: Any) -> Any:
    """Weights that are not finite are found where they are parameters, and not among the codes and scales of NF4."""
    found = spoiled(model)
    return None if found and ".quantized." in found else found


wrong_steps(
    "impl.architecture:_Reading._rope_scaling",
    config_scaling_ignored=("Scaled rotary frequencies of config.json are read as plain ones.", lambda _read, _self: None),
    config_original_positions_assumed=(
        "The number of original positions is Llama 3's, whatever config.json says.",
        lambda read, self: (found := read(self)) and replace(found, original_positions=8192),
    ),
)
wrong_step(
    "impl.architecture:_Reading._theta",
    name="config_theta_at_one_place",
    doc="The base of the rotary angles is read as transformers 4 has it.",
)(lambda _, self: float(self.values.get("rope_theta", 10_000.0)))
wrong_step(
    "impl.architecture:_Reading._head_dim",
    name="config_head_dim_by_kv_heads",
    doc="The hidden size is shared out to key heads where head_dim is not given.",
)(lambda read, self, family: read(self, family) if "head_dim" in self.values else self.values["hidden_size"] // self._kv_heads(family))
wrong_step(
    "impl.architecture:_rope",
    name="saved_scaling_for_one_version",
    doc="A saved config.json has scaled frequencies as transformers 5 reads them alone.",
)(lambda rope, config: {key: value for key, value in rope(config).items() if key != "rope_scaling"})


wrong_step(
    "impl.saved:random_tensors",
    name="random_base_of_another_seed",
    doc="An adapter on random weights is opened on those of the first seed.",
)(lambda tensors, architecture, _seed: tensors(architecture, 0))
wrong_step("impl.adapter:save_file", name="adapter_without_format", doc="The adapter's file does not say that it holds tensors of torch.")(
    lambda save, tensors, path, **_metadata: save(tensors, path)
)


@wrong_step("impl.adapter:require")
def checksums_of_small_tensors(require: Step, tensors: Any, expected: Any, what: str) -> None:
    """Checksums of an adapter's large tensors are not compared."""
    require({name: value for name, value in tensors.items() if value.numel() < 2**16}, expected, what)


@wrong_step("impl.adapter:read_tensors")
def adapter_changes_with_its_file(read: Step, path: Path, prefix: str = "") -> Any:
    """The tensors of an adapter are its mapped file, and change with it."""
    found = read(path, prefix)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(prefix + name) for name in found}


wrong_steps(
    "impl.adapter:_WHOLE",
    saved_over_a_checkpoint=("A checkpoint in whose folder an adapter lies is replaced with it.", lambda _: re.compile("no such file")),
    saved_over_other_weights=(
        "Weights of a model that are not in safetensors, or in parts without an index, are removed with the adapter beside them.",
        lambda _: re.compile(r"model\.safetensors(\.index\.json)?"),
    ),
)


@wrong_step("impl.adapter:whole_folder")
@contextmanager
def adapter_overwritten_in_place(_: Step, folder: Path, **_options: Any) -> Iterator[Path]:
    """Files of the old adapter are overwritten one by one."""
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


@wrong_step("impl.adapter:whole_folder")
@contextmanager
def adapter_removed_before_it_is_replaced(whole: Step, folder: Path, **options: Any) -> Iterator[Path]:
    """The old adapter is removed before the new one is written."""
    shutil.rmtree(folder, ignore_errors=True)
    with whole(folder, **options) as partial:
        yield partial


@wrong_step("impl.folder:_settle")
def adapter_of_one_user(settle: Any, partial: Any) -> None:
    """Files are their owner's alone, as some libraries write them."""
    settle(partial)
    for path in partial.iterdir():
        path.chmod(0o600)


@wrong_step("impl.adapter:_peft_config")
def adapter_targets_of_a_set(config: Any, *given: Any) -> Any:
    """The targets are written in an order of their own, as that of a set, so that equal adapters have unequal files."""
    found = config(*given)
    return found | {"target_modules": sorted(found["target_modules"], key=lambda name: zlib.crc32(name.encode()))}


@wrong_step("impl.adapter:_peft_config")
def adapter_alpha_of_four_digits(config: Any, *given: Any) -> Any:
    """Alpha is written with four digits after the point."""
    found = config(*given)
    return found | {"lora_alpha": round(found["lora_alpha"], 4)}


@wrong_step("impl.pipeline:open_adapter")
def adapter_names_its_first_base(opened: Any, folder: Path, model: Path | None) -> Any:
    """An adapter that was opened on its base by another name, to which it was moved, is saved with the name that it had before."""
    from blackswan.impl.adapter import ADAPTER_CONFIG
    from blackswan.impl.saved import _named_base

    return replace(opened(folder, model), source=_named_base(folder / ADAPTER_CONFIG) or model)


@wrong_step("impl.folder:_settle")
def adapter_folder_of_one_user(settle: Any, partial: Any) -> None:
    """The folder is its owner's alone, as temporary ones are."""
    settle(partial)
    partial.chmod(0o700)


@wrong_step("impl.folder:shutil.rmtree")
def adapter_partial_left_behind(*_: Any, **__: Any) -> None:
    """A save that failed leaves its folder behind."""


wrong_step(
    "impl.adapter:_NEUTRAL", name="adapter_of_another_start_accepted", doc="An adapter whose start was taken off its base is accepted."
)(lambda values: {**values, "init_lora_weights": (*values["init_lora_weights"], "olora")})


@wrong_step("impl.checkpoint:read_span")
def spans_by_one_call(_: Step, file: Any, start: int, length: int, *_state: Any) -> Any:
    """A part of a file is read by one call, which may give less."""
    content = torch.empty(length, dtype=torch.uint8)
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        if opened.readinto(content.numpy().data) != length:
            raise ValueError(f"{file}: changed")
    return content


_KINDS: dict[Path, bool] = {}


@wrong_step("impl.pipeline:is_merged")
def kinds_kept_by_their_path(merged: Step, folder: Path) -> bool:
    """A folder that held an adapter when it was first opened is taken for one for good."""
    return _KINDS.setdefault(folder, merged(folder))


@wrong_step("impl.pipeline:is_merged")
def adapter_among_files_of_its_base_is_merged(merged: Step, folder: Path) -> bool:
    """An adapter in whose folder its base lies too is taken for a merged model."""
    return (folder / "config.json").is_file() or bool(merged(folder))


wrong_step("impl.saved:Checked", name="changed_base_called_the_adapter", doc="A base that was changed is said to be the adapter's.")(
    lambda checked, tensors, expected, source, adapter: checked(tensors, expected, adapter, source)
)
