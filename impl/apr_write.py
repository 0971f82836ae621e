"""Decoders written as `.apr` files: row-major, sorted, every part padded to 64 bytes, with both checksums."""

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from blackswan.impl.apr import ALIGNMENT, HEADER, MAGIC, ROW_MAJOR, VERSION, header_checksum
from blackswan.impl.apr_checkpoint import HALVES, SPECIAL_TOKENS
from blackswan.impl.apr_dtypes import BF16, DTYPES, F16, F32, WRITTEN, DType, encoded, fits
from blackswan.impl.architecture import to_huggingface
from blackswan.impl.checkpoint import TOKENIZER, Checkpoint, belonging, copy_tokenizer, special_tokens
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import parameter_shapes, require_tensors
from blackswan.impl.folder import whole_file

CODES = {dtype: code for code, dtype in reversed(DTYPES.items())}
"""The code of each dtype, the newer one where there are two."""


def export_apr(checkpoint: Checkpoint, source: Path, path: Path, dtype: str | None = None) -> None:
    """Writes a checkpoint as `path`, and the tokenizer of `source` (the folder or file that it came from) beside it.

    `dtype` is a key of `apr_dtypes.WRITTEN`; without it every tensor keeps its own. q8 and q4 are for the matrices, and the vectors keep
    theirs. The file appears whole or not at all. Raises a FileExistsError where it or a tokenizer beside it exists, a FileNotFoundError
    where the source has no tokenizer, and a ValueError for a tensor that is not finite, also in that dtype, or, as it is, of a dtype that
    the format does not have.
    """
    if not belonging(source, TOKENIZER).is_file():
        raise FileNotFoundError(f"{belonging(source, TOKENIZER)}: no such file; a checkpoint cannot be used without its own tokenizer")
    require_tensors(parameter_shapes(checkpoint.config), checkpoint.tensors, str(path))
    special = special_tokens(source)
    metadata = _metadata(checkpoint.config) | {called: special.get(key) for key, called in SPECIAL_TOKENS.items()}
    with whole_file(path) as partial:
        copy_tokenizer(belonging(source, TOKENIZER), partial / belonging(path, TOKENIZER).name)
        save_apr(partial / path.name, checkpoint, metadata, dtype)


def save_apr(path: Path, checkpoint: Checkpoint, metadata: Mapping[str, Any], dtype: str | None = None) -> None:
    """Writes the file, one tensor after another; the header and the index are written when all of them are there."""
    shapes = parameter_shapes(checkpoint.config)
    require_tensors(shapes, checkpoint.tensors, str(path))
    names = _in_order(shapes)
    text = json.dumps({key: value for key, value in metadata.items() if value is not None}, indent=1).encode()
    index = _padded(HEADER.size + len(text))
    data = index + _padded(sum(len(_entry(name, F32, shapes[name], 0, 0)) for name in names))
    entries = []
    with path.open("w+b") as file:
        at = data
        for name in names:
            stored, content = _content(name, checkpoint.tensors[name], dtype)
            entries.append(_entry(name, stored, shapes[name], at - data, len(content)))
            _write(file, at, content.numpy().data)
            at = _padded(at + len(content))
        _write(file, 0, _header(len(names), len(text), index, data))
        _write(file, HEADER.size, text)
        _write(file, index, b"".join(entries))
        file.truncate(at)  # pads the last tensor with zeros
        _write(file, at, struct.pack("<I", _checksum(file)))


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=str.encode)


def _metadata(config: DecoderConfig) -> dict[str, Any]:
    """The keys by which readers of the format know an architecture. Raises a ValueError for one that they cannot know by them."""
    if config.rope_scaling is not None:
        raise ValueError("rope_scaling is of the rope_type 'llama3', which .apr files have no key for: readers would turn by other angles")
    return {
        "architecture": config.family,
        "hf_architecture": to_huggingface(config)["architectures"][0],
        "hidden_size": config.hidden,
        "num_layers": config.layers,
        "num_heads": config.heads,
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.theta,
        "rope_type": HALVES,
        "rms_norm_eps": config.eps,
        "tied_embeddings": config.tied,
    }


def _content(name: str, tensor: Tensor, dtype: str | None) -> tuple[DType, Tensor]:
    """The dtype in which a tensor is written, and its bytes."""
    own = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}.get(tensor.dtype)
    chosen = own if dtype is None else WRITTEN[dtype]
    if chosen is not None and chosen.plain is None and tensor.ndim < 2:
        chosen = own
    if chosen is None:
        plain = ", ".join(called for called, each in WRITTEN.items() if each.plain)  # by which vectors are converted too
        raise ValueError(f"{name}: {tensor.dtype} is not in the format; choose one of {plain}")
    held = tensor.detach().cpu() if chosen.plain is None else tensor.detach().cpu().to(chosen.plain)
    if not fits(chosen, held):
        raise ValueError(f"{name}: NaN or infinity as {chosen.name}; the checkpoint is damaged, or the dtype too narrow")
    return chosen, encoded(chosen, held)


def _entry(name: str, dtype: DType, shape: tuple[int, ...], offset: int, size: int) -> bytes:
    called = name.encode()
    numbers = struct.pack(f"<BB{len(shape) + 2}Q", CODES[dtype], len(shape), *shape, offset, size)
    return struct.pack("<H", len(called)) + called + numbers


def _header(tensors: int, metadata_bytes: int, index: int, data: int) -> bytes:
    def with_checksum(checksum: int) -> bytes:
        return HEADER.pack(MAGIC, *VERSION, ROW_MAJOR, tensors, HEADER.size, metadata_bytes, index, data, checksum, bytes(20))

    return with_checksum(header_checksum(with_checksum(0)))


def _checksum(file: BinaryIO) -> int:
    file.seek(0)
    found = 0
    while chunk := file.read(2**20):
        found = zlib.crc32(chunk, found)
    return found


def _write(file: BinaryIO, at: int, content: bytes | memoryview) -> None:
    file.seek(at)
    file.write(content)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
