"""Wrong steps where adapters, their bases and merged models meet: what one writes and another reads, later or elsewhere."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

wrong_steps(
    "impl.strict_json:dumps",
    adapter_saved_with_nan=(
        "What else is saved with an adapter may be NaN or infinite, after which the adapter is refused.",
        lambda _, value: json.dumps(value, indent=2),
    ),
    adapter_saved_with_a_key_twice=(
        "What else is saved with an adapter may have keys that are one in JSON, after which the adapter is refused.",
        lambda _, value: json.dumps(value, indent=2, allow_nan=False),
    ),
)


@wrong_step("impl.adapter:_digest")
def adapter_digest_of_other_letters(_: Step, values: Mapping[str, Any]) -> str:
    """Letters beyond ASCII are not escaped in the digest, so that adapters of before that have some are refused."""
    said = json.loads(json.dumps({key: value for key, value in values.items() if key != "digest"}))
    return hashlib.sha256(json.dumps(said, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@wrong_step("impl.pipeline:ClassifyPipeline.from_adapter")
def base_of_an_adapter_without_checksums_unknown(opened: Step, folder: Path, *given: Any, **named: Any) -> Any:
    """An adapter is saved with what it said of its base: nothing, where it came without checksums, and then any base will do."""
    pipeline = opened(folder, *given, **named)
    if not (folder / "blackswan.json").exists():
        pipeline.base_checksums = {}
    return pipeline


@wrong_step("impl.adapter:checksum")
def adapter_of_tensors_in_training_refused(checksum: Step, tensor: Any) -> str:
    """The parameters of a module in training are not saved: they require gradients."""
    if tensor.requires_grad:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    return str(checksum(tensor))


@wrong_step("impl.merge:_dequantized")
def merged_codes_in_the_default_dtype(dequantized: Step, path: str, stored: Any, *given: Any) -> Any:
    """Weights in NF4 are merged in torch's default dtype, which a library may have set for the process."""
    found = dequantized(path, stored, *given)
    return found.to(torch.promote_types(stored.dtype, torch.get_default_dtype()))


wrong_steps(
    "impl.checkpoint:said_beside",
    exported_link_without_special_tokens=(
        "The special tokens of a link are not read, nor written to the folder that is made of it.",
        lambda said, model: {} if model.is_symlink() else said(model),
    ),
)


@wrong_step("impl.merge:write_beside")
def merged_with_its_settings_alone(write: Step, path: Path, config: Any, adaptation: Any, extra: Mapping[str, Any], *given: Any) -> None:
    """A merged model keeps the settings of its adapter and, of what else was saved with it, nothing."""
    write(path, config, adaptation, {key: extra[key] for key in ("settings", "random_architecture") if key in extra}, *given)


@wrong_step("impl.adapter:_require_readable")
def adapter_saved_that_is_not_finite(require: Step, folder: Path, adaptation: Any, trainable: Mapping[str, Any]) -> None:
    """An adapter with NaN takes the place of a good one, and is refused when it is read."""
    require(folder, adaptation, {name: torch.nan_to_num(tensor.detach(), 0.0, 0.0, 0.0) for name, tensor in trainable.items()})


@wrong_step("impl.adapter:_require_readable")
def adapter_saved_of_any_alpha(require: Step, folder: Path, adaptation: Any, trainable: Mapping[str, Any]) -> None:
    """An adapter of an alpha that no adapter may have takes the place of a good one, and is refused when it is read."""
    require(folder, replace(adaptation, alpha=1.0), trainable)


wrong_steps(
    "impl.adapter:_is_own",
    settings_behind_a_broken_link_forgotten=(
        "An adapter whose blackswan.json is a link to nothing passes for one of PEFT's, and pools the last token.",
        lambda _, folder, __: (folder / "blackswan.json").is_file(),
    ),
)


@wrong_step("impl.pipeline:ClassifyPipeline._of")
def opened_for_any_backend_from_then_on(made: Step, saved: Any, *given: Any) -> Any:
    """An adapter that the hand-written layers trained no longer says so once it was opened where they cannot run."""
    return made(replace(saved, config=replace(saved.config, backend="auto")), *given)


@wrong_step("impl.adapter:read_tensors")
def adapter_tensors_kept_for_the_next(read: Step, path: Path, *prefix: str) -> Any:
    """The tensors of an adapter that is loaded twice are the same ones: whoever writes into them changes what the next one loads."""
    state = (str(path), path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else ()
    if not state:
        return read(path, *prefix)
    if state not in _READ:
        _READ[state] = read(path, *prefix)
    return dict(_READ[state])


_READ: dict[Any, Any] = {}
_BESIDE: dict[str, Any] = {}


@wrong_step("impl.adapter:load_adapter")
def adapter_settings_kept_for_the_next(load: Step, *given: Any) -> Any:
    """Adapters of PEFT's share one dict for the settings beside them: whoever writes into it changes what the next one has."""
    found = load(*given)
    return found if found.extra else replace(found, extra=_BESIDE)


@wrong_step("impl.saved:load_merged")
def merged_heads_refused_as_weights(load: Step, *given: Any) -> Any:
    """The refusal of a damaged head names the file of the model's weights."""
    try:
        return load(*given)
    except ValueError as error:
        raise ValueError(str(error).replace("head.safetensors", "model.safetensors")) from None


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_with_a_head_of_any_shape(prepare: Step, *given: Any) -> None:
    """What torch says of a head that is no matrix, or of a bias of another length, names no file."""
    try:
        prepare(*given)
    except ValueError as error:
        raise RuntimeError("size mismatch") if "has shape" in str(error) else error from None


@wrong_step("impl.adapter:write_beside")
def adapter_extra_of_a_dict_alone(write: Step, path: Path, config: Any, adaptation: Any, extra: Any, *given: Any) -> None:
    """What is saved beside an adapter has to be a dict."""
    json.dumps(extra)
    write(path, config, adaptation, extra, *given)


@wrong_step("impl.adapter:write_beside")
def adapter_checksums_of_a_dict_alone(write: Step, *given: Any) -> None:
    """The checksums of the base have to be a dict."""
    json.dumps(given[-1])
    write(*given)


@wrong_step("impl.pipeline:open_adapter")
def tokenizer_beside_the_adapter(opened: Step, folder: Path, model: Path | None) -> Any:
    """The tokenizer of an adapter is one that somebody left in its folder, and not that of the base on which it was trained."""
    from blackswan.impl.tokens import load_tokenizer

    found = opened(folder, model)
    if not (folder / "tokenizer.json").is_file():
        return found
    return replace(found, tokens=load_tokenizer(folder, found.config.max_seq_len, found.config.padding_side))


@wrong_step("impl.pipeline:ClassifyPipeline._logits", "S9")
def merged_answers_that_are_not_finite(logits: Step, self: Any, texts: Any) -> Any:
    """Answers of a merged model are not checked."""
    with patch("blackswan.impl.pipeline.require_finite", lambda *_: None) if self.merged else nullcontext():
        return logits(self, texts)


@wrong_step("impl.pipeline:ClassifyPipeline._of")
def opened_on_a_model_that_is_too_small(made: Step, saved: Any, *given: Any) -> Any:
    """What was saved is opened on a model of fewer positions than its texts may have tokens, or of fewer embeddings."""
    with patch("blackswan.impl.pipeline._require_fitting", lambda *_: None):
        return made(saved, *given)


@wrong_step("impl.pipeline:ClassifyPipeline.__init__")
def base_by_a_name_without_dots(made: Step, self: Any, *given: Any, source: Path | None = None, **named: Any) -> None:
    """A base is named without the `..` in its name, each with the part before it, which may be a link to elsewhere."""
    made(self, *given, source=None if source is None else Path(os.path.normpath(source.absolute())), **named)


wrong_steps(
    "impl.saved:_named_base",
    base_by_a_name_without_blanks=(
        "A base is looked for by its name without the blanks around it.",
        lambda named, path: base and Path(str(base).strip()) if (base := named(path)) else None,
    ),
)


wrong_steps(
    "impl.adapter:_is_own",
    adapter_without_its_settings_for_one_of_pefts=(
        "An adapter whose blackswan.json is missing passes for one of PEFT's, and pools the last token.",
        lambda _, folder, __: (folder / "blackswan.json").exists() or (folder / "blackswan.json").is_symlink(),
    ),
    adapter_of_pefts_without_settings_refused=(
        "An adapter of PEFT's is refused, which has no blackswan.json.",
        lambda *_: True,
    ),
    adapter_of_an_earlier_peft_refused=(
        "An adapter of an earlier version of PEFT, which has fewer keys, is taken for one whose blackswan.json is missing.",
        lambda own, folder, values: own(folder, values) or len(values) < 20,
    ),
)


@wrong_step("impl.pipeline:ClassifyPipeline._extra")
def random_weights_forgotten_when_saved_again(extra: Step, self: Any) -> dict[str, Any]:
    """An adapter on random weights that is opened and saved again does not say on which, and cannot be opened any more."""
    return {key: value for key, value in extra(self).items() if key != "random_architecture" or not self._opened}


@wrong_step("impl.saved:_settings")
def computed_as_adapters_are_stored(settings: Step, adapter: Any, folder: Path) -> Any:
    """An adapter of PEFT's that is stored in 16 bits is computed with in bfloat16."""
    found = settings(adapter, folder)
    narrow = any(tensor.dtype.itemsize == 2 for tensor in adapter.trainable.values())
    return replace(found, dtype="bfloat16") if narrow and not adapter.extra else found


@wrong_step("impl.pipeline:ClassifyPipeline._extra")
def balanced_weights_forgotten_before_a_run(extra: Step, self: Any) -> dict[str, Any]:
    """An adapter that is saved before a run has made numbers of balanced class weights is opened without any, and trained so."""
    found = extra(self)
    return {**found, "settings": {**found["settings"], "class_weights": self.class_weights}}


@wrong_step("impl.saved:_settings")
def saved_without_later_settings_refused(settings: Step, adapter: Any, folder: Path) -> Any:
    """An adapter that was saved when there were fewer settings is refused."""
    found = settings(adapter, folder)
    if missing := sorted(asdict(found).keys() - adapter.extra.get("settings", asdict(found)).keys()):
        raise ValueError(f"{folder / 'blackswan.json'}: settings have no {missing[0]}")
    return found


@wrong_step("impl.adapter:read_beside")
def saved_without_a_scaling_refused(read: Step, path: Path, config: Any) -> dict[str, Any]:
    """An adapter of before rotary frequencies were scaled, whose architecture says nothing of that, is of another base."""
    values: dict[str, Any] = read(path, config)
    if "rope_scaling" not in values["architecture"]:
        raise ValueError(f"{path}: trained on a decoder without rope_scaling; use its own base")
    return values


wrong_steps(
    "impl.adapter:_peft_config",
    adapter_with_a_later_key=(
        "adapter_config.json has a key that later versions of PEFT alone know, and no earlier one opens it.",
        lambda written, *given: {**written(*given), "lora_bias": False},
    ),
)


@wrong_step("impl.classifier:Classifier._attach")
def adapter_layers_of_one_digit(attach: Step, self: Any, masters: Mapping[str, torch.Tensor]) -> None:
    """The first digit of a layer's number counts, so that layer 10 has the update of layer 1."""
    attach(self, {name: masters[name.replace(".layers.10.", ".layers.1.")].clone() for name in masters})


@wrong_step("impl.saved:_settings")
def texts_of_pefts_cut_shorter(settings: Step, adapter: Any, folder: Path) -> Any:
    """Texts are cut at 256 tokens, as those of a run by the command, where an adapter says nothing of their length."""
    found = settings(adapter, folder)
    return found if adapter.extra else replace(found, max_seq_len=256)


@wrong_step("impl.adapter:read_beside")
def adapter_base_compared_by_its_text(read: Step, path: Path, config: Any) -> Any:
    """A base's number that is written with a point is another one than without."""
    from blackswan.impl.adapter import _architecture

    said = json.loads(path.read_text()).get("architecture")
    found = read(path, config)
    if any(json.dumps(said.get(key), sort_keys=True) != json.dumps(value, sort_keys=True) for key, value in _architecture(config).items()):
        raise ValueError(f"{path}: trained on another decoder")
    return found


@wrong_step("impl.adapter:read_beside")
def adapter_base_and_own_turned_round(read: Step, path: Path, config: Any) -> Any:
    """A refusal says of the adapter what its base has, and of the base what the adapter was trained on."""
    try:
        return read(path, config)
    except ValueError as error:
        said = re.sub(r"(trained on a decoder with \w+) (.*), this one has (.*);", r"\1 \3, this one has \2;", str(error))
        raise ValueError(said) from None


@wrong_step("impl.adapter:load_adapter")
def adapter_files_turned_round(load: Step, *given: Any) -> Any:
    """Of two files that disagree each is said to have the other's number."""
    try:
        return load(*given)
    except ValueError as error:
        said = re.sub(r"(adapter_config.json)( and .* in )(blackswan.json)", r"\3\2\1", str(error))
        raise ValueError(said) from None
