"""Decoders in `.apr` files: the architecture in the metadata, the names of the tensors, and each tensor when it is asked for.

Names and rows are Hugging Face's. Files that were made from GGUF keep its names for Llama, and its order of the rows of queries and keys,
where the two elements that the rotary embedding turns are neighbours; rows of tensors with such names are put back. `rope_type` decides
nothing, since writers say 0 (neighbours) also of files with Hugging Face's rows; where it contradicts GGUF's names the file is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blackswan.impl.apr import AprFile, Entry, open_apr
from blackswan.impl.apr_dtypes import decoded, holds_weights
from blackswan.impl.architecture import ENCODER_FAMILIES, read_architecture
from blackswan.impl.config import FAMILIES, DecoderConfig
from blackswan.impl.decoder import EMBEDDING, HEAD, parameter_shapes, require_shapes
from blackswan.impl.spans import read_span
from blackswan.impl.tensors import LazyTensors, Shapes

KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_layers", "num_hidden_layers", "n_layers"),
    "num_attention_heads": ("num_heads", "num_attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "num_key_value_heads"),
    "vocab_size": ("vocab_size",),
    "intermediate_size": ("intermediate_size",),
    "max_position_embeddings": ("max_position_embeddings", "context_length"),
    "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps"),
    "tie_word_embeddings": ("tied_embeddings", "tie_word_embeddings"),
    "model_type": ("architecture", "hf_architecture", "model_type"),
}
"""Key of config.json → what metadata calls it; the first one is named in errors."""
DEFAULTS = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
"""What the format says where the metadata has no such key; there are as many heads of keys and values as of queries."""
HALVES = 2
"""The `rope_type` of rows in Hugging Face's order."""
SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.bos_token_id",
    "eos_token_id": "tokenizer.eos_token_id",
    "pad_token_id": "tokenizer.padding_token_id",
}
"""Key of config.json → what metadata calls it: the tokens that begin, end and pad texts."""
TRAINING = "__training__."
"""Begins the names of what a training run keeps for itself."""
GGUF = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class _Placed:
    """A parameter's entry, its shape in the decoder, and the number of heads whose rows are in GGUF's order, 0 where none are."""

    entry: Entry
    shape: tuple[int, ...]
    heads: int


class AprTensors(LazyTensors):
    """The tensors of an .apr file by Hugging Face's names: each look-up reads one, in its dtype or, quantised, as float32."""

    def __init__(self, file: AprFile, placed: Mapping[str, _Placed]) -> None:
        self._file, self._placed = file, placed

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor; reads none."""
        return {name: placed.shape for name, placed in self._placed.items()}

    def __getitem__(self, name: str) -> Tensor:
        """The tensor. Raises a ValueError where the file has changed since it was opened, or the tensor is not finite."""
        placed = self._placed[name]
        entry = placed.entry
        content = read_span(self._file.path, entry.start, entry.size, self._file.state)
        found = decoded(entry.dtype, content, entry.shape).view(placed.shape)
        _require_finite(self._file.path, entry, found)
        return _rows_in_halves(found, placed.heads) if placed.heads else found


def read_apr(path: Path, *, checksum: bool = True) -> tuple[DecoderConfig, AprTensors]:
    """Architecture and tensors of a decoder; the tensors are those of the architecture, a tied output layer left out.

    The checksum of the whole file takes reading it once, which `checksum` can leave out.

    Raises as `open_apr` does, and a ValueError for a checksum that is wrong, an architecture that is not supported, and a tensor that is
    missing, unexpected, there under two names, of another shape or of a dtype that holds no weights.
    """
    file = open_apr(path)
    if checksum:
        file.require_checksum()
    entries = _by_name(file)
    values, names = _values(file, entries)
    config = replace(read_architecture(values, path, names), tied=False)
    _require_one_order_of_rows(file, config)
    if config.layers > len(entries):
        raise ValueError(f"{path}: {names['num_hidden_layers']} is {config.layers}, and the file holds {len(entries)} tensors in all")
    head, where = entries.get(HEAD), f"{path}: {names['tie_word_embeddings']}"
    expected = parameter_shapes(config)
    if head is None or not head.size:
        _require_tied(values.get("tie_word_embeddings", True), where, f"{HEAD} has no content")
        return _tied(file, config, entries, expected)
    tensors = AprTensors(file, _placed(file, config, entries, expected))
    if _is_tied(values.get("tie_word_embeddings"), tensors, where):
        return _tied(file, config, entries, expected)
    return config, tensors


def _by_name(file: AprFile) -> dict[str, Entry]:
    """The entries by Hugging Face's names, without those of a training run's own."""
    found: dict[str, Entry] = {}
    for name, entry in file.entries.items():
        if name.startswith(TRAINING):
            continue
        called = _huggingface(name)
        if called in found:
            raise ValueError(f"{file.path}: tensor {name!r} is {called!r}, which is also there as {found[called].name!r}")
        found[called] = entry
    return found


def _huggingface(name: str) -> str:
    """Hugging Face's name of a tensor that GGUF names otherwise; any other name as it is."""
    layer = re.fullmatch(r"blk\.([0-9]{1,9})\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in GGUF_LAYER:
        return f"model.layers.{int(layer[1])}.{GGUF_LAYER[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{GGUF[stem]}.{kind}" if stem in GGUF else name


def _values(file: AprFile, entries: Mapping[str, Entry]) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata as the content of a config.json, and what the file calls the keys."""
    _require_plain(file)
    values, names = dict(file.metadata), {}
    for key, called in KEYS.items():
        given = {name: file.metadata[name] for name in called if name in file.metadata}
        if key == "model_type":
            given = _families(given)
        names[key] = next(iter(given), called[0])
        values.pop(key, None)
        if given or key in DEFAULTS:
            values[key] = given.get(names[key], DEFAULTS.get(key))
        for name, value in given.items():
            if value != values[key]:
                raise ValueError(f"{file.path}: {name} is {value!r}, and {names[key]} is {values[key]!r}; which is meant?")
    heads, queries = values.get("num_attention_heads"), entries.get("model.layers.0.self_attn.q_proj.weight")
    values.setdefault("num_key_value_heads", heads)
    if queries is not None and queries.shape and type(heads) is int and heads > 0:
        values.setdefault("head_dim", queries.shape[0] // heads)
    return values, names


def _families(given: Mapping[str, Any]) -> dict[str, Any]:
    """Model types by their keys; other programs say under `model_type` what kind of model it is, where an architecture is there too."""
    return {name: _family(value) for name, value in given.items() if name != "model_type" or len(given) == 1}


def _family(value: Any) -> Any:
    """The model type in an architecture's name, `Qwen2ForCausalLM` or `qwen2`; what is not known as it is."""
    plain = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", value).lower() if isinstance(value, str) else value
    known = {re.sub(r"[-_]", "", family): family for family in (*FAMILIES, *ENCODER_FAMILIES)}
    return known.get(re.sub(r"[-_]", "", plain), value) if isinstance(plain, str) else value


def _require_plain(file: AprFile) -> None:
    for key, what in (("sharding", "one of several shards"), ("num_experts", "a mixture of experts")):
        if file.metadata.get(key):
            raise ValueError(f"{file.path}: {key} is {file.metadata[key]!r}; expected none: {what} is not supported")


def _require_one_order_of_rows(file: AprFile, config: DecoderConfig) -> None:
    gguf = [name for name in file.entries if name.endswith("attn_q.weight")]
    if config.family == "llama" and gguf and file.metadata.get("rope_type") == HALVES:
        raise ValueError(
            f"{file.path}: rope_type is {HALVES}, Hugging Face's order of rows, and {gguf[0]!r} is a name of GGUF, which has another order "
            "for Llama; convert the model from its Hugging Face checkpoint"
        )


def _placed(file: AprFile, config: DecoderConfig, entries: Mapping[str, Entry], expected: Shapes) -> dict[str, _Placed]:
    """The parameters of the decoder, each with the shape that it has there."""
    shapes = {name: _without_one_row(entry.shape, expected.get(name)) for name, entry in entries.items()}
    require_shapes(expected, shapes, str(file.path))
    for name in expected:
        entry = entries[name]
        if not holds_weights(entry.dtype) or not entry.size:
            raise ValueError(f"{file.path}: tensor {entry.name!r} is {entry.dtype.name} of {entry.size} bytes, which cannot be a weight")
    return {name: _Placed(entries[name], shape, _permuted_heads(config, name, entries[name].name)) for name, shape in expected.items()}


def _without_one_row(shape: tuple[int, ...], expected: tuple[int, ...] | None) -> tuple[int, ...]:
    """Training checkpoints hold vectors as matrices of one row."""
    return expected if expected is not None and len(expected) == 1 and shape == (1, *expected) else shape


def _permuted_heads(config: DecoderConfig, name: str, stored: str) -> int:
    """The heads of a projection whose rows are in GGUF's order: those of a Llama's queries and keys, under GGUF's names."""
    if config.family != "llama" or name == stored:
        return 0
    return config.heads if ".q_proj." in name else config.kv_heads if ".k_proj." in name else 0


def _rows_in_halves(tensor: Tensor, heads: int) -> Tensor:
    """[heads · size, …] where neighbouring rows turn together → where those of the first half of a head turn with those of the second."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _tied(file: AprFile, config: DecoderConfig, entries: Mapping[str, Entry], expected: Shapes) -> tuple[DecoderConfig, AprTensors]:
    """The decoder whose output layer is its embedding."""
    tied = replace(config, tied=True)
    if HEAD in entries:
        require_shapes({HEAD: expected[HEAD]}, {HEAD: entries[HEAD].shape}, str(file.path))
    own = {name: entry for name, entry in entries.items() if name != HEAD}
    return tied, AprTensors(file, _placed(file, tied, own, parameter_shapes(tied)))


def _is_tied(said: Any, tensors: AprTensors, where: str) -> bool:
    """Whether a stored output layer is a copy of the embedding; one that the metadata says not to be tied is a tensor of its own.

    `where` are the file and what it calls that.
    """
    if said is False:
        return False
    same = torch.equal(tensors[HEAD].float(), tensors[EMBEDDING].float())
    if said is not None and not same:
        _require_tied(said, where, "")
        raise ValueError(f"{where} is true, but {HEAD} differs from {EMBEDDING}; which one is meant?")
    return same


def _require_tied(said: Any, where: str, why: str) -> None:
    if said is not True:
        raise ValueError(f"{where} is {said!r}; expected true" + (f", for {why}" if why else " or false"))


def _require_finite(path: Path, entry: Entry, tensor: Tensor) -> None:
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        at = torch.argwhere(~finite)[0].tolist()
        raise ValueError(f"{path}: tensor {entry.name!r} is {tensor[tuple(at)].item()} at {at}; every weight must be finite")
