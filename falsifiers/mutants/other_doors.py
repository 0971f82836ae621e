"""Models by another way: through links, from .apr files, of transformers' classifiers and of PEFT; one step of `impl` replaced."""

import ctypes
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

# Names that are links

wrong_steps(
    "impl.checkpoint:_sharded",
    shards_beside_a_links_target=(
        "Shards are looked for where the index is a link to.",
        lambda sharded, index: sharded(index.resolve()),
    ),
)


@wrong_step("impl.checkpoint:_sharded")
def shards_of_their_first_dtype(sharded: Step, index: Path) -> Any:
    """A shard whose tensors are in several dtypes is refused, as one that has changed since its header was read."""
    first: dict[Path, Any] = {}
    return {name: replace(entry, dtype=first.setdefault(entry.file, entry.dtype)) for name, entry in sharded(index).items()}


@wrong_step("impl.checkpoint:_sharded")
def shards_of_any_name(sharded: Step, index: Path) -> Any:
    """Every file of weights in a folder is a shard, also one that the index does not name."""
    found = sharded(index)
    if {path.name for path in index.parent.glob("*.safetensors")} - {entry.file.name for entry in found.values()}:
        raise ValueError(f"{index}: it does not name every file of weights beside it")
    return found


@wrong_step("impl.strict_json:loads")
def json_from_its_first_character(loads: Step, text: str | bytes, **options: Any) -> Any:
    """Blanks and lines before a JSON text are refused."""
    if text[:1].isspace():
        raise ValueError("Expecting value: line 1 column 1 (char 0)")
    return loads(text, **options)


@wrong_step("impl.strict_json:loads")
def json_keys_twice_within(loads: Step, text: str | bytes, **options: Any) -> Any:
    """A key that is given twice is found in the outermost object of a JSON text alone."""
    found = loads(text, repeated=True)
    objects: list[list[tuple[str, Any]]] = []

    def seen(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        objects.append(pairs)
        return dict(pairs)

    json.loads(text, object_pairs_hook=seen)
    return loads(text, **options) if objects and len(dict(objects[-1])) < len(objects[-1]) else found


wrong_steps(
    "impl.tokens:belonging",
    apr_tokenizer_beside_a_links_target=(
        "The tokenizer of an .apr file is looked for where its link leads.",
        lambda belonging, model, name: belonging(model.resolve(), name),
    ),
    apr_padding_of_another_tokenizer=(
        "The tokenizer_config.json of a folder counts for an .apr file in it.",
        lambda belonging, model, name: model.parent / name if model.suffix == ".apr" and "config" in name else belonging(model, name),
    ),
)
wrong_steps(
    "impl.pipeline:save_adapter",
    base_by_its_links_target=(
        "An adapter names the file that its base's name is a link to.",
        lambda save, *given, base, **named: save(*given, base=base and base.resolve(), **named),
    ),
)

# Special tokens, classes and dtypes

wrong_steps(
    "impl.checkpoint:said_beside",
    exported_without_special_tokens=("An exported folder names no special token.", lambda *_: {}),
    exported_with_special_tokens_alone=(
        "An exported folder's config.json keeps, beside the architecture, the special tokens alone.",
        of_result(lambda said: {key: value for key, value in said.items() if key.endswith("_token_id")}),
    ),
)
wrong_steps(
    "impl.pretrain_run:CheckpointFn",
    pretrained_without_special_tokens=(
        "A checkpoint of pre-training names no special token.",
        lambda make, decoder, tokenizer, folder, _: make(decoder, tokenizer, folder),
    ),
)
wrong_steps(
    "impl.merge:said_beside",
    merged_without_a_files_special_tokens=(
        "A merged .apr file has no special tokens.",
        lambda said, source: {} if source.suffix == ".apr" else said(source),
    ),
)
wrong_steps(
    "impl.merge:belonging",
    merged_without_a_files_tokenizer=("The tokenizer of an .apr file is not copied.", lambda _, model, name: model / name),
)
wrong_steps(
    "impl.apr_write:special_tokens",
    apr_of_a_file_without_special_tokens=(
        "An .apr file that is made of another one names no special token.",
        lambda special, source: {} if source.suffix == ".apr" else special(source),
    ),
)
wrong_steps(
    "impl.checkpoint:to_huggingface",
    saved_as_a_model_without_a_head=(
        "config.json names the class without an output layer.",
        of_result(lambda said: {**said, "architectures": [said["architectures"][0].replace("ForCausalLM", "Model")]}),
    ),
)
wrong_steps(
    "impl.checkpoint:to_huggingface",
    saved_qwen3_as_qwen2=(
        "config.json of a Qwen3 names the class of a Qwen2.",
        of_result(lambda said: {**said, "architectures": [said["architectures"][0].replace("Qwen3", "Qwen2")]}),
    ),
)


@wrong_step("impl.merge:_config")
def merged_says_it_is_a_classifier(config: Step, architecture: Any, source: Path | None) -> dict[str, Any]:
    """A merged config.json has the class and the labels of a base that was a classifier of transformers'."""
    found: dict[str, Any] = config(architecture, source)
    base = {} if source is None or source.suffix == ".apr" else json.loads((source / "config.json").read_text())
    return found | {key: base[key] for key in ("architectures", "num_labels", "id2label", "label2id") if key in base}


wrong_steps("impl.checkpoint:HEAD", tied_copy_refused=("A tied embedding's copy is a tensor too many.", lambda _: "output.weight"))
wrong_steps("impl.apr_write:BF16", apr_bfloat16_written_as_float16=("Tensors in bfloat16 become float16.", lambda _: _float16()))


def _float16() -> Any:
    from blackswan.impl.apr_dtypes import F16

    return F16


wrong_steps(
    "impl.apr_dtypes:_steps",
    apr_subnormal_scales_are_zero=(
        "A block whose scale is subnormal in float16 is written as zeros.",
        lambda steps, values, scale, *ends: steps(values, scale * (scale >= 2.0**-14), *ends),
    ),
    apr_tiny_matrices_are_zero=(
        "Numbers are divided by a scale that is 10⁻¹² at least, and a matrix of smaller ones is written as zeros.",
        lambda steps, values, scale, *ends: steps(values, scale.clamp(min=1e-12), *ends),
    ),
)
wrong_steps(
    "impl.architecture:_rope_type",
    config_older_name_of_the_scaling_first=(
        "The older one of two names of the scaling counts.",
        lambda _, found: found.get("type", found.get("rope_type", "default")),
    ),
)


@wrong_step("impl.apr_write:encoded")
def apr_scale_in_the_tensors_dtype(encoded: Step, dtype: Any, tensor: Any) -> Any:
    """The scale of a matrix in AprQ8 is rounded to the dtype that the matrix had."""
    import torch

    content = encoded(dtype, tensor)
    if dtype.name == "AprQ8":
        content[:4] = content[:4].clone().view(torch.float32).to(tensor.dtype).float().view(torch.uint8)
    return content


# Adapters of PEFT's

wrong_steps(
    "impl.adapter:_NEUTRAL",
    adapter_of_another_gaussian_refused=(
        "An adapter whose factors were drawn otherwise is refused.",
        lambda neutral: {**neutral, "init_lora_weights": (True,)},
    ),
)
wrong_steps(
    "impl.adapter:read_tensors",
    merged_head_by_pefts_names=(
        "The head of a merged model has to have PEFT's names.",
        lambda read, path, prefix="": read(path, "base_model.model." if path.name == "head.safetensors" else prefix),
    ),
)


@wrong_step("impl.saved:_settings")
def settings_of_peft_at_their_defaults(settings: Step, adapter: Any, folder: Path) -> Any:
    """All settings are the defaults where none lie beside an adapter, also those that the adapter itself gives."""
    from blackswan.impl.config import ClassifyConfig

    found = settings(adapter, folder)
    return found if adapter.extra else ClassifyConfig(num_classes=found.num_classes, quantize_nf4=False)


@wrong_step("impl.saved:load_adapter")
def adapter_of_peft_pools_the_mean(load: Step, *given: Any) -> Any:
    """An adapter without settings pools as a run does by default."""
    found = load(*given)
    return found if found.extra else replace(found, adaptation=replace(found.adaptation, pooling="mean"))


# Folders and files in the place of links

wrong_steps(
    "impl.folder:remove_left_over",
    left_over_beside_brackets=(
        "A name is a pattern.",
        lambda remove, folder, prefix: remove(folder, prefix.replace("[", "[[")),
    ),
)
wrong_steps("impl.folder:is_there", links_to_nothing_written_over=("A link to nothing counts as nothing.", lambda _, path: path.exists()))


@wrong_step("impl.adapter:whole_folder")
@contextmanager
def link_exchanged_for_an_adapter(whole: Step, folder: Path, **options: Any) -> Iterator[Path]:
    """A save over a link puts a folder in the place of the link."""
    with patch.object(Path, "resolve", lambda path: path), whole(folder, **options) as partial:
        yield partial


@wrong_step("impl.apr_write:whole_file")
@contextmanager
def apr_file_before_its_tokenizer(whole_file: Step, path: Path) -> Iterator[Path]:
    """A model's file gets its name before its tokenizer's file does."""
    with whole_file(path.with_name(f"{path.name}.other")) as partial:
        yield partial
        (partial / path.name).rename(path)
        (partial / f"{path.name}.other").write_bytes(b"")


wrong_steps(
    "impl.folder:_exchange",
    names_have_to_be_exchanged=("A system has to exchange two names.", lambda exchange, *names: _or_raise(exchange, *names)),
)


@wrong_step("impl.folder:_exchange")
def errors_of_the_system_not_kept(exchange: Step, *names: Path) -> Any:
    """The system's library is asked without keeping the number of its error, so that a refusal to exchange names is error 0."""
    library = ctypes.CDLL
    with patch.object(ctypes, "CDLL", lambda name, **_: library(name)):
        return exchange(*names)


def _or_raise(exchange: Step, *names: Path) -> bool:
    if not exchange(*names):
        raise OSError(f"{names[1]}: two names cannot be exchanged here")
    return True


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_with_numbers_for_names(prepare: Step, model: Any, folder: Path) -> None:
    """The labels of a sequence classifier lose their names, also where it has as many as before."""
    prepare(model, folder)
    model.config.id2label = {number: f"LABEL_{number}" for number in range(model.config.num_labels)}


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_of_its_old_labels(prepare: Step, model: Any, folder: Path) -> None:
    """A sequence classifier keeps the number of labels that it had."""
    prepare(model, folder)
    model.num_labels = 2


wrong_steps(
    "impl.apr_checkpoint:DEFAULTS",
    apr_positions_of_another_default=(
        "A file that gives no limit of positions has 2,048.",
        lambda said: {**said, "max_position_embeddings": 2048},
    ),
)
wrong_steps(
    "impl.apr_write:export_apr",
    apr_of_the_stored_dtype=(
        "The dtype that was asked for is ignored: an .apr file keeps those of the source.",
        lambda export, *given: export(*given[:3]),
    ),
)
wrong_steps(
    "impl.pipeline:ClassifyPipeline._logits",
    answers_need_a_text=("No answer is given where there is no text.", lambda logits, pipeline, texts: logits(pipeline, texts or [""])),
    answers_to_what_has_a_truth=(
        "Whether there are texts is asked of their truth, which an array does not have.",
        lambda logits, pipeline, texts: logits(pipeline, texts if texts else []),
    ),
)


@wrong_step("impl.folder:_put")
def adapter_removed_where_names_are_not_exchanged(put: Step, new: Path, folder: Path) -> None:
    """The old folder is removed before the new one has its name, where two names cannot be exchanged."""
    from blackswan.impl import folder as module

    if folder.exists() and not module._exchange(new, folder):
        shutil.rmtree(folder)
    elif folder.exists():
        return
    put(new, folder)


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_in_float32(prepare: Step, model: Any, folder: Path) -> None:
    """A sequence classifier in another dtype is given a head in float32."""
    prepare(model, folder)
    model.score.float()


wrong_step(
    "impl.adapter:skip_init", name="prepared_head_drawn_first", doc="A head for transformers is drawn before it is given its numbers."
)(lambda _, layer, *sizes, **where: layer(*sizes, **where))


@wrong_step("impl.checkpoint:to_huggingface")
def scaled_theta_within_alone(values: Step, config: Any) -> dict[str, Any]:
    """The base of scaled rotary frequencies is written within their parameters alone."""
    found = dict(values(config))
    return {key: value for key, value in found.items() if key != "rope_theta" or "rope_scaling" not in found}


@wrong_step("impl.saved:_settings")
def merged_settings_of_training(settings: Step, adapter: Any, folder: Path) -> Any:
    """The settings of a merged model are those of its training, NF4 among them."""
    found, stored = settings(adapter, folder), adapter.extra.get("settings", {})
    return replace(found, **{key: stored.get(key, False) for key in ("quantize_nf4", "double_quantize")})


# Bases that are gone, and weights that are not there

wrong_steps(
    "impl.pipeline:open_adapter",
    base_that_is_named_merged=(
        "An adapter that was opened on another base is merged into the one that it names.",
        lambda opened, *given: replace(found := opened(*given), source=found.adapter.base),
    ),
)


@wrong_step("impl.pipeline:ClassifyPipeline.merge")
def merged_into_whatever_is_there(merge: Step, pipeline: Any, folder: Path) -> None:
    """Nobody looks whether the base is still the one that the run was trained on."""
    pipeline.base_checksums = {}
    merge(pipeline, folder)


@wrong_step("impl.checkpoint:_stored_tensors")
def pickled_weights_unnamed(stored: Step, folder: Path) -> Any:
    """The error says nothing of converting weights that are pickled."""
    try:
        return stored(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(str(error).replace("convert the .bin files to safetensors", "copy the weights into the folder")) from None


wrong_steps("impl.architecture:difflib.get_close_matches", nearest_key_unnamed=("A misspelt key is not named.", lambda *_, **__: []))


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_without_looking_for_a_head(prepare: Step, model: Any, folder: Path) -> None:
    """A model without a head ends in an AttributeError."""
    model.get_submodule("score")
    prepare(model, folder)
