"""The container of `.apr` files, version 2: header, JSON metadata, tensor index, tensors, checksum. All of it is checked before it is used.

The format is that of paiml/aprender (crates/apr-format/src/v2).
The integers are little-endian. The header of 64 bytes says where the parts are, each of them padded to 64 bytes:

    0 magic "APR\\0"     4 major, minor version   6 flags       8 number of tensors   12 offset of the metadata   20 their bytes
    24 offset of the index   32 offset of the data   40 CRC-32 of bytes 0 to 39 and 44 to 63   44 zeros

An index entry is the name (its length first), the dtype's code, the number of dimensions, the dimensions, the offset from the data and the
number of bytes. The last four bytes of a file are the CRC-32 of all before; older files lack them.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from blackswan.impl import strict_json
from blackswan.impl.apr_dtypes import DTYPES, DType
from blackswan.impl.spans import FileState, state_of

SUFFIX = ".apr"
MAGIC, OTHER_MAGICS = b"APR\0", {b"APRN": "version 1 of the format", b"APR2": "a draft of the format"}
HEADER = struct.Struct("<4sBBHIQIQQI20s")
VERSION, ALIGNMENT, CHECKED, FOOTER = (2, 0), 64, 40, 4
MOST_METADATA, MOST_BEFORE_DATA, MOST_NAME, MOST_DIMENSIONS = 2**24, 2**28, 256, 8
ROW_MAJOR = 0x400
REFUSED_FLAGS = {
    0x1: "compressed with LZ4",
    0x2: "compressed with ZSTD",
    0x4: "encrypted",
    0x8: "signed",
    0x10: "sharded",
    0x800: "column-major",
}
IGNORED_FLAGS = 0x20 | 0x40 | 0x80 | 0x100 | 0x200 | ROW_MAJOR
"""Quantized, filterbank, model card, streaming, vocabulary: what they announce is seen in the file itself; older files say no row-major."""
DAMAGED, CUT_OFF = "it is damaged; copy it again", "it is cut off or damaged; copy it again"
HEADS = ("lm_head.weight", "output.weight")
"""A tied one may stand in the index with its shape and no bytes."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the index; `start` counts from the beginning of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class AprFile:
    """A file whose header, metadata and index were checked against each other and against its length; `end` is that of the tensors."""

    path: Path
    state: FileState
    metadata: dict[str, Any]
    entries: dict[str, Entry]
    end: int

    def require_checksum(self) -> None:
        """Raises a ValueError where the file ends with a checksum that is not that of its content. It is read once, a MiB at a time."""
        if self.state[0] == self.end:
            return
        found, remaining = 0, self.end
        with self.path.open("rb") as file:
            while remaining and (chunk := file.read(min(remaining, 2**20))):
                found, remaining = zlib.crc32(chunk, found), remaining - len(chunk)
            stored = int.from_bytes(file.read(FOOTER), "little")
        if found != stored:
            _refuse(self.path, "footer", f"the checksum is {stored:#010x}, and that of the content {found:#010x}: {DAMAGED}")


@dataclass(frozen=True)
class _Header:
    """The numbers of a header that was checked."""

    tensors: int
    metadata: int
    metadata_bytes: int
    index: int
    data: int


def is_apr(path: Path) -> bool:
    """Whether a path names an .apr file rather than a folder; it need not be there."""
    return path.suffix == SUFFIX and not path.is_dir()


def open_apr(path: Path) -> AprFile:
    """What an .apr file holds, without its tensors.

    Raises a FileNotFoundError where there is no such file, and a ValueError that names the file and the field for one that is damaged, cut
    off or of a kind that cannot be read. It takes memory for no more than the file has.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a model in the format .apr")
    state = state_of(path)
    with path.open("rb") as file:
        header = _header(path, file.read(HEADER.size), state[0])
        metadata = _metadata(path, _part(path, file, header.metadata, header.metadata_bytes))
        index = _part(path, file, header.index, header.data - header.index)
    entries = list(_entries(path, index, header, state[0]))
    _require_apart(path, entries)
    end = max((header.data, *(entry.start + _padded(entry.size) for entry in entries)))
    _require_length(path, state[0], end)
    return AprFile(path, state, metadata, {entry.name: entry for entry in entries}, end)


def header_checksum(header: bytes) -> int:
    """CRC-32 of a header without the field that holds it."""
    return zlib.crc32(header[CHECKED + 4 :], zlib.crc32(header[:CHECKED]))


def _header(path: Path, raw: bytes, length: int) -> _Header:
    if len(raw) < HEADER.size:
        _refuse(path, "header", f"the file has {len(raw)} bytes, and a header has {HEADER.size}: {CUT_OFF}")
    magic, major, minor, flags, tensors, metadata, metadata_bytes, index, data, checksum, reserved = HEADER.unpack(raw)
    if magic != MAGIC:
        known = f", {OTHER_MAGICS[magic]}" if magic in OTHER_MAGICS else ""
        _refuse(path, "magic", f"{magic!r}{known}; expected {MAGIC!r}, an .apr file of version 2")
    _require_checksum(path, raw, checksum)
    if (major, minor) != VERSION:
        _refuse(path, "version", f"{major}.{minor}; expected {VERSION[0]}.{VERSION[1]}")
    _require_flags(path, flags)
    if any(reserved):
        _refuse(path, "reserved bytes", "not zero: a later version may have written the file")
    if metadata_bytes > MOST_METADATA:
        _refuse(path, "metadata length", f"{metadata_bytes} bytes; expected {MOST_METADATA} at most")
    header = _Header(tensors, metadata, metadata_bytes, index, data)
    _require_inside(path, header, length)
    return header


def _require_inside(path: Path, header: _Header, length: int) -> None:
    after = header.metadata + header.metadata_bytes
    if not HEADER.size <= header.metadata <= after <= header.index <= header.data <= min(length, MOST_BEFORE_DATA):
        places = f"metadata from {header.metadata} to {after}, index at {header.index}, data at {header.data}, in a file of {length} bytes"
        _refuse(path, "offsets", f"{places}; expected them in that order and inside the file, the data in its first {MOST_BEFORE_DATA}")


def _require_checksum(path: Path, raw: bytes, checksum: int) -> None:
    found = header_checksum(raw)
    if found != checksum:
        _refuse(path, "header checksum", f"{checksum:#010x}, and that of the header {found:#010x}: {DAMAGED}")


def _require_flags(path: Path, flags: int) -> None:
    for bit, said in REFUSED_FLAGS.items():
        if flags & bit:
            _refuse(path, "flags", f"{flags:#06x} says that the file is {said}; expected a plain one, in row-major order")
    if flags & ~IGNORED_FLAGS:
        _refuse(path, "flags", f"{flags:#06x} has bits of an unknown meaning, {flags & ~IGNORED_FLAGS:#06x}")


def _part(path: Path, file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    content = file.read(length)
    if len(content) < length:
        _refuse(path, "length", "it became shorter while it was read")
    return content


def _metadata(path: Path, content: bytes) -> dict[str, Any]:
    """One object. Older files repeat keys, of which the last one counts; options that are null are as good as absent."""
    try:
        found = strict_json.loads(content, repeated=True)
    except ValueError as error:
        _refuse(path, "metadata", f"not valid JSON ({error})")
    if not isinstance(found, dict):
        _refuse(path, "metadata", "expected a JSON object")
    return {key: value for key, value in found.items() if value is not None}


def _entries(path: Path, index: bytes, header: _Header, length: int) -> Iterator[Entry]:
    """The tensors of the index, each one inside the file, in the order of their names."""
    at, before = 0, b""
    for number in range(header.tensors):
        try:
            (size,) = struct.unpack_from("<H", index, at)
            name = index[at + 2 : at + 2 + size]
            code, dimensions = struct.unpack_from("<BB", index, at + 2 + size)
            if size > MOST_NAME or dimensions > MOST_DIMENSIONS:
                said = f"a name of {size} bytes, {dimensions} dimensions; expected {MOST_NAME} and {MOST_DIMENSIONS} at most"
                _refuse(path, f"index, entry {number}", said)
            *shape, offset, count = struct.unpack_from(f"<{dimensions + 2}Q", index, at + 4 + size)
        except struct.error:
            _refuse(path, f"index, entry {number}", f"it ends beyond the index; the header says that there are {header.tensors} tensors")
        if number:
            _require_after(path, before, name)
        at, before = at + 4 + size + 8 * (dimensions + 2), name
        yield _entry(path, name, code, tuple(shape), (header.data, offset, count, length))
    if any(index[at:]):
        _refuse(path, "index", f"there is more than the {header.tensors} tensors that the header says")


def _require_after(path: Path, before: bytes, name: bytes) -> None:
    if name <= before:
        problem = "is there twice" if name == before else f"comes after {_shown(before)}; expected names in the order of their bytes"
        _refuse(path, "index", f"tensor {_shown(name)} {problem}")


def _entry(path: Path, name: bytes, code: int, shape: tuple[int, ...], place: tuple[int, int, int, int]) -> Entry:
    data, offset, size, length = place
    try:
        text = name.decode()
    except UnicodeDecodeError:
        _refuse(path, "index", f"the tensor's name {_shown(name)} is not UTF-8")
    where = f"tensor {text!r}"
    if code not in DTYPES:
        stale = "; 2 was BF16 in old files and is something else in others" if code == 2 else ""
        _refuse(path, where, f"its dtype has the code {code}{stale}; expected one of {', '.join(map(str, sorted(DTYPES)))}")
    dtype = DTYPES[code]
    problem = None if size == 0 and text in HEADS else dtype.size_problem(shape, size)
    if problem:
        _refuse(path, where, f"{dtype.name} of shape {list(shape)} with a number of bytes of {problem}")
    if data + offset + size > length:
        _refuse(path, where, f"bytes {data + offset} to {data + offset + size} of a file of {length}: {CUT_OFF}")
    return Entry(text, dtype, shape, data + offset, size)


def _require_length(path: Path, length: int, end: int) -> None:
    if length not in (end, end + FOOTER):
        problem = CUT_OFF if length < end else "what follows the tensors is no checksum of four bytes"
        _refuse(path, "length", f"{length} bytes, and the index says {end} or, with a checksum, {end + FOOTER}: {problem}")


def _require_apart(path: Path, entries: list[Entry]) -> None:
    held = sorted((entry for entry in entries if entry.size), key=lambda entry: entry.start)
    for one, other in pairwise(held):
        if one.start + one.size > other.start:
            _refuse(path, f"tensor {other.name!r}", f"it overlaps {one.name!r}: both hold byte {other.start}")


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _shown(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))


def _refuse(path: Path, field: str, said: str) -> NoReturn:
    raise ValueError(f"{path}: {field}: {said}")
