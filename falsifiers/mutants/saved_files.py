"""Wrong steps with what is saved, or was: what else has a name like it, what a save is given, and what stays readable."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file

from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

wrong_step(
    "impl.folder:tempfile.mkdtemp",
    name="partial_among_temporary_files",
    doc="A folder is written among temporary files, which may be on another disk, from which it cannot get its name.",
)(lambda made, *given, **named: made(*given, **{name: value for name, value in named.items() if name != "dir"}))
wrong_step(
    "impl.checkpoint:shutil.copyfile",
    name="tokenizers_copied_as_links",
    doc="A file of a tokenizer that is a link is copied as a link, to what is not beside the copy.",
)(lambda copied, file, copy: copied(file, copy, follow_symlinks=False))


@wrong_step("impl.pipeline:ClassifyPipeline.save")
def base_checksums_of_when_it_is_saved(save: Step, self: Any, folder: Path) -> None:
    """The base's checksums are taken when an adapter is saved, be the base another one by then."""
    from blackswan.impl.checkpoint import load_checkpoint
    from blackswan.impl.checksums import checksum

    if self.source is not None:
        now = load_checkpoint(self.source).tensors
        self.base_checksums = {name: checksum(now[name]) for name in self.base_checksums}
    save(self, folder)


# What an adapter's file gets

wrong_steps("impl.checksums:DIGITS", checksums_of_fewer_digits=("Checksums have fewer digits than those of before.", lambda _: 12))
wrong_steps(
    "impl.adapter:_NO_STOCK",
    head_advised_for_any_pooling=(
        "Whoever has an adapter that pools the mean is told how transformers' classes get its head.",
        lambda _: "call prepare_sequence_classifier",
    ),
)


@wrong_step("impl.adapter:_digest")
def adapter_digest_of_what_is_not_read_back(_: Step, values: Mapping[str, Any]) -> str:
    """Keys that are numbers are sorted as numbers when an adapter is saved, and as texts when it is read."""
    said = {key: value for key, value in values.items() if key != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


@wrong_step("impl.adapter:save_adapter")
def adapter_as_it_lies_in_memory(save: Step, *given: Any, **named: Any) -> None:
    """Tensors are stored only where their numbers lie in memory row by row."""
    with patch.object(torch.Tensor, "contiguous", lambda tensor: tensor):
        save(*given, **named)


def _each_where_it_is(_: Step, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


wrong_steps("impl.adapter:laid_out", adapter_of_one_memory_refused=("Factors that are one tensor are not saved.", _each_where_it_is))
wrong_steps("impl.checkpoint:laid_out", checkpoint_of_one_memory_refused=("Norms that are one tensor are not saved.", _each_where_it_is))
wrong_steps("impl.merge:laid_out", merged_of_one_memory_refused=("Norms that are one tensor are not merged.", _each_where_it_is))


@wrong_step("impl.merge:save_merged")
def merged_as_it_lies_in_memory(save: Step, *given: Any, **named: Any) -> None:
    """An adapter is merged only into weights whose numbers lie in memory row by row."""
    with patch.object(torch.Tensor, "contiguous", lambda tensor: tensor):
        save(*given, **named)


@wrong_step("impl.adapter:save_adapter")
def adapter_stored_in_float32(save: Step, folder: Path, config: Any, adaptation: Any, trainable: Any, **named: Any) -> None:
    """An adapter is stored in float32, whatever its dtype is."""
    save(folder, config, adaptation, {name: tensor.float() for name, tensor in trainable.items()}, **named)


@wrong_step("impl.adapter:target_modules")
def adapter_without_targets_saved(modules: Step, targets: str) -> Any:
    """An adaptation without targets is saved, which nothing can load."""
    return modules(targets) or ("",)


# What an adapter's file may hold


@wrong_step("impl.adapter:read_tensors")
def heads_measured_first(read: Step, path: Path, *prefix: str) -> Any:
    """The classes of a head are counted before it is asked whether it is a matrix."""
    found = read(path, *prefix)
    len(found.get("score.weight", ()))
    return found


@wrong_step("impl.adapter:require_named")
def turned_tensors_accepted(require: Step, expected: Mapping[str, Any], tensors: Mapping[str, Any], source: str) -> None:
    """A tensor may have its rows as columns: the numbers of elements are compared."""
    alike = {name: tensor.numel() == np.prod(expected.get(name, (0,))) for name, tensor in tensors.items()}
    require(expected, {name: tensor.reshape(expected[name]) if alike[name] else tensor for name, tensor in tensors.items()}, source)


# What lies beside


@wrong_step("impl.merge:whole_folder")
@contextmanager
def merged_over_what_came_meanwhile(whole: Step, folder: Path) -> Iterator[Path]:
    """A merged model takes the place of what got its name while it was written."""
    with whole(folder, replace=not (folder.exists() or folder.is_symlink())) as partial:
        yield partial


@wrong_step("impl.adapter:save_adapter")
def saved_over_a_checkpoint_in_parts(save: Step, folder: Path, *given: Any, **named: Any) -> None:
    """A checkpoint in several files in whose folder an adapter lies is replaced with it."""
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save(folder, *given, **named)


wrong_step("impl.folder:_prefix", name="names_of_parts_too_long", doc="What is written beside a long name has one that is too long.")(
    lambda _, name: f".partial-{name}."
)
wrong_step("impl.folder:_prefix", name="names_of_parts_by_their_letters", doc="Letters of a long name are counted, and not their bytes.")(
    lambda right, name: f".partial-{name}." if len(name) < 200 else right(name)
)
wrong_step("impl.folder:_LONGEST", name="names_of_parts_without_their_end", doc="A long name leaves no room for what is put at its end.")(
    lambda usual: usual + len(".old")
)


@wrong_step("impl.folder:remove_left_over")
def left_over_by_a_part_of_its_name(remove: Step, folder: Path, prefix: str) -> None:
    """A file in whose name that of a left-over is found goes as well."""
    for path in [each for each in folder.iterdir() if prefix in each.name and each.is_file()]:
        path.unlink()
    remove(folder, prefix)


@wrong_step("impl.folder:remove_left_over")
def old_adapter_lost_by_a_kill(remove: Step, folder: Path, prefix: str) -> None:
    """The old adapter, which a killed process had taken away and not yet replaced, is removed with the rest."""
    for path in [each for each in folder.iterdir() if each.name.startswith(prefix) and each.suffix == ".old"]:
        shutil.rmtree(path)
    remove(folder, prefix)


@wrong_step("impl.folder:remove_left_over")
def old_adapter_named_up_to_its_dot(remove: Step, folder: Path, prefix: str) -> None:
    """The old adapter, which a killed process had taken away, gets its name again up to the first dot of it."""
    for path in [each for each in folder.iterdir() if each.name.startswith(prefix) and each.suffix == ".old"]:
        with suppress(OSError):
            path.rename(folder / path.name.removeprefix(".partial-").partition(".")[0])
    remove(folder, prefix)


wrong_steps(
    "impl.folder:shutil.rmtree",
    old_adapter_left_beside=(
        "The old folder stays beside the new one where two names cannot be exchanged.",
        lambda remove, path, **how: None if path.name.endswith(".old") else remove(path, **how),
    ),
)


@wrong_step("impl.checkpoint:read_span")
def spans_mapped(read: Step, file: Path, start: int, length: int, state: Any) -> Any:
    """A part of a file is mapped, so that it changes with the file."""
    read(file, start, length, state)
    return torch.from_numpy(np.memmap(file, np.uint8, "c", start, (length,))) if length else torch.empty(0, dtype=torch.uint8)


wrong_step(
    "impl.apr_checkpoint:read_span", name="apr_spans_mapped", doc="A tensor of an .apr file is mapped, so that it changes with the file."
)(spans_mapped)


wrong_steps(
    "impl.saved:_named_base",
    base_without_a_name_is_here=(
        "The base of an adapter that gives it an empty name is the folder where the command is.",
        lambda named, path: Path() if json.loads(path.read_bytes()).get("base_model_name_or_path") == "" else named(path),
    ),
    base_looked_for_in_the_adapter=(
        "A base that is not named from the root is looked for in the adapter's folder.",
        lambda named, path: None if (found := named(path)) is None else path.parent / found,
    ),
)
wrong_steps(
    "impl.saved:load_adapter",
    adapters_in_an_adapter_opened=(
        "Of an adapter in whose folder another one is named best, that one is opened.",
        lambda load, folder, *given: load(folder / "best" if (folder / "best").is_dir() else folder, *given),
    ),
)
wrong_steps(
    "impl.saved:Checked",
    random_weights_of_any_seed=(
        "An adapter is opened on random weights of whichever seed its settings say.",
        lambda checked, tensors, expected, source, *given: checked(
            tensors, {} if str(source).startswith("random") else expected, source, *given
        ),
    ),
)


@wrong_step("impl.merge:merge_adapter")
def merged_in_the_dtype_of_the_embedding(merge: Step, checkpoint: Any, *given: Any, **named: Any) -> Any:
    """Projections are merged in the dtype of the embedding, where the base has several."""
    dtype = checkpoint.tensors["model.embed_tokens.weight"].dtype
    found = merge(checkpoint, *given, **named)
    return {name: tensor.to(dtype) if name.endswith("_proj.weight") else tensor for name, tensor in found.items()}


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_on_the_cpu(prepare: Step, model: Any, folder: Path) -> None:
    """A sequence classifier is given a head on the CPU, wherever it is itself."""
    prepare(model, folder)
    model.score = model.score.to_empty(device="cpu") if model.score.weight.is_meta else model.score.cpu()


# Sizes, dtypes and numbers other than the usual ones

wrong_step("impl.checkpoint:torch.isfinite", name="finite_by_the_sum", doc="A tensor of float16 is damaged where its sum is too large.")(
    lambda finite, tensor: finite(tensor.sum() if tensor.dtype == torch.float16 else tensor)
)


@wrong_step("impl.merge:checksum")
def checksums_of_the_first_mib(checksum: Step, tensor: torch.Tensor) -> str:
    """Only the first MiB of a tensor is looked at, so that nobody is told of an embedding with another end."""
    few = 2**20 // tensor.itemsize
    return str(checksum(tensor if tensor.numel() <= few else tensor.detach().reshape(-1)[:few]))


@wrong_step("impl.checkpoint:_header")
def headers_of_16_bits(header: Step, path: Path) -> Any:
    """A file whose header 16 bits do not count, as one of many layers has, is taken for damaged."""
    if int.from_bytes(path.read_bytes()[:8], "little") >= 2**16:
        raise ValueError(f"{path}: not a whole safetensors file")
    return header(path)


@wrong_step("impl.checkpoint:_header")
def tensors_lie_as_they_are_named(header: Step, path: Path) -> Any:
    """Tensors are read one after the other in the order of the header, wherever it says that they lie."""
    found, start = header(path), 8 + int.from_bytes(path.read_bytes()[:8], "little")
    placed = {}
    for name, stored in found.items():
        placed[name] = replace(stored, start=start)
        start += math.prod(stored.shape) * stored.dtype.itemsize
    return placed


@wrong_step("impl.checkpoint:_header")
def headers_state_after_it_is_read(header: Step, path: Path) -> Any:
    """The file's state is looked at when its header was read: who replaces it between is not noticed."""
    from blackswan.impl.spans import state_of

    return {name: replace(stored, state=state_of(path)) for name, stored in header(path).items()}


@wrong_step("impl.pipeline:ClassifyPipeline.save")
def bases_name_in_letters_alone(save: Any, self: Any, *given: Any) -> Any:
    """An adapter on a base whose name has a byte that is no letter is not saved."""
    str(self.source).encode()
    return save(self, *given)


@wrong_step("impl.checkpoint:copy_tokenizer")
def tokenizers_prefix_ends_early(copied: Any, tokenizer: Any, copy: Any) -> None:
    """The other files of a tokenizer are looked for by what stands before the first `tokenizer` of its name."""
    copied(tokenizer, copy)
    before = tokenizer.name.partition("tokenizer")[0]
    if before != tokenizer.name.removesuffix("tokenizer.json"):
        copy.with_name(copy.name.removesuffix("tokenizer.json") + "tokenizer_config.json").unlink(missing_ok=True)


def _above_one(read: Step, self: Any) -> Any:
    found = read(self)
    if found <= (1 if isinstance(found, int) else 0.999):
        raise self._error("r" if isinstance(found, int) else "lora_alpha", "a larger number")
    return found


wrong_steps(
    "impl.adapter:_PeftConfig.rank", adapter_of_rank_one_refused=("An adapter of rank 1 is refused to whoever has one.", _above_one)
)
wrong_steps(
    "impl.adapter:_PeftConfig.alpha",
    adapter_alpha_below_one_refused=("An adapter whose alpha is below 1 is refused to whoever has one.", _above_one),
)
wrong_steps(
    "impl.merge:lora_merge",
    merge_in_the_adapters_dtype=(
        "The update of an adapter in bfloat16 is multiplied in bfloat16, and who merges it loses digits.",
        lambda _, weight, a, b, alpha: (weight.float() + alpha / len(a) * (b @ a).float()).to(weight.dtype),
        "P28",
    ),
)
wrong_steps(
    "impl.merge:_updated",
    merge_rounds_what_has_no_update=(
        "Weights in float64 without an update go through float32, and are others in the merged model.",
        lambda updated, path, weight, adapter: updated(path, weight.float(), adapter),
    ),
)
wrong_steps(
    "impl.merge:_dequantized",
    merge_rounds_float32_alone_as_training_did=(
        "Weights that are stored in 16 bits are merged by NF4 codes of another dtype than they were trained with.",
        lambda right, path, stored, trained_in, double: right(
            path, stored, trained_in if stored.dtype == torch.float32 else stored.dtype, double
        ),
        "P27",
    ),
)
wrong_steps(
    "impl.checkpoint:to_huggingface",
    saved_with_the_usual_positions=(
        "A saved model says that it has 32,768 positions, whatever it has.",
        of_result(lambda said: {**said, "max_position_embeddings": 32_768}),
    ),
)


@wrong_step("impl.checkpoint:copy_tokenizer")
def tokenizer_files_linked(copied: Any, tokenizer: Any, copy: Any) -> None:
    """A tokenizer's file becomes another name of the base's: who edits one edits both."""
    copied(tokenizer, copy)
    copy.unlink()
    os.link(tokenizer.resolve(), copy)


@wrong_step("impl.architecture:_Reading._rotary")
def scaling_without_its_base(rotary: Any, self: Any) -> Any:
    """A rope_scaling that leaves the base out is taken for rope_parameters that have one, and the base is lost."""
    scaling, parameters = (self.values.get(key) for key in ("rope_scaling", "rope_parameters"))
    both = isinstance(scaling, dict) and isinstance(parameters, dict)
    if both and {key: value for key, value in parameters.items() if key != "rope_theta"} == scaling:
        self.values = {**self.values, "rope_parameters": scaling}
    return rotary(self)


@wrong_step("impl.architecture:_Reading._rotary")
def an_empty_scaling_hides_the_parameters(rotary: Any, self: Any) -> Any:
    """A rope_scaling without content is read in the place of rope_parameters, and base and scaling are lost."""
    return rotary(self) if self.values.get("rope_scaling") != {} else ("rope_scaling", {})


@wrong_step("impl.architecture:_Reading._head_dim")
def hidden_size_shared_out_among_heads(head_dim: Any, self: Any, family: str) -> Any:
    """A hidden size that is no multiple of the number of heads is refused though the size of a head is said."""
    if self.values["hidden_size"] % self.values["num_attention_heads"]:
        raise ValueError(f"{self.path}: hidden_size is no multiple of num_attention_heads")
    return head_dim(self, family)


@wrong_step("impl.merge:merge_adapter")
def merge_passes_zero_updates_over(merge: Step, checkpoint: Any, adapter: Any, **named: Any) -> Any:
    """A projection whose update is zero is merged as it is stored, and not as NF4 made it in training."""
    zero = [name for name, tensor in adapter.trainable.items() if name.endswith("lora_B.weight") and not tensor.any()]
    paths = [name.replace(".lora_B", "") for name in zero]
    return merge(checkpoint, adapter, **named) | {path: checkpoint.tensors[path] for path in paths}


@wrong_step("impl.checkpoint:read_span")
def changed_shards_read(read: Step, file: Path, start: int, length: int, state: Any) -> Any:
    """A shard that has changed since its header was read is read all the same."""
    sharded = file.with_name("model.safetensors.index.json").exists()
    return read(file, start, length, (file.stat().st_size, file.stat().st_mtime_ns) if sharded else state)


@wrong_step("impl.checkpoint:read_span")
def changes_behind_links_read(read: Step, file: Path, start: int, length: int, state: Any) -> Any:
    """A file that a link leads to, and that has changed since its header was read, is read all the same."""
    return read(file, start, length, (file.stat().st_size, file.stat().st_mtime_ns) if file.is_symlink() else state)


@wrong_step("impl.checkpoint:_header")
def headers_of_whole_words(header: Step, path: Path) -> Any:
    """The tensors of a file are taken to begin at a multiple of eight bytes, which not every writer keeps to."""
    after = -int.from_bytes(path.read_bytes()[:8], "little") % 8
    return {name: replace(entry, start=entry.start + after) for name, entry in header(path).items()}


@wrong_step("impl.adapter:read_tensors")
def adapters_finite_by_the_sum(read: Step, path: Path, *prefix: str) -> Any:
    """An adapter is taken for damaged where the magnitudes of a tensor add up to more than its dtype holds."""
    found = read(path, *prefix)
    for name, tensor in found.items():
        if not torch.isfinite(tensor.abs().sum()):
            raise ValueError(f"{path}: tensor {name!r} holds NaN or infinity")
    return found


wrong_steps(
    "impl.saved:RopeScaling",
    random_weights_without_scaling=("What was trained on random weights is opened without its rotary scaling.", lambda *_, **__: None),
)


wrong_step(
    "impl.classifier:targets_named", name="targets_in_the_order_of_letters", doc="blackswan.json names projections in alphabetical order."
)(lambda named, modules: ",".join(sorted(named(modules).split(","))))


@wrong_step("impl.checkpoint:read_span")
def spans_on_the_default_device(read: Step, *given: Any) -> Any:
    """A tensor of a checkpoint is on torch's default device, where the CPU's numbers are asked for."""
    return read(*given).to(torch.get_default_device())


@wrong_step("impl.adapter:read_tensors")
def adapters_on_the_default_device(read: Step, *given: Any) -> Any:
    """The tensors of an adapter are on torch's default device, where the CPU's numbers are asked for."""
    return {name: tensor.to(torch.get_default_device()) for name, tensor in read(*given).items()}


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_as_frozen_as_it_was(prepare: Step, model: Any, folder: Path) -> None:
    """The head of a sequence classifier that was frozen is frozen too, and training leaves it as it is."""
    trained = model.score.weight.requires_grad
    prepare(model, folder)
    model.score.requires_grad_(trained)


@wrong_step("impl.adapter:prepare_sequence_classifier")
def prepared_with_its_own_head(prepare: Step, model: Any, folder: Path) -> None:
    """A sequence classifier keeps its own head, which nobody has trained, where the file has none."""
    places = [folder / name for name in ("head.safetensors", "adapter_model.safetensors")]
    file = next((place for place in places if place.is_file()), None)
    if file is None or any(name.endswith("score.weight") for name in load_file(file)):
        prepare(model, folder)


@wrong_step("impl.adapter:_PeftConfig.rank")
def adapter_of_a_large_rank_refused(rank: Step, self: Any) -> int:
    """An adapter of a rank above 256 is refused to whoever has one."""
    if (found := rank(self)) > 256:
        raise ValueError(f"{self.path}: r is {found}; expected an integer from 1 to 256")
    return int(found)


@wrong_step("impl.checkpoint:_sharded")
def shards_of_another_total_refused(sharded: Step, index: Path) -> Any:
    """Shards are refused where their index says another number of bytes, as indices of many writers do."""
    found, said = sharded(index), json.loads(index.read_text()).get("metadata", {}).get("total_size")
    if said not in (None, sum(math.prod(each.shape) * each.dtype.itemsize for each in found.values())):
        raise ValueError(f"{index}: total_size is {said}, which is not that of the shards")
    return found


@wrong_step("impl.checkpoint:read_span")
def spans_looked_at_before_they_are_read(read: Step, file: Path, start: int, length: int, state: Any) -> Any:
    """A file is held to what it was before its part is read, and not after."""
    if not file.exists() or (file.stat().st_size, file.stat().st_mtime_ns) != state:
        return read(file, start, length, state)
    with file.open("rb") as opened:
        opened.seek(start)
        return torch.frombuffer(bytearray(opened.read(length)), dtype=torch.uint8)


@wrong_step("impl.adapter:require")
def large_adapters_not_looked_at(require: Step, tensors: Any, *given: Any) -> None:
    """An adapter of more than 16 MiB is not held to its checksums."""
    if sum(tensor.nbytes for tensor in tensors.values()) < 2**24:
        require(tensors, *given)


_TOKENS: dict[Any, Any] = {}


@wrong_step("impl.saved:load_tokenizer")
def tokenizers_kept_by_their_folders_time(load: Step, source: Path, *given: Any) -> Any:
    """A tokenizer is read once for each time of its folder, which does not move when a file in it is written over."""
    return _TOKENS.setdefault((source, source.stat().st_mtime_ns, *given), load(source, *given))


wrong_step("impl.strict_json:json.dumps", name="json_of_any_object", doc="What JSON lacks is saved as whatever text Python has for it.")(
    lambda dumps, value, **given: dumps(value, **{"default": str, **given})
)


@wrong_step("impl.checkpoint:_header")
def truncated_files_have_changed(header: Any, path: Path) -> Any:
    """A file that is cut off is said to have changed, as one that is written meanwhile."""
    try:
        return header(path)
    except ValueError as error:
        raise ValueError(f"{path}: changed since its header was read") from error


@wrong_step("impl.tensors:LazyTensors.__contains__")
def names_by_their_tensors(has: Any, tensors: Any, name: Any) -> bool:
    """Whether there is a tensor of a name is found by reading it."""
    return bool(has(tensors, name) and tensors[name] is not None)


@wrong_step("impl.tensors:Converted.__init__")
def conversions_of_conversions_skipped(make: Any, self: Any, tensors: Any, **given: Any) -> None:
    """What is converted already is converted from what lies under it."""
    make(self, tensors, **given)
    self._tensors = getattr(tensors, "_tensors", tensors)
