"""Checkpoints, whole and matching, or an error that names the file and the key.

They are Hugging Face folders (config.json and safetensors) or `.apr` files. Everything that takes a model asks here, so that both serve.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blackswan.impl import strict_json
from blackswan.impl.apr import is_apr, open_apr
from blackswan.impl.apr_checkpoint import SPECIAL_TOKENS, read_apr
from blackswan.impl.architecture import read_architecture, to_huggingface
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import EMBEDDING, HEAD, Decoder, parameter_shapes, require_shapes, require_tensors
from blackswan.impl.folder import whole_folder
from blackswan.impl.spans import FileState, read_span, state_of
from blackswan.impl.tensors import LazyTensors, Shapes, Tensors, laid_out

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "generation_config.json"),
)
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_NOT_KEPT = (
    *("torch_dtype", "num_labels", "id2label", "label2id", "architectures"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
"""Keys of config.json that `said_beside` leaves out."""


@dataclass(frozen=True)
class Checkpoint:
    """A decoder's architecture and its tensors, as stored, which match each other.

    Those of `load_checkpoint` are read from the disk each time that they are asked for: the files have to stay as they are until then.
    """

    config: DecoderConfig
    tensors: Tensors


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies, from its file's header; `state` is the file's size and time of change when that was read."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    state: FileState


class StoredTensors(LazyTensors):
    """The tensors of safetensors files: each look-up reads one, into memory of its own on the CPU."""

    def __init__(self, stored: Mapping[str, _Stored]) -> None:
        self._stored = dict(stored)

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor, from the files' headers."""
        return {name: entry.shape for name, entry in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as stored. Raises a ValueError where its file is no longer what it was when its header was read."""
        entry = self._stored[name]
        # Not the library's reader: it maps the whole file for each tensor, and its tensors change with the file.
        content = read_span(entry.file, entry.start, math.prod(entry.shape) * entry.dtype.itemsize, entry.state)
        return content.view(entry.dtype).view(entry.shape)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Architecture and tensors of a folder, or of an .apr file as `read_apr` says.

    A tensor is read when it is asked for; a stored copy of a tied embedding is left out.

    Raises a FileNotFoundError for a missing file, and a ValueError for an architecture that is not supported, a tensor that is missing,
    unexpected, stored twice or of another shape or type, and a damaged file. Every file's header is checked before a tensor is read.
    """
    if is_apr(folder):
        return Checkpoint(*read_apr(folder))
    config = read_config(folder)
    stored = _stored_tensors(folder)
    if config.layers > len(stored):
        raise ValueError(f"{folder / CONFIG}: num_hidden_layers is {config.layers}, and the files hold {len(stored)} tensors in all")
    surplus_head = config.tied and HEAD in stored
    expected = parameter_shapes(config) | ({HEAD: (config.vocab, config.hidden)} if surplus_head else {})
    _require_stored(expected, stored, folder)
    if surplus_head:
        both = StoredTensors(stored)
        if not torch.equal(both[HEAD], both[EMBEDDING]):
            raise ValueError(f"{folder / CONFIG}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; which one is meant?")
        del stored[HEAD]
    return Checkpoint(config, StoredTensors(stored))


def load_decoder(folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", nf4: bool = False) -> Decoder:
    """The decoder of a folder, converted to `dtype`. Raises as `load_checkpoint` does."""
    checkpoint = load_checkpoint(folder)
    return Decoder(checkpoint.config, checkpoint.tensors, dtype=dtype, device=device, nf4=nf4)


def read_config(folder: Path) -> DecoderConfig:
    """The architecture in a folder's config.json, or in an .apr file, whose checksum is left to `load_checkpoint`."""
    if is_apr(folder):
        return read_apr(folder, checksum=False)[0]
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected one with {CONFIG}, {WEIGHTS} and {TOKENIZER}, or a file MODEL.apr")
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; it holds the architecture, copy it from where the weights came from")
    return read_architecture(_read_object(path), path)


def special_tokens(model: Path) -> dict[str, Any]:
    """The ids of the tokens that begin, end and pad texts, by config.json's keys, as a folder or an .apr file says them."""
    said = open_apr(model).metadata if is_apr(model) else _read_object(model / CONFIG)
    values = {key: said.get(called if is_apr(model) else key) for key, called in SPECIAL_TOKENS.items()}
    return {key: value for key, value in values.items() if value is not None}


def said_beside(model: Path) -> dict[str, Any]:
    """The keys of a folder's config.json that a language model made of its weights keeps; the special tokens of an .apr file.

    Class, labels and dtype are left out, for they are another's there, and so are rotary parameters, which `to_huggingface` writes:
    transformers 4 and 5 spell them in different keys, and a kept one could contradict the one that is written.
    """
    if is_apr(model):
        return special_tokens(model)
    return {key: value for key, value in _read_object(model / CONFIG).items() if key not in _NOT_KEPT}


def belonging(model: Path, name: str) -> Path:
    """Where a file of that name, `tokenizer.json` say, is for a model: in its folder, or beside `MODEL.apr` as `MODEL.tokenizer.json`."""
    return model.with_suffix(f".{name}") if is_apr(model) else model / name


def save_checkpoint(
    folder: Path, config: DecoderConfig, tensors: Tensors, tokenizer: Path | None = None, said: Mapping[str, Any] | None = None
) -> None:
    """Writes a folder that `load_checkpoint` and transformers read.

    `tokenizer` is a tokenizer.json, which is copied with the TOKENIZER_FILES beside it. `said` are further keys of config.json, such as
    those of `special_tokens` or `said_beside`.
    The folder appears whole or not at all. Raises a FileExistsError where it exists, a FileNotFoundError where the tokenizer does not,
    and a ValueError where the tensors are not the architecture's and for one that is not finite.
    """
    require_tensors(parameter_shapes(config), tensors, str(folder))
    if tokenizer is not None and not tokenizer.is_file():
        raise FileNotFoundError(f"{tokenizer}: no such file; a checkpoint cannot be used without its own tokenizer")
    dtype = tensors[EMBEDDING].dtype
    with whole_folder(folder) as partial:
        contiguous = laid_out(tensors)
        for name, tensor in contiguous.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name}: NaN or infinity in {_NAMES[tensor.dtype]}; the model is damaged, or the dtype too narrow")
        save_file(contiguous, partial / WEIGHTS, metadata={"format": "pt"})
        values = {**to_huggingface(config), **(said or {}), "dtype": _NAMES[dtype]}
        (partial / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        if tokenizer is not None:
            copy_tokenizer(tokenizer, partial / TOKENIZER)


def copy_tokenizer(tokenizer: Path, copy: Path) -> None:
    """Copies a tokenizer.json, and those of the TOKENIZER_FILES that lie beside it. One that is not there is left out.

    The names of both may begin with a model's, as `MODEL.tokenizer.json` does; the other files' names then begin so too.
    """
    before, prefix = (path.name.removesuffix(TOKENIZER) for path in (tokenizer, copy))
    for name in TOKENIZER_FILES:
        file = tokenizer if name == TOKENIZER else tokenizer.with_name(before + name)
        if file.is_file():
            shutil.copyfile(file, copy.with_name(prefix + name))


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"{folder}: both {WEIGHTS} and {INDEX}; remove the one that is not meant")
    if single.is_file():
        return _header(single)
    if not index.is_file():
        pickled = any(folder.glob("*.bin"))
        hint = "convert the .bin files to safetensors" if pickled else "copy the weights into the folder"
        raise FileNotFoundError(f"{folder}: neither {WEIGHTS} nor {INDEX}; {hint}")
    return _sharded(index)


def _sharded(index: Path) -> dict[str, _Stored]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) and Path(name).name == name for name in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to names of files in the same folder")
    found: dict[str, _Stored] = {}
    for name in sorted(set(weight_map.values())):
        shard = index.parent / name
        if not shard.is_file():
            raise FileNotFoundError(
                f"{shard}: no such file, but {index.name} puts {_first_of(weight_map, name)!r} there; copy the missing shard"
            )
        header = _header(shard)
        for key in header:
            if key in found:
                raise ValueError(f"{shard}: tensor {key!r} is also in {found[key].file.name}")
            if weight_map.get(key) != name:
                raise ValueError(f"{shard}: tensor {key!r} is not where {index.name} says, {weight_map.get(key)!r}")
        found |= header
    absent = sorted(weight_map.keys() - found.keys())
    if absent:
        raise ValueError(f"{index.parent / weight_map[absent[0]]}: no tensor {absent[0]!r}, which {index.name} puts there")
    return found


def _first_of(weight_map: Mapping[str, str], file: str) -> str:
    return min(name for name, shard in weight_map.items() if shard == file)


def _header(path: Path) -> dict[str, _Stored]:
    """Names and shapes in a safetensors file, which is checked for damage."""
    try:
        with safe_open(path, framework="pt"):
            pass
        state = state_of(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = strict_json.loads(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); copy or download it again") from None
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in entries.items():
        if entry["dtype"] not in STORED_DTYPES:
            raise ValueError(f"{path}: tensor {name!r} is stored as {entry['dtype']}; expected one of {', '.join(STORED_DTYPES)}")
    return {
        name: _Stored(path, tuple(entry["shape"]), STORED_DTYPES[entry["dtype"]], 8 + length + entry["data_offsets"][0], state)
        for name, entry in entries.items()
    }


def _require_stored(expected: Shapes, stored: Mapping[str, _Stored], folder: Path) -> None:
    wrong = [name for name, shape in expected.items() if name in stored and stored[name].shape != shape]
    source = str(stored[wrong[0]].file) if wrong and expected.keys() == stored.keys() else str(folder)
    require_shapes(expected, {name: entry.shape for name, entry in stored.items()}, source)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = strict_json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value
