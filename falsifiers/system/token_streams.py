"""Token shards on disk and what is read from them: complete, in a known order, refused when damaged."""

import errno
import hashlib
import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import StreamRows, Tokens
from blackswan.falsifiers.system.corpora import overwritten
from blackswan.falsifiers.system.footprint import most_held
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

VOCAB = 4096
LONG = 2**24 + 2**12
"""Tokens of a shard that nobody reads at once."""
DOCUMENTS, WORDS = 1500, 333
MORE_FILES = 30
INDEX = "index.json"
DTYPES = {"uint16": "<u2", "uint32": "<u4"}


def write_shards(folder: Path, pieces: Sequence[Array], dtype: str = "uint16") -> Path:
    """Shards as the format has them, written without `impl`: plain little-endian ids, and an index with count and SHA-256 of each."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, piece in enumerate(pieces):
        content = piece.astype(DTYPES[dtype]).tobytes()
        file = f"part-{number}.bin"
        (folder / file).write_bytes(content)
        entries.append({"file": file, "tokens": len(piece), "sha256": hashlib.sha256(content).hexdigest()})
    (folder / INDEX).write_text(json.dumps({"dtype": dtype, "shards": entries}))
    return folder


def _renamed(folder: Path, rng: Generator) -> Path:
    """The same shards by other names, whose order says nothing."""
    index = json.loads((folder / INDEX).read_text())
    for entry in index["shards"]:
        name = f"{rng.integers(10**6)} {entry['file']}"
        (folder / entry["file"]).rename(folder / name)
        entry["file"] = name
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def _linked(folder: Path) -> Path:
    """The same files as links to others, which have other names elsewhere, as in Hugging Face's cache."""
    (folder.parent / "blobs").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = path.rename(folder.parent / "blobs" / str(number))
        path.symlink_to(blob)
    return folder


def pieces_of(stream: Array, rng: Generator) -> list[Array]:
    """The stream cut at random places into one to four shards."""
    cuts = np.unique(rng.integers(1, len(stream), rng.integers(0, 4)))
    return np.split(stream, cuts)


@contextmanager
def _stream(trial: Trial) -> Iterator[tuple[Array, Tokens, int]]:
    """A stream whose tokens all differ, the first and the last of a vocabulary among them, how it is read from disk, and an epoch of it."""
    rng = trial.rng("stream")
    vocab = int(rng.choice([VOCAB, 2**16, 2**16 + 1, 151_936]))
    stream = rng.permutation([*range(200), *range(vocab - 200, vocab)])[: int(rng.integers(2, 400))]
    with tempfile.TemporaryDirectory() as parent:
        dtype = str(rng.choice([*DTYPES])) if vocab <= 2**16 else "uint32"
        pieces = np.split(stream, len(stream)) if trial.seed % 4 == 0 else pieces_of(stream, rng)
        folder = _linked(_renamed(write_shards(Path(parent) / "tokens", pieces, dtype), rng))
        batch, seq, seed = int(rng.integers(1, 6)), int(rng.integers(2, 24)), int(rng.integers(100))
        yield stream, Tokens(folder, vocab, batch, seq, seed), int(rng.integers(5))


@contextmanager
def _few_files() -> Iterator[None]:
    """Inside, this process may have few files open at once, as it may a thousand without this."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(each.name) for each in Path("/dev/fd").iterdir()}
    free = [number for number in range(len(taken) + MORE_FILES + 1) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(usual[0], free[MORE_FILES]), usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def epoch_predicts_every_token_once(trial: Trial) -> Iterator[Comparison]:
    """The pairs (token, next token) within rows over an epoch are the stream's, each once; rows and batches are full but for the last.

    Shards may be files of which the process has no more right than to read them.
    """
    with _stream(trial) as (stream, tokens, epoch), _few_files():
        wanted = np.stack([stream[:-1], stream[1:]], axis=1)
        shuffled, in_order = (trial.pretrainer.epoch(given, epoch) for given in (tokens, replace(tokens, seed=None)))
    yield from same("pairs in order", wanted, _pairs(in_order))
    yield from same("pairs shuffled", _sorted(wanted), _sorted(_pairs(shuffled)))
    rows = -(-len(wanted) // (tokens.seq - 1))
    sizes = [min(tokens.batch, rows - first) for first in range(0, rows, tokens.batch)]
    for name, answer in (("shuffled", shuffled), ("in order", in_order)):
        yield from same(f"rows begin with real tokens, {name}", np.sort(~answer.mask, axis=1), ~answer.mask)
        yield from same(f"rows of each batch, {name}", sizes, answer.batches)
        yield from same(f"batches announced, {name}", len(sizes), answer.length)


def _pairs(answer: StreamRows) -> Array:
    """The neighbours in a row that are both real tokens, [pairs, 2]."""
    both = answer.mask[:, :-1] & answer.mask[:, 1:]
    return np.stack([answer.input_ids[:, :-1][both], answer.input_ids[:, 1:][both]], axis=1)


def _sorted(pairs: Array) -> Array:
    return np.asarray(pairs[np.lexsort(pairs.T[::-1])])


def position_is_restored(trial: Trial) -> Iterator[Comparison]:
    """An epoch from any batch on is the rest of the epoch, and the same twice.

    No two of the orders of neighbouring seeds, of 0, of one of more than 32 bits, of neighbouring epochs and of the stream are the same.
    """
    with _stream(trial) as (_, tokens, epoch):
        ask = trial.pretrainer.epoch
        whole = ask(tokens, epoch)
        yield from same("the epoch again", whole, ask(tokens, epoch))
        for start in sorted({0, whole.length // 2, whole.length - 1, whole.length}):
            rest, first = ask(tokens, epoch, start), sum(whole.batches[:start])
            for name in ("input_ids", "mask"):
                yield from same(f"{name} from batch {start}", getattr(whole, name)[first:], getattr(rest, name))
        if len(whole.mask) >= 12:  # two orders of twelve rows are the same once in 479 million
            seed = tokens.seed or 0
            orders = {
                f"seed {each}, epoch {of}": ask(replace(tokens, seed=each), of)
                for each in {0, seed, seed + 1, seed + 2**32}
                for of in (epoch, epoch + 1)
            }
            orders["the stream"] = ask(replace(tokens, seed=None), epoch)
            for one, other in combinations(orders, 2):
                alike = np.array_equal(orders[one].input_ids, orders[other].input_ids)
                yield value_at_most(f"{one} and {other} have the same order", float(alike), 0)


Damage = Callable[[Path, Generator], object]


def _index(change: Callable[[dict[str, Any]], object]) -> Damage:
    """The index changed."""

    def damage(folder: Path, rng: Generator) -> None:
        del rng
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def _with_token(draw: Callable[[Generator], int]) -> Damage:
    """An id that is not below the vocabulary, in a shard that is what its index says."""

    def damage(folder: Path, rng: Generator) -> None:
        pieces = [np.fromfile(folder / f"part-{number}.bin", "<u2") for number in (0, 1)]
        pieces[1][37] = draw(rng)
        write_shards(folder, pieces)

    return damage


def _with_token_of_32_bits(folder: Path, rng: Generator) -> None:
    """An id that a number of 32 bits with a sign does not hold, in a shard that is what its index says."""
    pieces = [np.fromfile(folder / f"part-{number}.bin", "<u2").astype(np.int64) for number in (0, 1)]
    pieces[1][37] = rng.integers(2**31, 2**32)
    write_shards(folder, pieces, "uint32")


def _bit(folder: Path, rng: Generator) -> None:
    """A flipped bit that leaves the id below the vocabulary."""
    content = bytearray((folder / "part-0.bin").read_bytes())
    content[2 * int(rng.integers(len(content) // 2))] ^= 1 << int(rng.integers(8))
    (folder / "part-0.bin").write_bytes(content)


def _cut(folder: Path, rng: Generator) -> None:
    content = (folder / "part-1.bin").read_bytes()
    (folder / "part-1.bin").write_bytes(content[: int(rng.integers(len(content)))])


def _append(path: Path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


def _twice(path: Path) -> None:
    """An index whose list of shards stands there again, with the first of them alone."""
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index)[:-1] + f', "shards": {json.dumps(index["shards"][:1])}}}')


DAMAGE: dict[str, tuple[Damage, str]] = {
    "id out of range": (_with_token(lambda rng: int(rng.integers(VOCAB, 2**16))), r"part-1\.bin.*token 37"),
    "id just out of range": (_with_token(lambda _: VOCAB), rf"part-1\.bin.*token 37 is {VOCAB}"),
    "id of 32 bits": (_with_token_of_32_bits, r"part-1\.bin.*token 37"),
    "flipped bit": (_bit, r"part-0\.bin"),
    "truncated shard": (_cut, r"part-1\.bin"),
    "longer shard": (lambda folder, _: _append(folder / "part-0.bin", b"\0\0"), r"part-0\.bin: 102 bytes.*50 tokens"),
    "a byte more": (lambda folder, _: _append(folder / "part-0.bin", b"\0"), r"part-0\.bin: 101 bytes.*50 tokens"),
    "missing shard": (lambda folder, _: (folder / "part-0.bin").unlink(), r"part-0\.bin"),
    "missing index": (lambda folder, _: (folder / INDEX).unlink(), r"index\.json"),
    "index is no JSON": (lambda folder, _: (folder / INDEX).write_text("{"), r"index\.json"),
    "key given twice": (lambda folder, _: _twice(folder / INDEX), r"index\.json.*shards"),
    "unknown dtype": (_index(lambda index: index.update(dtype="int8")), r"index\.json.*dtype"),
    "dtype that is no word": (_index(lambda index: index.update(dtype=["uint16"])), r"index\.json.*dtype"),
    "no shards": (_index(lambda index: index.pop("shards")), r"index\.json.*shards"),
    "negative count": (_index(lambda index: index["shards"][0].update(tokens=-1)), r"index\.json.*tokens"),
    "no tokens": (_index(lambda index: index["shards"][0].update(tokens=0)), r"index\.json.*tokens"),
    "count that is none": (_index(lambda index: index["shards"][0].update(tokens=50.0)), r"index\.json.*tokens"),
    "digest that is none": (_index(lambda index: index["shards"][0].update(sha256=7)), r"index\.json.*sha256"),
    "entry without a digest": (_index(lambda index: index["shards"][1].pop("sha256")), r"index\.json.*sha256"),
    "shards that are no list": (_index(lambda index: index.update(shards={"0": index["shards"][0]})), r"index\.json.*shards"),
    "shard listed twice": (_index(lambda index: index["shards"].append(index["shards"][0])), r"index\.json.*part-0"),
    "file anywhere": (_index(lambda index: index["shards"][0].update(file="/part-0.bin")), r"index\.json.*file"),
    "file by a detour": (_index(lambda index: index["shards"][0].update(file="./part-0.bin")), r"index\.json.*file"),
    "file elsewhere": (_index(lambda index: index["shards"][0].update(file="../part-0.bin")), r"index\.json.*file"),
}

ALIKE: dict[str, Damage] = {
    "index with a mark": lambda folder, _: (folder / INDEX).write_bytes(b"\xef\xbb\xbf" + (folder / INDEX).read_bytes()),
    "a key more": _index(lambda index: index.update(seed=1)),
    "a key more of a shard": _index(lambda index: index["shards"][0].update(made="today")),
}
"""What is no damage to whoever passes over it."""


def refuses_shards(trial: Trial) -> Iterator[Comparison]:
    """Each damage is refused by the name of the file, and a bad id by its offset, also in a shard that is read in pieces. What changes
    no token is refused so too, or changes nothing."""
    rng = trial.rng("damage")
    for name, (damage, message) in DAMAGE.items():
        with tempfile.TemporaryDirectory() as parent:
            folder = write_shards(Path(parent), [rng.integers(0, VOCAB, count) for count in (50, 60)])
            damage(folder, rng)
            yield trial.refuses(name, partial(trial.pretrainer.epoch, Tokens(folder, VOCAB, batch=2, seq=8), 0), message)
    for name, change in ALIKE.items():
        with tempfile.TemporaryDirectory() as parent:
            folder = write_shards(Path(parent), [rng.integers(0, VOCAB, count) for count in (50, 60)])
            ask = partial(trial.pretrainer.epoch, Tokens(folder, VOCAB, batch=2, seq=8), 0)
            expected = ask()
            change(folder, rng)
            try:
                found = ask()
            except SubjectError:
                yield trial.refuses(name, ask, r"index\.json", "ValueError")
            else:
                yield from same(f"{name}: tokens", expected.input_ids, found.input_ids)
    yield from _refuses_changes(trial, rng)
    yield from _refuses_a_long_shard(trial, [int(rng.integers(2**24)), int(rng.integers(2**24, LONG))])


def _refuses_changes(trial: Trial, rng: Generator) -> Iterator[Comparison]:
    """A shard that becomes longer, shorter or another of its size while the stream is read is not taken for the one that was looked at."""
    pieces = [rng.integers(0, VOCAB, count) for count in (50, 60)]
    for size in (59, 60, 61):
        with tempfile.TemporaryDirectory() as parent:
            tokens = Tokens(write_shards(Path(parent), pieces), VOCAB, batch=2, seq=8)
            other = rng.integers(0, VOCAB, size).astype(DTYPES["uint16"]).tobytes()
            ask = partial(trial.pretrainer.epoch, tokens, 0, meanwhile=partial(overwritten, tokens.folder / "part-1.bin", other))
            yield trial.refuses(f"a shard of {size} tokens in the place of 60", ask, r"part-1\.bin", "ValueError")
    with tempfile.TemporaryDirectory() as parent, _few_files():
        tokens, most = Tokens(write_shards(Path(parent), pieces), VOCAB, batch=2, seq=8), resource.getrlimit(resource.RLIMIT_NOFILE)
        ask = partial(trial.pretrainer.epoch, tokens, 0, meanwhile=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (0, most[1])))
        unopened = trial.refuses("a shard that the system does not open any more", ask, os.strerror(errno.EMFILE), "OSError")
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    yield unopened
    with tempfile.TemporaryDirectory() as parent:
        tokens = Tokens(write_shards(Path(parent), pieces), VOCAB, batch=2, seq=8)
        content, path = pieces[1].astype(DTYPES["uint16"]).tobytes(), tokens.folder / "part-1.bin"
        ask = partial(trial.pretrainer.epoch_of_changed, tokens, content, partial(overwritten, path, content[2:] + content[:2]))
        yield trial.refuses("a shard that changes once it was looked at, before its stream is open", ask, r"part-1\.bin", "ValueError")


def _refuses_a_long_shard(trial: Trial, places: Sequence[int]) -> list[Comparison]:
    """An id among the first millions is looked at, and one beyond them, which counts in the digest too."""
    with tempfile.TemporaryDirectory() as parent:
        stream, found = np.zeros(LONG, np.uint16), []
        for place in places:
            stream[:] = 0
            stream[place] = VOCAB
            folder = write_shards(Path(parent), [stream])
            ask = partial(trial.pretrainer.epoch, Tokens(folder, VOCAB, batch=1, seq=LONG), 0)
            found.append(trial.refuses("id out of range in a long shard", ask, rf"part-0\.bin.*token {place} is {VOCAB}"))
        np.memmap(folder / "part-0.bin", "<u2", "r+")[places[-1]] = 1
        return [*found, trial.refuses("another id in a long shard", ask, r"part-0\.bin")]


def stream_too_short(trial: Trial) -> Iterator[Comparison]:
    """A stream of one token, or of no shard, predicts nothing: an epoch without batches, and no row made up. Two tokens are one pair.

    So it is with rows of any length, of two tokens too, and batches of any size, and documents without a token add nothing.
    """
    token = trial.seed % VOCAB
    for count, pieces in enumerate(([], [[token]], [[token], [token]])):
        rows = max(count - 1, 0)
        for batch, seq in ((2, 8), (1, 2)):
            with tempfile.TemporaryDirectory() as parent:
                folder = write_shards(Path(parent), [np.array(piece) for piece in pieces])
                answer = trial.pretrainer.epoch(Tokens(folder, VOCAB, batch, seq, seed=0), 0)
            name = f"{count} tokens in rows of {seq}"
            yield from same(f"rows and batches of {name}", (rows, rows), (len(answer.input_ids), answer.length))
            yield from same(f"tokens in rows of {name}", 2 * rows, int(answer.mask.sum()))
    yield from _of_documents(trial)
    yield from _beyond_32_bits(trial)
    yield _beyond_memory(trial)
    yield from _corpus_beyond_memory(trial)
    yield _tokens_beyond_memory(trial)
    yield from _shards_without_room(trial)


def _of_documents(trial: Trial) -> Iterator[Comparison]:
    """A document without a token adds nothing to a stream, be it the first, the last or between others; of such alone no shards are
    written. One with a token that is no integer is refused by its number."""
    with tempfile.TemporaryDirectory() as parent:
        folder, unwritten = Path(parent) / "tokens", Path(parent) / "unwritten"
        stream = trial.rng("documents").integers(0, VOCAB, 5).tolist()
        yield from same("tokens of documents", 5, trial.pretrainer.write(folder, [[], stream[:2], [], [], stream[2:], []], VOCAB))
        yield from same(
            "stream of documents", np.array([stream]), trial.pretrainer.epoch(Tokens(folder, VOCAB, batch=1, seq=5), 0).input_ids
        )
        for count in range(3):
            ask = partial(trial.pretrainer.write, unwritten, [list[int]()] * count, VOCAB)
            yield trial.refuses(f"shards of {count} documents without tokens", ask, "unwritten", "ValueError")
            yield from same("a folder of no tokens", False, unwritten.exists())
        pieces = Path(parent) / "pieces"
        trial.pretrainer.write(pieces, [[token] * 3 for token in range(4)], VOCAB, shard_tokens=10, kind="one array")
        wanted, tokens = np.arange(12).reshape(1, -1) // 3, Tokens(pieces, VOCAB, batch=1, seq=12)
        yield from same("stream of documents in one array", wanted, trial.pretrainer.epoch(tokens, 0).input_ids)
        for start, stop in ((0, 12), (8, 11), (3, 3), (5, 99), (12, 99), (20, 99)):
            expected = (np.arange(12) // 3)[start:stop]
            yield from same(f"tokens {start} to {stop} of 12", expected, trial.pretrainer.tokens_between(pieces, VOCAB, start, stop))
        alone = trial.pretrainer.write(Path(parent) / "alone", [stream], VOCAB, shard_tokens=2**50)
        yield from same("tokens of a shard that may have more than any memory", 5, alone)
        long = np.zeros(LONG // 8, np.int64)
        for place, token in ((len(long) - 1, VOCAB), (2**17 + trial.seed % 2**16, -1)):  # each before the last one
            long[place] = token
            documents: list[Any] = [[1], long.copy()]
            ask = partial(trial.pretrainer.write, unwritten, documents, VOCAB, kind="array")
            yield trial.refuses(f"token {token} in a long document", ask, rf"document 1: token {place} is {token}\b", "ValueError")
        for kind in ("array", "tensor"):
            rows: Any = [[[1, 2, 3]], [[4, 5, 6]]]
            ask = partial(trial.pretrainer.write, unwritten, rows, VOCAB, kind=kind)
            yield trial.refuses(f"a {kind} of two dimensions", ask, "document 0.*shape", "ValueError")
            yield from same("a folder of refused rows", False, unwritten.exists())
        for kind in ("list", "array", "tensor"):
            yield from same(f"tokens of a {kind}", 3, trial.pretrainer.write(Path(parent) / kind, [[1, 2], [3]], VOCAB, kind=kind))
            ask = partial(trial.pretrainer.write, unwritten, [[1, 2], [3, 1.5]], VOCAB, kind=kind)
            yield trial.refuses(f"a {kind} with a token that is no integer", ask, "document 1", "TypeError|ValueError")
            yield from same("a folder of refused tokens", False, unwritten.exists())


def _beyond_memory(trial: Trial) -> Comparison:
    """Python and NumPy hold less than three tenths of a long shard at any time while it is opened and its last row read. Its file is a
    hole."""
    size, seq = 6 * LONG, 4097
    with tempfile.TemporaryDirectory() as parent:
        folder = write_shards(Path(parent), [np.zeros(1, np.int64)])
        with (folder / "part-0.bin").open("r+b") as file:
            file.truncate(2 * size)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        (folder / INDEX).write_text(json.dumps({"dtype": "uint16", "shards": [{"file": "part-0.bin", "tokens": size, "sha256": digest}]}))
        peak = most_held(partial(trial.pretrainer.epoch, Tokens(folder, VOCAB, 1, seq), 0, (size - 2) // (seq - 1)))
    return value_at_most("share of a long shard in memory", peak / (2 * size), 0.3)


def _corpus_beyond_memory(trial: Trial) -> Iterator[Comparison]:
    """Python holds less than a corpus takes while its documents are made into tokens, and a tokenizer is given few long ones at once."""
    with tempfile.TemporaryDirectory() as parent:
        corpus = Path(parent) / "corpus.jsonl"
        corpus.write_text(DOCUMENTS * (json.dumps({"text": "ls -l " * WORDS}) + "\n"))
        peak = most_held(partial(trial.pretrainer.tokenized, corpus, CHECKPOINT))
        yield value_at_most("share of a corpus in memory", peak / corpus.stat().st_size, 1.0)
        corpus.write_text((json.dumps({"text": "a" * 10**5}) + "\n") * 64)
        yield value_at_most("characters of long documents that are made into tokens at once", trial.pretrainer.at_once(corpus), 2 * 10**6)


def _tokens_beyond_memory(trial: Trial) -> Comparison:
    """Python and NumPy hold some shards and a document, and not all tokens, while shards are written."""
    count, length, shard = 100, 10_000, 20_000
    with tempfile.TemporaryDirectory() as parent:
        documents = ([trial.seed % VOCAB] * length for _ in range(count))
        peak = most_held(partial(trial.pretrainer.write, Path(parent) / "tokens", documents, VOCAB, shard))
        return value_at_most("share of all tokens in memory while shards are written", peak / (2 * count * length), 0.3)


def _shards_without_room(trial: Trial) -> list[Comparison]:
    """Where the first of a hundred shards has no room, few of their documents are still asked for: it may take hours to make them all."""
    taken = list[int]()

    def documents() -> Iterator[list[int]]:
        for number in range(100):
            taken.append(number)
            yield [trial.seed % VOCAB] * 10_000

    with tempfile.TemporaryDirectory() as parent:
        ask = partial(trial.pretrainer.write, Path(parent) / "tokens", documents(), VOCAB, 10_000, most=1000)
        refused = trial.refuses("shards without room", ask, os.strerror(errno.EFBIG), "OSError")
    return [refused, value_at_most("share of documents that are asked for when a shard had no room", len(taken) / 100, 0.3)]


def _beyond_32_bits(trial: Trial) -> list[Comparison]:
    """Rows on either side of the ends of shards are right where the stream has more tokens than 31 and than 32 bits count.

    Each shard is one token over and over, and has no file.
    """
    rng, seq = trial.rng("many tokens"), 6
    lengths = [2**31 - int(rng.integers(1, 5)), 2**31 + int(rng.integers(5, 9)), int(rng.integers(8, 40))]
    ends = np.cumsum(lengths)
    last = -(-(int(ends[-1]) - 1) // (seq - 1)) - 1
    rows = sorted({min(int(end) // (seq - 1) + step, last) for end in ends for step in (-1, 0)})
    places = np.array(rows)[:, None] * (seq - 1) + np.arange(seq)
    found = trial.pretrainer.rows_of_repeated(lengths, seq, rows)
    wide, some = 2**17 + 1, range(64)
    shuffled = trial.pretrainer.rows_of_repeated(lengths, wide, some, trial.seed)
    expected = np.where(places < ends[-1], np.searchsorted(ends, places, side="right"), 0)
    return [
        *same("rows at the ends of long shards", expected, found.input_ids),
        *same("tokens of these rows", places < ends[-1], found.mask),
        *same("whether rows in a random order are full, but for the last", True, int((~shuffled.mask).sum()) < wide),
        *same("shards of rows in a random order", [0, 1], np.unique(shuffled.input_ids[:, 0]).tolist()),
    ]
