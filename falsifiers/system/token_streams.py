"""Token shards on disk and what is read from them: complete, in a known order, refused when damaged."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly, value_inside
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.reference.table import Array

VOCAB = 4096
INDEX = "index.json"


def write_shards(folder: Path, pieces: Sequence[Array], dtype: str = "uint16") -> Path:
    """Shards as the format has them, written without `impl`: plain little-endian ids, and an index with count and SHA-256 of each."""
    folder.mkdir(parents=True)
    entries = []
    for number, piece in enumerate(pieces):
        content = piece.astype({"uint16": "<u2", "uint32": "<u4"}[dtype]).tobytes()
        file = f"part-{number}.bin"
        (folder / file).write_bytes(content)
        entries.append({"file": file, "tokens": len(piece), "sha256": hashlib.sha256(content).hexdigest()})
    (folder / INDEX).write_text(json.dumps({"dtype": dtype, "shards": entries}))
    return folder


def pieces_of(stream: Array, rng: Generator) -> list[Array]:
    """The stream cut at random places into one to four shards."""
    cuts = np.unique(rng.integers(1, len(stream), rng.integers(0, 4)))
    return np.split(stream, cuts)


@contextmanager
def _stream(case: Case) -> Iterator[tuple[Array, dict[str, Any]]]:
    """A stream whose tokens all differ, on disk, and the scalars that read it."""
    rng = generator_for(case.seed, "stream")
    stream = rng.permutation(VOCAB)[: int(rng.integers(2, 400))]
    with tempfile.TemporaryDirectory() as parent:
        path = write_shards(Path(parent) / "shards", pieces_of(stream, rng), str(rng.choice(["uint16", "uint32"])))
        sizes = {"batch": int(rng.integers(1, 6)), "seq": int(rng.integers(2, 24))}
        order = {"seed": int(rng.integers(100)), "epoch": int(rng.integers(5)), "start": 0}
        yield stream, {"path": str(path), "vocab": VOCAB, **sizes, **order}


def epoch_predicts_every_token_once(attack: Attack, case: Case) -> list[Comparison]:
    """The pairs (token, next token) within rows, over an epoch, against those of the stream: each once. And rows and batches."""
    with _stream(case) as (stream, scalars):
        found = []
        for order in (scalars, {**scalars, "seed": None}):
            answer = attack.answer(case, scalars=order)
            ids, mask = answer["input_ids"], answer["mask"]
            both = mask[:, :-1] & mask[:, 1:]
            pairs = np.stack([ids[:, :-1][both], ids[:, 1:][both]], axis=1)
            wanted = np.stack([stream[:-1], stream[1:]], axis=1)
            name = "in order" if order["seed"] is None else "shuffled"
            if order["seed"] is None:
                found.append(compare_exactly(f"pairs {name}", wanted, pairs))
            else:
                found.append(compare_exactly(f"pairs {name}", _sorted(wanted), _sorted(pairs)))
            found.append(compare_exactly(f"rows begin with real tokens, {name}", np.sort(~mask, axis=1), ~mask))
            found += _batches(answer, scalars["batch"], len(stream), scalars["seq"])
        return found


def _sorted(pairs: Array) -> Array:
    return np.asarray(pairs[np.lexsort(pairs.T[::-1])])


def _batches(answer: dict[str, Array], batch: int, tokens: int, seq: int) -> list[Comparison]:
    """All batches full but the last, none empty, and their number as announced."""
    rows = -(-(tokens - 1) // (seq - 1))
    expected = np.minimum(batch, rows - batch * np.arange(-(-rows // batch)))
    sizes = np.bincount(answer["batches"]) if answer["batches"].size else np.zeros(0, np.int64)
    return [compare_exactly("rows of each batch", expected, sizes), compare_exactly("length", np.asarray(len(expected)), answer["length"])]


def position_is_restored(attack: Attack, case: Case) -> list[Comparison]:
    """An epoch from any batch on is the rest of the epoch; the same twice; and another order in another epoch and with another seed."""
    with _stream(case) as (_, scalars):
        whole = attack.answer(case, scalars=scalars)
        batches = int(whole["length"])
        found = [compare_exactly("the epoch again", whole["input_ids"], attack.answer(case, scalars=scalars)["input_ids"])]
        for start in sorted({0, batches // 2, batches - 1, batches}):
            rest = attack.answer(case, scalars={**scalars, "start": start})
            for name in ("input_ids", "mask"):
                found.append(compare_exactly(f"{name} from batch {start} of {batches}", whole[name][whole["batches"] >= start], rest[name]))
        if len(whole["mask"]) >= 12:  # two orders of twelve rows are the same once in 479 million
            for name in ("epoch", "seed"):
                other = attack.answer(case, scalars={**scalars, name: scalars[name] + 1})
                same = other["input_ids"].shape == whole["input_ids"].shape and bool((other["input_ids"] == whole["input_ids"]).all())
                found.append(value_inside(f"another {name} has the same order", float(same), 0.0, 0.0))
        return found


Damage = Callable[[Path, Generator], None]


def _changed(change: Callable[[dict[str, Any], Generator], None]) -> Damage:
    def damage(folder: Path, rng: Generator) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index, rng)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def _out_of_range(folder: Path, rng: Generator) -> None:
    """An id that is not below the vocabulary, in a shard that is what its index says."""
    ids = np.fromfile(folder / "part-1.bin", "<u2")
    ids[37] = rng.integers(VOCAB, 2**16)
    ids.tofile(folder / "part-1.bin")
    _rehash(folder, 1)


def _rehash(folder: Path, number: int) -> None:
    index = json.loads((folder / INDEX).read_text())
    entry = index["shards"][number]
    entry["sha256"] = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
    (folder / INDEX).write_text(json.dumps(index))


def _bit(folder: Path, rng: Generator) -> None:
    content = bytearray((folder / "part-0.bin").read_bytes())
    content[2 * int(rng.integers(len(content) // 2))] ^= 1 << int(rng.integers(8))
    (folder / "part-0.bin").write_bytes(content)


def _cut(folder: Path, rng: Generator) -> None:
    content = (folder / "part-1.bin").read_bytes()
    (folder / "part-1.bin").write_bytes(content[: int(rng.integers(len(content)))])


def _broken_index(folder: Path, rng: Generator) -> None:
    del rng
    (folder / INDEX).write_text("{")


def _twice(index: dict[str, Any], rng: Generator) -> None:
    index["shards"].append(index["shards"][int(rng.integers(len(index["shards"])))])


DAMAGE: dict[str, tuple[Damage, str]] = {
    "id out of range": (_out_of_range, r"part-1\.bin.*token 37"),
    "flipped bit": (_bit, r"part-0\.bin"),
    "truncated shard": (_cut, r"part-1\.bin"),
    "missing shard": (lambda folder, _: (folder / "part-0.bin").unlink(), r"part-0\.bin"),
    "missing index": (lambda folder, _: (folder / INDEX).unlink(), r"index\.json"),
    "index is no JSON": (_broken_index, r"index\.json"),
    "unknown dtype": (_changed(lambda index, _: index.update(dtype="int8")), r"index\.json.*dtype"),
    "no shards": (_changed(lambda index, _: index.pop("shards")), r"index\.json.*shards"),
    "negative count": (_changed(lambda index, _: index["shards"][0].update(tokens=-1)), r"index\.json.*tokens"),
    "shard listed twice": (_changed(_twice), r"index\.json.*twice"),
    "file elsewhere": (_changed(lambda index, _: index["shards"][0].update(file="../part-0.bin")), r"index\.json.*file"),
}


def refuses_shards(attack: Attack, case: Case) -> list[Comparison]:
    """Each damage on its own; file, and offset of a bad id, in the message."""
    rng, found = generator_for(case.seed, "damage"), []
    scalars = {"vocab": VOCAB, "batch": 2, "seq": 8, "seed": None, "epoch": 0, "start": 0}
    for name, (damage, message) in DAMAGE.items():
        with tempfile.TemporaryDirectory() as parent:
            folder = write_shards(Path(parent) / "shards", [rng.integers(0, VOCAB, count) for count in (50, 60)])
            damage(folder, rng)
            given = {**scalars, "path": str(folder)}
            found.append(replace(refusal(partial(attack.answer, case, scalars=given), "Exception", message), tensor=name))
    return found


def stream_too_short(attack: Attack, case: Case) -> list[Comparison]:
    """A stream of one token predicts nothing: an epoch without batches, and no row made up."""
    with tempfile.TemporaryDirectory() as parent:
        folder = write_shards(Path(parent) / "shards", [np.array([case.seed % VOCAB])])
        answer = attack.answer(case, scalars={"path": str(folder), "vocab": VOCAB, "batch": 2, "seq": 8, "seed": 0, "epoch": 0, "start": 0})
        if answer["input_ids"].size:
            return [broken("input_ids", "rows from a stream that predicts nothing", 0, float(len(answer["input_ids"])))]
        return [compare_exactly("length", np.asarray(0), answer["length"])]
