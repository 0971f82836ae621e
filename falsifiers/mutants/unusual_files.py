"""Wrong steps with files of adapters, merges and checkpoints that are spelled, stored or left in another way than usual."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

wrong_steps(
    "impl.adapter:STORED",
    adapter_in_float16_refused=("An adapter in float16 or float64 is refused.", lambda stored: stored[:2]),
)
wrong_steps(
    "impl.adapter:prepare_sequence_classifier",
    prepared_without_bias=(
        "transformers' class is given a head whose bias is zero.",
        lambda prepare, *given: _without_bias(prepare, *given),
    ),
    prepared_with_a_bias_at_random=(
        "transformers' class keeps the bias of a new layer where the adapter has none.",
        lambda prepare, *given: _with_any_bias(prepare, *given),
    ),
    prepared_of_merged_for_any_pooling=(
        "transformers' class is given the head of a merged checkpoint whatever that pools.",
        lambda prepare, *given: _of_any_pooling(prepare, *given),
    ),
)
wrong_steps(
    "impl.pipeline:_require_fitting",
    positions_before_the_scaling=(
        "A model whose rotary frequencies are scaled has the positions that it had before.",
        lambda require, architecture, *given: require(_before_scaling(architecture), *given),
    ),
    positions_of_any_scaling=(
        "A model whose rotary frequencies are scaled has as many positions as are asked for.",
        lambda require, architecture, *given: require(
            replace(architecture, max_positions=2**31) if architecture.rope_scaling else architecture, *given
        ),
    ),
)
wrong_steps(
    "impl.pipeline:is_merged",
    merged_where_a_config_lies=(
        "An adapter beside which the config.json of its base lies is taken for a merged model.",
        lambda merged, folder: all((folder / name).exists() for name in ("config.json", "blackswan.json")) or merged(folder),
    ),
)
wrong_steps(
    "impl.adapter:_architecture",
    adapter_heads_not_compared=(
        "How a base is divided into heads is not compared.",
        of_result(lambda said: _left_out(said, "heads", "head_dim", "kv_heads")),
    ),
    adapter_scaling_not_compared=(
        "How a base's rotary frequencies are scaled is not compared.",
        of_result(lambda said: _left_out(said, "rope_scaling")),
    ),
    adapter_absent_numbers_not_compared=(
        "What one side's base does not have is not compared.",
        of_result(lambda said: {name: value for name, value in said.items() if value is not None}),
    ),
    adapter_of_so_many_positions=(
        "A base with another limit of positions is another base.",
        lambda right, config: {**right(config), "max_positions": config.max_positions},
    ),
)
wrong_steps(
    "impl.folder:naming",
    disk_errors_name_no_folder=("An error of the disk does not say which folder was being written.", lambda *_: nullcontext()),
)
wrong_steps("impl.folder:flush", saved_files_not_flushed=("Files that were saved are not brought to the disk.", lambda *_: None))
wrong_steps(
    "impl.folder:_locked",
    others_folders_removed=("Folders that another process still writes beside are removed.", lambda *_: nullcontext()),
)


def _pipeline() -> Any:
    from blackswan.impl.pipeline import ClassifyPipeline

    return ClassifyPipeline


def _of_six_digits(said: Any) -> Any:
    """The numbers of a configuration, as `%g` shows them."""
    if isinstance(said, dict):
        return {key: _of_six_digits(value) for key, value in said.items()}
    return float(f"{said:g}") if isinstance(said, float) else said


wrong_steps(
    "impl.checkpoint:to_huggingface",
    saved_numbers_of_six_digits=("config.json of a saved checkpoint has its numbers with six digits.", of_result(_of_six_digits)),
)
wrong_steps(
    "impl.merge:to_huggingface",
    merged_numbers_of_six_digits=("config.json of a merged model has its numbers with six digits.", of_result(_of_six_digits)),
)
wrong_steps(
    "impl.apr_write:_metadata",
    apr_numbers_of_six_digits=("The metadata of an .apr file has its numbers with six digits.", of_result(_of_six_digits)),
)
wrong_steps(
    "impl.pipeline:ClassifyPipeline.from_apr",
    apr_opened_as_a_folder=(
        "What is opened as an .apr file may be a folder.",
        lambda _, path, config, **where: _pipeline().from_pretrained(path, config, **where),
    ),
    apr_settings_of_the_default=(
        "A classifier on an .apr file draws its updates from the default seed.",
        lambda opened, path, config, **where: opened(path, replace(config, seed=type(config).seed), **where),
    ),
)


@wrong_step("impl.classifier:Classifier.__init__")
def adapter_trained_in_its_own_dtype(init: Step, self: Any, config: Any, adaptation: Any, base: Any, trainable: Any, **where: Any) -> None:
    """An adapter is trained on in the dtype that its file has."""
    init(self, config, adaptation, base, trainable, **where)
    for name, parameter in self.trainable_parameters().items():
        parameter.data = parameter.data.to(trainable[name].dtype)


wrong_steps(
    "impl.checkpoint:is_apr",
    folder_named_like_a_file=("A folder whose name ends with .apr is taken for a file.", lambda _, path: path.suffix == ".apr"),
)
wrong_steps(
    "impl.checkpoint:save_file",
    checkpoint_without_format=("A saved checkpoint does not say the format.", lambda save, tensors, path, **_: save(tensors, path)),
    checkpoint_saved_in_one_dtype=(
        "A checkpoint is saved in the dtype of its embedding, whatever its other tensors have.",
        lambda save, tensors, *given, **named: save(
            {name: value.to(tensors["model.embed_tokens.weight"].dtype) for name, value in tensors.items()}, *given, **named
        ),
    ),
)
wrong_steps(
    "impl.checkpoint:save_checkpoint",
    checkpoint_saved_with_bad_vectors=(
        "A vector that is not finite is saved, with numbers in the places of NaN and infinity.",
        lambda save, folder, config, tensors, *given: save(
            folder, config, {name: value.nan_to_num() if value.ndim == 1 else value for name, value in tensors.items()}, *given
        ),
    ),
)


@wrong_step("impl.checkpoint:save_checkpoint")
def checkpoint_of_rows_alone(save: Step, folder: Path, config: Any, tensors: Any, *given: Any) -> None:
    """Tensors that do not lie row by row in memory are refused."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: it is not contiguous")
    save(folder, config, tensors, *given)


wrong_steps(
    "impl.architecture:_Reading._theta",
    rotary_base_read_as_integer=("A rotary base is read as an integer.", of_result(lambda theta: float(int(theta)))),
)
wrong_steps(
    "impl.architecture:_Reading._number",
    epsilon_read_with_nine_decimals=("The epsilon of norms is read with nine decimals.", of_result(lambda eps: round(eps, 9))),
)
wrong_steps(
    "impl.merge:json.dumps",
    merged_said_to_be_float32=(
        "A merged model's config.json says that it is in float32.",
        lambda dumps, values, **options: dumps({**values, "dtype": "float32"} if "dtype" in values else values, **options),
    ),
)
wrong_steps(
    "impl.checkpoint:TOKENIZER_FILES", merged_without_generation_config=("How a model generates is not copied.", lambda files: files[:-1])
)
wrong_steps(
    "impl.checkpoint:STORED_DTYPES",
    checkpoint_in_float64_refused=(
        "Weights in float64 are refused.",
        lambda stored: {name: stored[name] for name in stored if name != "F64"},
    ),
)
wrong_steps("impl.architecture:QWEN3_HEAD_DIM", config_head_dim_of_another_class=("A Qwen3 without the key has heads of 64.", lambda _: 64))
wrong_steps(
    "impl.architecture:_rope_type",
    config_older_name_of_the_scaling_ignored=(
        "The older name of the rotary frequencies' type is passed over.",
        lambda _, found: found.get("rope_type", "default"),
    ),
)


@wrong_step("impl.architecture:_Reading._kv_heads")
def config_null_is_no_number_of_heads(kv_heads: Step, self: Any, family: str) -> int:
    """A number of heads of keys that is null is refused."""
    return int(self._count("num_key_value_heads") if "num_key_value_heads" in self.values else kv_heads(self, family))


@wrong_step("impl.architecture:_Reading._kv_heads")
def config_heads_of_keys_made_up(kv_heads: Step, self: Any, family: str) -> int:
    """A Qwen without the key has as many heads of keys as of queries."""
    return int(kv_heads(self, family if "num_key_value_heads" in self.values else "llama"))


@wrong_step("impl.adapter:_PeftConfig.targets")
def adapter_targets_by_path_refused(targets: Step, self: Any) -> str:
    """PEFT's targets by their paths are unknown names."""
    for name in self.values.get("target_modules") or ():
        if "." in name:
            raise self._error("target_modules", "names")
    return str(targets(self))


@wrong_step("impl.adapter:_PeftConfig.targets")
def adapter_targets_by_half_a_path_refused(targets: Step, self: Any) -> str:
    """PEFT's targets by their names or whole paths are known, and those by the last parts of their paths are not."""
    for name in self.values.get("target_modules") or ():
        if name.count(".") == 1:
            raise self._error("target_modules", "names")
    return str(targets(self))


def _over(name: str | None) -> Step:
    """Saving that replaces a folder with a file of that name, or for None one that is empty."""

    def wrong(save: Step, folder: Path, *given: Any, **options: Any) -> None:
        if folder.is_dir() and ((folder / name).is_file() if name else not any(folder.iterdir())):
            (folder / "adapter_config.json").touch()
        save(folder, *given, **options)

    return wrong


@wrong_step("impl.adapter:save_adapter")
def saved_over_any_folder(save: Step, folder: Path, *given: Any, **options: Any) -> None:
    """A folder that is no adapter is replaced by one."""
    if folder.is_dir():
        (folder / "adapter_config.json").touch()
    save(folder, *given, **options)


wrong_steps(
    "impl.adapter:save_adapter",
    saved_over_what_has_settings_beside=("What has a blackswan.json may be replaced, a merged model too.", _over("blackswan.json")),
    saved_over_an_empty_folder=("An empty folder is written over.", _over(None)),
)


@wrong_step("impl.checksums:checksum")
def checksum_of_the_ends(checksum: Step, tensor: Any) -> str:
    """The first and the last element of a tensor are looked at, and no other."""
    flat = tensor.detach().reshape(-1)
    return str(checksum(flat[:: max(1, len(flat) - 1)]))


@wrong_step("impl.merge:merge_adapter")
def merged_weights_may_be_infinite(merge: Step, *given: Any, **options: Any) -> Any:
    """A merged weight that its dtype does not hold is infinite."""
    with mock.patch("torch.isfinite", lambda tensor: tensor == tensor):
        return merge(*given, **options)


@wrong_step("impl.merge:merge_adapter")
def merged_beside_what_is_not_finite(merge: Step, checkpoint: Any, *given: Any, **options: Any) -> Any:
    """Tensors that no adapter updates may be NaN in a merged model."""
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if "_proj." not in name}
    repaired = {name: plain[name].nan_to_num() if name in plain else tensor for name, tensor in checkpoint.tensors.items()}
    return merge(replace(checkpoint, tensors=repaired), *given, **options) | plain


def _left_out(said: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name not in names}


def _before_scaling(architecture: Any) -> Any:
    scaling = architecture.rope_scaling
    return architecture if scaling is None else replace(architecture, max_positions=int(scaling.original_positions))


def _of_any_pooling(prepare: Step, model: Any, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as bare:
        merged = (folder / "head.safetensors").is_file()
        if merged:
            shutil.copy(folder / "head.safetensors", bare)
        prepare(model, Path(bare) if merged else folder)


def _without_bias(prepare: Step, model: Any, folder: Path) -> None:
    prepare(model, folder)
    model.score.bias.data.zero_()


def _with_any_bias(prepare: Step, model: Any, folder: Path) -> None:
    prepare(model, folder)
    if not model.score.bias.any():
        model.score.bias.data.uniform_(-1.0, 1.0)


@wrong_step("impl.checkpoint:read_span")
def spans_by_one_preadv(read: Step, file: Path, start: int, length: int, state: tuple[int, int]) -> Any:
    """A tensor is read by one call of preadv, which gives 2 GiB at most."""
    with file.open("rb") as opened:
        if os.preadv(opened.fileno(), [bytearray(length)], start) != length:
            raise ValueError(f"{file}: changed since its header was read")
    return read(file, start, length, state)


@wrong_step("impl.checkpoint:read_span")
def spans_by_one_pread(read: Step, file: Path, start: int, length: int, state: tuple[int, int]) -> Any:
    """A tensor is read by one call of pread, which gives 2 GiB at most."""
    with file.open("rb") as opened:
        if len(os.pread(opened.fileno(), length, start)) != length:
            raise ValueError(f"{file}: changed since its header was read")
    return read(file, start, length, state)


@wrong_step("impl.checkpoint:read_span")
def spans_by_one_raw_read(read: Step, file: Path, start: int, length: int, state: tuple[int, int]) -> Any:
    """A tensor is read by one call of an unbuffered file, which gives 2 GiB at most."""
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        if len(opened.read(length)) != length:
            raise ValueError(f"{file}: changed since its header was read")
    return read(file, start, length, state)


@wrong_step("impl.checkpoint:read_span")
def changed_files_read(read: Step, file: Path, start: int, length: int, _: Any) -> Any:
    """A file of weights that has changed since its header was read is read all the same."""
    return read(file, start, length, _state_now(file))


@wrong_step("impl.apr_checkpoint:read_span")
def changed_apr_files_read(read: Step, file: Path, start: int, length: int, _: Any) -> Any:
    """An .apr file that has changed since its header was read is read all the same."""
    return read(file, start, length, _state_now(file))


@wrong_step("impl.checkpoint:read_span")
def unreadable_files_have_changed(read: Step, file: Path, *given: Any) -> Any:
    """A file of weights that the system cannot open is said to have changed, which sends a user round in circles."""
    try:
        return read(file, *given)
    except OSError:
        raise ValueError(f"{file}: changed since its header was read") from None


@wrong_step("impl.checkpoint:read_span")
def files_changed_in_seconds(read: Step, file: Path, start: int, length: int, state: tuple[int, int]) -> Any:
    """The time of a file's last change is compared in whole seconds."""
    size, when = _state_now(file)
    return read(file, start, length, (size, when) if (size, when // 10**9) == (state[0], state[1] // 10**9) else state)


@wrong_step("impl.checkpoint:state_of")
def files_known_by_their_number(state_of: Step, path: Path) -> Any:
    """An equal copy of the same time that is in a file's place is refused as another file."""
    return _Numbered(path, state_of(path), path.stat().st_ino)


@dataclass(frozen=True, eq=False)
class _Numbered:
    path: Path
    state: tuple[int, int]
    number: int

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def __eq__(self, now: object) -> bool:
        return now == self.state and self.path.stat().st_ino == self.number


@wrong_step("impl.apr_checkpoint:read_span")
def apr_files_changed_for_later(read: Step, file: Path, start: int, length: int, state: tuple[int, int]) -> Any:
    """Only an .apr file with a later time than that of its opening has changed."""
    size, when = _state_now(file)
    return read(file, start, length, (size, when) if size == state[0] and when <= state[1] else state)


def _state_now(file: Path) -> tuple[int, int]:
    """The size of a file and the time of its last change."""
    return file.stat().st_size, file.stat().st_mtime_ns
