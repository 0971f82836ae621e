"""The format `.apr`, version 2, in NumPy: files made byte by byte, and read again, without `impl`.

The description is that of paiml/aprender (crates/apr-format, crates/aprender-quant); Q4_K and Q6_K are GGML's blocks.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from blackswan.reference.table import Array

CODES = {"F32": 0, "F16": 1, "I64": 5, "Q4_K": 12, "Q6_K": 14, "BF16": 30, "AprQ4": 128, "AprQ8": 129}
DTYPES = {**{code: dtype for dtype, code in CODES.items()}, 8: "AprQ4", 9: "AprQ8"}
"""By their codes; older files say 8 and 9, which GGML has for others, and newer ones do not."""
NO_WEIGHTS = {"F64": (3, 8), "I32": (4, 4), "I64": (5, 8), "I8": (6, 1), "U8": (7, 1)}
"""Code and bytes of an element of the dtypes that hold no weights."""
PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
BLOCKS = {"Q4_K": (256, 144), "Q6_K": (256, 210), "AprQ4": (32, 18)}
"""Elements and bytes of a block."""
FIELDS = ("magic", "major", "minor", "flags", "tensors", "metadata", "metadata_bytes", "index", "data")
HEADER = struct.Struct("<4sBBHIQIQQ")
"""Bytes 0 to 39; the checksum and twenty zeros follow."""
ROW_MAJOR = 0x400
GGUF_NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


@dataclass(frozen=True)
class Stored:
    """A tensor as the index has it: the code of its dtype, and its bytes. `offset` and `size` are what the index says where it errs."""

    name: str
    code: int
    shape: tuple[int, ...]
    content: bytes
    offset: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class Image:
    """The parts of a file. `header` has fields that are to be other than they follow from the rest; the index is as `tensors` are.

    The contents lie in the file in that order too, or in the `order` of numbers of tensors. So many bytes of `room` come before each part.
    """

    metadata: Mapping[str, Any] | bytes
    tensors: Sequence[Stored]
    header: Mapping[str, Any] = field(default_factory=dict)
    footer: bool = True
    order: Sequence[int] | None = None
    room: int = 0

    def pack(self) -> bytes:
        """The bytes of the file, with right checksums."""
        text = self.metadata if isinstance(self.metadata, bytes) else json.dumps(self.metadata).encode()
        content, offsets = b"", [0] * len(self.tensors)
        for place in self.order or range(len(self.tensors)):
            offsets[place] = len(content)
            content += padded(self.tensors[place].content)
        entries = b"".join(map(_entry, self.tensors, offsets))
        room = bytes(self.room)
        index = 64 + len(room + padded(text) + room)
        header: dict[str, Any] = {
            "magic": b"APR\0",
            "major": 2,
            "minor": 0,
            "flags": ROW_MAJOR,
            "tensors": len(self.tensors),
            "metadata": 64 + len(room),
        }
        header |= {"metadata_bytes": len(text), "index": index, "data": index + len(padded(entries) + room), **self.header}
        first, reserved = HEADER.pack(*(header[name] for name in FIELDS)), header.get("reserved", bytes(20))
        checksum = header.get("checksum", zlib.crc32(first + reserved))
        body: bytes = first + struct.pack("<I", checksum) + reserved + room + padded(text) + room + padded(entries) + room + content
        return body + (struct.pack("<I", zlib.crc32(body)) if self.footer else b"")


def _entry(tensor: Stored, place: int) -> bytes:
    name = tensor.name.encode(errors="surrogateescape")
    offset, size = (one if said is None else said for one, said in ((place, tensor.offset), (len(tensor.content), tensor.size)))
    numbers = struct.pack(f"<{len(tensor.shape) + 2}Q", *tensor.shape, offset, size)
    return struct.pack("<H", len(name)) + name + bytes([tensor.code, len(tensor.shape)]) + numbers


def padded(content: bytes) -> bytes:
    """With zeros up to a multiple of 64 bytes."""
    return content + bytes(-len(content) % 64)


def plain(name: str, value: Array, dtype: str) -> Stored:
    """An array stored as F32, F16 or BF16."""
    return Stored(name, CODES[dtype], value.shape, np.ascontiguousarray(value.astype(PLAIN[dtype])).tobytes())


def decode(dtype: str, content: bytes, shape: tuple[int, ...]) -> Array:
    """The array in the bytes of a tensor: its own dtype where it is plain, else float32 by the formula of the dtype.

    The rows of Q4_K and Q6_K may be padded to whole blocks, which the number of bytes shows.
    """
    raw, count = np.frombuffer(content, np.uint8), int(np.prod(shape))
    if dtype in PLAIN:
        return np.asarray(raw.view(PLAIN[dtype]).reshape(shape))
    if dtype == "AprQ8":
        scale = raw[:4].view(np.float32)
        return np.asarray((raw[4:].view(np.int8).astype(np.float32) * scale).reshape(shape))
    elements, size = BLOCKS[dtype]
    values = _BLOCK[dtype](raw.reshape(-1, size)).reshape(-1)
    if len(content) == -(-count // elements) * size:
        return values[:count].reshape(shape)
    return np.ascontiguousarray(values.reshape(int(np.prod(shape[:-1])), -1)[:, : shape[-1]]).reshape(shape)


def _apr_q4(blocks: Array) -> Array:
    """Element i is in byte i // 2, the even ones in its low half: x = (nibble − 8) · s."""
    i = np.arange(32)
    nibbles = (blocks[:, 2 + i // 2] >> (4 * (i % 2))) & 15
    return np.asarray((nibbles.astype(np.float32) - np.float32(8)) * _half(blocks, 0))


def _q4_k(blocks: Array) -> Array:
    """Element 32 j + l of sub-block j: x = d · sc_j · q − dmin · m_j."""
    d, dmin, s = _half(blocks, 0), _half(blocks, 2), blocks[:, 4:16].astype(int)
    values = np.empty((len(blocks), 256), np.float32)
    for j in range(8):
        scale = s[:, j] & 63 if j < 4 else (s[:, j + 4] & 15) | (s[:, j - 4] >> 6) << 4
        minimum = s[:, j + 4] & 63 if j < 4 else (s[:, j + 4] >> 4) | (s[:, j] >> 6) << 4
        byte = blocks[:, 16 + 32 * (j // 2) :][:, :32]
        q = (byte >> 4 if j % 2 else byte & 15).astype(np.float32)
        values[:, 32 * j :][:, :32] = (d * scale[:, None].astype(np.float32)) * q - dmin * minimum[:, None].astype(np.float32)
    return values


def _q6_k(blocks: Array) -> Array:
    """Element i = 128 h + 32 k + l: x = d · sc[i // 16] · ((low | high << 4) − 32)."""
    ql, qh, scales = blocks[:, :128].astype(int), blocks[:, 128:192].astype(int), np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    i = np.arange(256)
    h, k, low = i // 128, i // 32 % 4, i % 32
    nibble = (ql[:, 64 * h + 32 * (k % 2) + low] >> (4 * (k // 2))) & 15
    codes = (nibble | ((qh[:, 32 * h + low] >> (2 * k)) & 3) << 4) - 32
    return np.asarray((_half(blocks, 208) * scales[:, i // 16].astype(np.float32)) * codes.astype(np.float32))


_BLOCK = {"AprQ4": _apr_q4, "Q4_K": _q4_k, "Q6_K": _q6_k}


def _half(blocks: Array, at: int) -> Array:
    """The float16 at that byte of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Stored]]:
    """Header, metadata and tensors of a file that is as it should be; nothing is checked."""
    content = path.read_bytes()
    header = dict(zip(FIELDS, HEADER.unpack(content[:40]), strict=True))
    header |= {"checksum": int.from_bytes(content[40:44], "little"), "reserved": content[44:64]}
    start, at, found = header["metadata"], header["index"], {}
    for _ in range(header["tensors"]):
        length = int.from_bytes(content[at : at + 2], "little")
        name, (code, dimensions) = content[at + 2 :][:length].decode(), content[at + 2 + length :][:2]
        *shape, offset, size = struct.unpack_from(f"<{dimensions + 2}Q", content, at + 4 + length)
        found[name] = Stored(name, code, tuple(shape), content[header["data"] + offset :][:size], offset, size)
        at += 4 + length + 8 * (dimensions + 2)
    return header, json.loads(content[start : start + header["metadata_bytes"]]), found


def array(stored: Stored) -> Array:
    """The array that a tensor stands for."""
    return decode(DTYPES[stored.code], stored.content, stored.shape)


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face calls so."""
    stem, _, kind = name.rpartition(".")
    layer = stem.split(".", 3)
    return f"blk.{layer[2]}.{GGUF_NAMES[layer[3]]}.{kind}" if len(layer) == 4 else f"{GGUF_NAMES[stem]}.{kind}"


def gguf_rows(value: Array, heads: int) -> Array:
    """A Llama's rows of queries or keys as GGUF has them: the two that turn together beside each other (llama.cpp, convert_hf_to_gguf)."""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def huggingface_rows(value: Array, heads: int) -> Array:
    """The inverse of `gguf_rows`."""
    return value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
