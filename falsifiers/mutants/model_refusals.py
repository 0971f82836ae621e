"""Readers of checkpoints, adapters and merged models that refuse too little."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

# Checkpoints


@wrong_step("impl.architecture:_Reading._count")
def config_counts_rounded(count: Any, reading: Any, key: str) -> int:
    """16.0 is a count too."""
    value = reading.values.get(key)
    return int(value) if isinstance(value, float) and value.is_integer() else count(reading, key)


@wrong_step("impl.architecture:_Reading.decoder")
def config_window_of_every_layer_passed_over(decoder: Any, reading: Any) -> Any:
    """Windows are passed over where all layers have one."""
    if reading.values.get("max_window_layers") == 0:
        reading.values = {**reading.values, "use_sliding_window": False}
    return decoder(reading)


wrong_step("impl.architecture:_same", name="config_of_another_function", doc="Keys with which the model would be another are passed over.")(
    lambda *_: True
)
wrong_step(
    "impl.architecture:_Reading._require_full_attention", name="config_types_of_layers_passed_over", doc="Every layer attends fully."
)(lambda *_: None)
wrong_step("impl.config:RopeScaling.__post_init__", name="config_scaling_of_any_numbers", doc="The four numbers of llama3 may be any.")(
    lambda *_: None
)


@wrong_step("impl.architecture:_rope_type")
def config_rope_type_of_a_set(rope_type: Any, found: Any) -> Any:
    """The type of rotary parameters is looked for in a set, by which a list or an object ends in a TypeError."""
    return next(kind for kind in {rope_type(found)})


@wrong_step("impl.checkpoint:_header")
def headers_read_with_their_files(header: Any, path: Path) -> Any:
    """The whole file is read for its header."""
    path.read_bytes()
    return header(path)


@wrong_step("impl.checkpoint:_header")
def headers_with_a_tensor_twice(header: Any, path: Path) -> Any:
    """A tensor that a file's header has twice is the last of them."""
    with patch("blackswan.impl.strict_json.loads", json.loads):
        return header(path)


wrong_step("impl.checkpoint:_first_of", name="shards_said_to_hold_any", doc="A shard that is not there is said to hold another's tensor.")(
    lambda _, weight_map, *__: min(weight_map)
)


@wrong_step("impl.architecture:_Reading._require_full_attention")
def config_of_no_types_of_layers(require: Any, reading: Any, family: str) -> None:
    """A list of the layers' types may be empty."""
    if reading.values.get("layer_types") != []:
        require(reading, family)


wrong_steps(
    "impl.architecture:FIXED",
    config_null_bias_refused=("A null in the place of mlp_bias is refused.", lambda fixed: {**fixed, "mlp_bias": (False,)}),
    config_causal_refused=("A model that says that it is causal is refused.", lambda fixed: {**fixed, "is_causal": (None,)}),
    config_shared_keys_passed_over=(
        "Layers may say that they share keys and values.",
        lambda fixed: {key: allowed for key, allowed in fixed.items() if key != "kv_sharing_modes"},
    ),
)


@wrong_step("impl.architecture:_Reading._head_dim")
def config_null_head_dim_of_any_family(head_dim: Any, reading: Any, family: str) -> int:
    """A head_dim that is null counts as absent in every family."""
    reading.values = {key: value for key, value in reading.values.items() if key != "head_dim" or value is not None}
    return int(head_dim(reading, family))


@wrong_step("impl.architecture:_Reading._theta")
def config_theta_of_one_place(theta: Any, reading: Any) -> float:
    """The inner one of two bases of the rotary angles counts."""
    reading.values = {key: value for key, value in reading.values.items() if key != "rope_theta" or "rope_parameters" not in reading.values}
    return float(theta(reading))


@wrong_step("impl.checkpoint:_require_stored")
def shard_of_a_shape_unnamed(_: Any, expected: Any, stored: Any, folder: Path) -> None:
    """A tensor of another shape is reported without the file that holds it."""
    from blackswan.impl.decoder import require_shapes

    require_shapes(expected, {name: entry.shape for name, entry in stored.items()}, str(folder))


@wrong_step("impl.checkpoint:_require_stored")
def tied_copy_in_a_wider_dtype_refused(required: Any, expected: Any, stored: Any, folder: Path) -> None:
    """The copy of a tied embedding has to be stored in the embedding's dtype."""
    copy = stored.get("lm_head.weight")
    if copy is not None and stored["model.embed_tokens.weight"].dtype != copy.dtype:
        raise ValueError(f"{folder}: lm_head.weight is {copy.dtype}")
    required(expected, stored, folder)


@wrong_step("impl.checkpoint:load_checkpoint")
def folder_tensors_listed_first(load: Any, folder: Path) -> Any:
    """The tensors of a folder's architecture are listed before its number of layers is looked at."""
    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.decoder import parameter_shapes

    if folder.is_dir():
        parameter_shapes(read_config(folder))
    return load(folder)


@wrong_step("impl.checkpoint:_sharded")
def shards_without_their_index(sharded: Any, index: Path) -> Any:
    """The tensors of whatever shards there are."""
    from blackswan.impl import checkpoint

    del sharded
    return {name: found for shard in sorted(index.parent.glob("model-*")) for name, found in checkpoint._header(shard).items()}


wrong_step(
    "impl.tokens:_require_alike", name="tokenizer_settings_passed_over", doc="tokenizer_config.json names tokens that there are not."
)(lambda *_: None)


@wrong_step("impl.tokens:_require_alike")
def tokenizer_tokens_of_any_type(require: Any, path: Path, named: Any, added: Any) -> None:
    """Further special tokens that are a number or a text are passed over."""
    extra = named.get("extra_special_tokens")
    require(path, named if isinstance(extra, dict | list) else {**named, "extra_special_tokens": None}, added)


@wrong_step("impl.tokens:_require_alike")
def tokenizer_tokens_of_its_vocabulary_passed_over(require: Any, path: Path, named: Any, added: Any) -> None:
    """A special token may be any of the vocabulary, though transformers splits texts at it."""
    words = json.loads(path.with_name("tokenizer.json").read_text())["model"].get("vocab", {})
    require(path, named, {**dict.fromkeys(words, next(iter(added.values()), None)), **added})


@wrong_step("impl.checkpoint:_require_stored")
def tensors_missing_from_a_shard(require: Any, expected: Any, stored: Any, folder: Path) -> None:
    """A tensor that no file has is said to be missing from the shard of one of another shape."""
    wrong = [name for name, shape in expected.items() if name in stored and stored[name].shape != shape]
    require(expected, stored, stored[wrong[0]].file if wrong else folder)


def _without_flags(named: Any, added: Any, passed_over: Callable[[Any, str], bool]) -> dict[str, Any]:
    """The settings of a tokenizer whose flags are those of tokenizer.json where they are passed over."""
    decoder = named.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return dict(named)
    said = {}
    for key, token in decoder.items():
        own = added.get(token["content"])
        flags = [name for name in ("lstrip", "rstrip", "single_word", "normalized") if own is not None and passed_over(token, name)]
        said[key] = {**token, **{name: getattr(own, name) for name in flags}}
    return {**named, "added_tokens_decoder": said}


@wrong_step("impl.tokens:_require_alike")
def tokenizer_flags_that_are_false_passed_over(right: Any, path: Path, named: Any, added: Any) -> None:
    """A flag that is false in tokenizer_config.json is not compared: transformers splits texts otherwise at the token."""
    right(path, _without_flags(named, added, lambda token, name: not token.get(name, True)), added)


@wrong_step("impl.tokens:_require_alike")
def tokenizer_flags_left_out_passed_over(right: Any, path: Path, named: Any, added: Any) -> None:
    """A flag that tokenizer_config.json leaves out is not compared, though it is false to transformers."""
    right(path, _without_flags(named, added, lambda token, name: name not in token), added)


@wrong_step("impl.tokens:_require_alike")
def tokenizer_flags_of_what_is_named_once(right: Any, path: Path, named: Any, added: Any) -> None:
    """The flags of a token are not compared where a list names it too."""
    lists = [named.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    listed = [token for each in lists if isinstance(each, list) for token in each]
    right(path, _without_flags(named, added, lambda token, _: token["content"] in listed), added)


wrong_step("impl.tokens:_require_no_prefix", name="tokenizer_prefix_passed_over", doc="A space that transformers adds is not looked for.")(
    lambda *_: None
)
wrong_step("impl.tokens:QWEN2", name="tokenizer_prefix_of_any_class", doc="add_prefix_space is refused of every class of transformers.")(
    lambda _: ""
)
wrong_steps(
    "impl.tokens:_is_qwens",
    tokenizer_prefix_by_its_class_alone=(
        "add_prefix_space is refused where no class of transformers is named, of every family, and taken where another is, of Qwen2 too.",
        lambda _, settings, *__: str(settings.get("tokenizer_class") or "Qwen2Tokenizer").startswith("Qwen2Tokenizer"),
    ),
    tokenizer_prefix_of_qwen2_by_its_class=(
        "add_prefix_space of Qwen2 is taken where a class is named that transformers does not take.",
        lambda right, settings, family: right(settings, "qwen3" if family == "qwen2" else family),
    ),
)


@wrong_step("impl.tokens:_require_alike")
def tokenizer_flags_of_every_name(right: Any, path: Path, named: Any, added: Any) -> None:
    """The flags of a token that a key names are compared as well: transformers takes those of tokenizer.json."""
    objects = {key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, dict)}
    right(path, {**named, "added_tokens_decoder": {**(named.get("added_tokens_decoder") or {}), **objects}}, added)


@wrong_step("impl.tokens:_require_alike")
def tokenizer_lists_of_objects_passed_over(right: Any, path: Path, named: Any, added: Any) -> None:
    """Further special tokens that a list gives as objects are passed over."""
    key = "additional_special_tokens"
    right(path, {**named, key: [each for each in named.get(key) or () if isinstance(each, str)]}, added)


@wrong_step("impl.tokens:_require_alike")
def tokenizer_names_of_four_keys(right: Any, path: Path, named: Any, added: Any) -> None:
    """The tokens of classifiers and of masks that tokenizer_config.json names are passed over."""
    right(path, {key: value for key, value in named.items() if key not in ("sep_token", "cls_token", "mask_token")}, added)


wrong_step("impl.pipeline:_require_fitting", name="more_positions_than_the_model_has", doc="Texts are longer than the model's positions.")(
    lambda *_: None
)
wrong_steps(
    "impl.strict_json:_unique",
    json_keys_twice=("The last value counts of a key that is given twice.", lambda _, pairs: dict(pairs)),
)
wrong_step("impl.strict_json:_refuse", name="json_with_nan", doc="NaN is a number of JSON.")(lambda _, constant: float(constant))

# Adapters and merged models

wrong_step("impl.adapter:_digest", name="saved_settings_edited", doc="Nothing says that blackswan.json was edited.")(lambda *_: "0")
wrong_step("impl.adapter:_OPTIONAL", name="saved_keys_unknown", doc="blackswan.json may say more than is read.")(
    lambda keys: keys | {"surplus": int}
)
wrong_step("impl.adapter:_IRRELEVANT", name="adapter_keys_passed_over", doc="Keys of later versions of PEFT are passed over.")(
    lambda keys: (*keys, "use_something_new")
)


@wrong_step("impl.saved:_settings")
def saved_settings_made_up(settings: Any, adapter: Any, folder: Path) -> Any:
    """Settings beside an adapter that cannot be read are the defaults."""
    try:
        return settings(adapter, folder)
    except ValueError:
        return settings(replace(adapter, extra={}), folder)


@wrong_step("impl.saved:_settings")
def saved_settings_that_are_empty(settings: Any, adapter: Any, folder: Path) -> Any:
    """Settings that are null, or empty and of any type, count as none: the defaults are taken without a word."""
    return settings(adapter if adapter.extra.get("settings") else replace(adapter, extra={}), folder)


@wrong_step("impl.saved:_named_base")
def adapter_base_of_any_type(named: Any, path: Path) -> Path | None:
    """An adapter's base is taken as text, whatever it is."""
    from blackswan.impl.adapter import read_object

    del named
    value = read_object(path).get("base_model_name_or_path")
    return Path(str(value)) if value else None
