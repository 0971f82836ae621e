"""Token streams on disk: plain little-endian files of token ids, an index beside them, and batches of rows for language-model training.

A shard is a file of nothing but ids (uint16 where the vocabulary allows it, else uint32), as nanoGPT and llm.c keep theirs; index.json
lists the shards in order, with the number of tokens and the SHA-256 of each. Together they are one stream of tokens.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blackswan.impl import strict_json
from blackswan.impl.apr import is_apr, open_apr
from blackswan.impl.apr_checkpoint import SPECIAL_TOKENS
from blackswan.impl.checkpoint import CONFIG
from blackswan.impl.corpus import lines_of
from blackswan.impl.folder import whole_folder
from blackswan.impl.samples import Indices, epoch_order
from blackswan.impl.spans import FileState, read_span, state_of
from blackswan.impl.tokens import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INDEX = "index.json"
SHARD_TOKENS = 100_000_000
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_CHUNK = 1 << 24
_KEYS = {"dtype", "shards"}
Ids = NDArray[Any]


@dataclass(frozen=True)
class TokenBatch:
    """Tokens (int64) and mask (true at real tokens), both [batch, seq]."""

    input_ids: Tensor
    mask: Tensor

    @property
    def predicted(self) -> int:
        """Number of tokens that have a real token before them in their row: what a mean loss is a mean over."""
        return int((self.mask[:, :-1] & self.mask[:, 1:]).sum())

    def split(self, size: int) -> "Iterator[TokenBatch]":
        """Micro-batches of `size` rows, the last one may be smaller."""
        return (TokenBatch(*part) for part in zip(torch.split(self.input_ids, size), torch.split(self.mask, size), strict=True))

    def to(self, device: torch.device) -> "TokenBatch":
        """The batch on a device."""
        return TokenBatch(self.input_ids.to(device), self.mask.to(device))


class _Shard:
    """The ids of a checked file, read when they are asked for: a map of each would keep a file open, and there may be thousands."""

    def __init__(self, path: Path, dtype: np.dtype[Any], tokens: int, state: FileState) -> None:
        self._path, self._dtype, self._tokens, self._state = path, dtype, tokens, state

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, span: slice) -> Ids:
        start, stop, _ = span.indices(self._tokens)
        size = self._dtype.itemsize
        try:
            content = read_span(self._path, start * size, max(stop - start, 0) * size, self._state)
        except ValueError:
            raise ValueError(f"{self._path}: changed since the stream was opened; leave it alone while it is read") from None
        return content.numpy().view(self._dtype)


class TokenShards:
    """A folder of shards as one stream, of which no more is held in memory than is asked for.

    Every shard is read once at opening. Raises a FileNotFoundError for a missing file, and a ValueError that names the file for a damaged
    index, a file of another length or content than the index says, and an id that is not below `vocab` (with its offset in tokens).
    """

    def __init__(self, folder: Path, vocab: int) -> None:
        index = _read_index(folder / INDEX)
        self.folder, self.vocab = folder, vocab
        self.digest = hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()
        dtype = DTYPES[index["dtype"]]
        self._shards = [_open_shard(folder / entry["file"], entry, dtype, vocab) for entry in index["shards"]]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self._ends[-1]) if self._shards else 0

    def read(self, start: int, stop: int) -> Ids:
        """The ids (int64) of the tokens start … stop − 1 of the stream, across shards."""
        parts = []
        for number in range(int(np.searchsorted(self._ends, start, side="right")), len(self._shards)):
            first = int(self._ends[number]) - len(self._shards[number])
            if first >= stop:
                break
            parts.append(self._shards[number][max(start - first, 0) : stop - first])
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


class TokenBatches:
    """The stream in rows of `seq` tokens, in batches of `batch` rows.

    A row begins with the last token of the row before, so that over an epoch every token but the first of the stream is predicted exactly
    once. The last row is padded and the last batch smaller: no token is left out. With a seed the rows of each epoch are in a random order
    of its own, without one in the order of the stream.
    """

    def __init__(self, shards: TokenShards, *, batch: int, seq: int, seed: int | None = None) -> None:
        if batch < 1 or seq < 2:
            raise ValueError(f"batch {batch} and seq {seq}: expected at least one row of two tokens, one of them to predict")
        self.shards, self.batch, self.seq, self.seed = shards, batch, seq, seed

    @property
    def rows(self) -> int:
        """Number of rows of an epoch."""
        return -(-max(len(self.shards) - 1, 0) // (self.seq - 1))

    def __len__(self) -> int:
        """Number of batches of an epoch; 0 where there are fewer than two tokens."""
        return -(-self.rows // self.batch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[TokenBatch]:
        """The batches of an epoch (a function of the seed and its number) from batch `start` on. It ends; it does not begin again."""
        order: Indices = range(self.rows) if self.seed is None else epoch_order(self.rows, self.seed, epoch)
        for first in range(start * self.batch, self.rows, self.batch):
            yield self._rows(order[first : first + self.batch])

    def _rows(self, rows: Indices) -> TokenBatch:
        input_ids = torch.zeros(len(rows), self.seq, dtype=torch.int64, device="cpu")
        mask = torch.zeros(len(rows), self.seq, dtype=torch.bool, device="cpu")
        for index, row in enumerate(rows):
            start = int(row) * (self.seq - 1)
            ids = self.shards.read(start, min(start + self.seq, len(self.shards)))
            input_ids[index, : len(ids)] = torch.from_numpy(ids)
            mask[index, : len(ids)] = True
        return TokenBatch(input_ids, mask)


def write_shards(folder: Path, documents: Iterable[Sequence[int]], vocab: int, shard_tokens: int = SHARD_TOKENS) -> int:
    """Writes documents, lists of ids below `vocab`, one after another; returns the number of tokens.

    The folder appears whole or not at all. Raises a FileExistsError where it exists, and a ValueError that names the document for an id
    outside the vocabulary or one that is no integer, and for a stream without tokens.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens is {shard_tokens}: expected at least 1")
    name = "uint16" if vocab <= 2**16 else "uint32"
    with whole_folder(folder) as partial:
        entries = [
            _write_shard(partial / f"shard-{number:05d}.bin", ids)
            for number, ids in enumerate(_pieces(_checked(documents, vocab), DTYPES[name], shard_tokens))
        ]
        if not entries:
            raise ValueError(f"{folder}: no tokens to write; the documents are empty")
        (partial / INDEX).write_text(json.dumps({"dtype": name, "shards": entries}, indent=2) + "\n")
    return sum(int(entry["tokens"]) for entry in entries)


def tokenize(corpus: Path, tokenizer: "Tokenizer", end_token: int) -> Iterator[list[int]]:
    """The ids of each document, ended by `end_token`. A .jsonl file has a document in each line, under `text` or where there is
    none `input`; any other file is one document. Raises a ValueError that names file and line for a line without one.
    """
    return ([*tokenizer.encode(text, add_special_tokens=False).ids, end_token] for text in _texts(corpus))


def load_encoder(path: Path) -> "Tokenizer":
    """The tokenizer of a tokenizer.json. Raises a FileNotFoundError where it is missing, and as `read_tokenizer` does."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; token ids mean nothing without the tokenizer of the model")
    return read_tokenizer(path)


def _texts(corpus: Path) -> Iterator[str]:
    try:
        if corpus.suffix != ".jsonl":
            yield corpus.read_bytes().decode("utf-8")  # read_text would make other line ends into newlines
            return
        with corpus.open("rb") as lines:
            for number, line in enumerate(lines_of(lines, str(corpus)), 1):
                yield _text(line, f"{corpus}:{number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{corpus}: not UTF-8 ({error})") from None


def _text(line: bytes, where: str) -> str:
    try:
        value = strict_json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not a JSON object ({error})") from None
    text = value.get("text", value.get("input")) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{where}: no text; expected an object such as {{"text": "…"}} or {{"input": "…"}}')
    try:
        strict_json.require_text(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return text


def _checked(documents: Iterable[Sequence[int]], vocab: int) -> Iterator[Sequence[int]]:
    for number, ids in enumerate(documents):
        found = np.asarray(ids)
        if found.ndim != 1:
            raise ValueError(f"document {number}: its tokens have shape {list(found.shape)}; expected one dimension")
        if len(ids) and not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(position for position, token in enumerate(ids) if not 0 <= token < vocab)
            raise ValueError(f"document {number}: token {wrong} is {ids[wrong]}, but the vocabulary has {vocab} tokens, 0 to {vocab - 1}")
        if found.dtype.kind not in "biu" and len(ids):
            raise ValueError(f"document {number}: its tokens have dtype {found.dtype}; expected integers")
        yield ids


def _pieces(documents: Iterable[Sequence[int]], dtype: np.dtype[Any], size: int) -> Iterator[Ids]:
    """The stream cut into pieces of `size` tokens, the last may be shorter; documents may cross a cut."""
    waiting: list[Ids] = []
    count = 0
    for document in documents:
        waiting.append(np.array(document, dtype))  # a copy: the caller may fill one array again and again
        count += len(document)
        while count >= size:
            stream = np.concatenate(waiting)
            yield stream[:size]
            waiting, count = [stream[size:]], count - size
    if count:
        yield np.concatenate(waiting)


def _write_shard(path: Path, ids: Ids) -> dict[str, Any]:
    content = ids.tobytes()
    path.write_bytes(content)
    return {"file": path.name, "tokens": len(ids), "sha256": hashlib.sha256(content).hexdigest()}


def _open_shard(path: Path, entry: dict[str, Any], dtype: np.dtype[Any], vocab: int) -> _Shard:
    """The ids of a shard, after a look at every one."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, but {INDEX} lists it; copy the missing shard")
    state = state_of(path)
    found, expected = state[0], entry["tokens"] * dtype.itemsize
    if found != expected:
        raise ValueError(f"{path}: {found} bytes; {INDEX} says {entry['tokens']} tokens, {expected} bytes; copy or write it again")
    ids: Ids = np.memmap(path, dtype, "r")
    digest = hashlib.sha256()
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        if int(chunk.max()) >= vocab:
            at = int(np.argmax(chunk >= vocab))
            raise ValueError(
                f"{path}: token {start + at} is {chunk[at]}, but the vocabulary has {vocab} tokens, 0 to {vocab - 1}; "
                "were the shards written with the tokenizer of this model?"
            )
        digest.update(chunk.tobytes())
    if digest.hexdigest() != entry["sha256"]:
        raise ValueError(f"{path}: its content is not what {INDEX} says (SHA-256); copy or write it again")
    return _Shard(path, dtype, len(ids), state)


def _read_index(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a folder written by blackswan tokenize")
    try:
        index = strict_json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(index, dict) or index.keys() != _KEYS or index["dtype"] not in [*DTYPES] or not isinstance(index["shards"], list):
        raise ValueError(f"{path}: expected an object of {', '.join(sorted(_KEYS))}, dtype one of {', '.join(DTYPES)}, shards a list")
    for number, entry in enumerate(index["shards"]):
        if not _is_entry(entry):
            raise ValueError(f"{path}: shards[{number}] must hold file (a name in the same folder), tokens (1 or more) and sha256")
    names = [entry["file"] for entry in index["shards"]]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: {next(name for name in names if names.count(name) > 1)!r} is listed twice; every token counts once")
    return index


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"file", "tokens", "sha256"}:
        return False
    file, tokens = entry["file"], entry["tokens"]
    return isinstance(file, str) and Path(file).name == file and type(tokens) is int and tokens > 0 and isinstance(entry["sha256"], str)


def end_token(model: Path) -> int:
    """`eos_token_id` of the model's config.json, or of the metadata in an .apr file."""
    path, key = (model, SPECIAL_TOKENS["eos_token_id"]) if is_apr(model) else (model / CONFIG, "eos_token_id")
    try:
        values = open_apr(model).metadata if is_apr(model) else strict_json.loads(path.read_bytes())
        value = values.get(key)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); give --end-token ID") from None
    if type(value) is not int:
        raise ValueError(f"{path}: {key} is {value!r}: expected one id that ends a document; give --end-token ID")
    return value
