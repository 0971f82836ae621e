"""Files that another program replaces after they were read: the next answer is of what is there then."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.apr_format import plain
from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.subjects.doors.files import CorpusFile, Tokenizing, Tokens
from blackswan.falsifiers.system import config_files
from blackswan.falsifiers.system.adapter_files import CONFIG, TOKENIZER, Model
from blackswan.falsifiers.system.apr_files import image, metadata
from blackswan.falsifiers.system.derived_damage import SETTINGS, TEXTS, small_base
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.token_streams import write_shards
from blackswan.falsifiers.system.trial import Trial

VOCAB, COUNT = 300, 41
"""Tokens of a vocabulary and of a stream."""
SECOND = 10**9
"""Nanoseconds: the second content is as much younger, so that no file system takes the two for written at once."""
Write = Callable[[Path], object]
Ask = Callable[[Path], Any]


def files_are_read_anew(trial: Trial) -> Iterator[Comparison]:
    """One file or folder of each kind is read, replaced at its path by another one with as many entries of the same sizes, and read again.
    The second answer is that of the other one, which is also read at a path of its own."""
    with tempfile.TemporaryDirectory() as parent:
        for kind, (first, second, ask) in _kinds(trial, Path(parent)).items():
            place, elsewhere = Path(parent) / kind / "place", Path(parent) / kind / "elsewhere"
            for folder, write in ((place, first), (elsewhere, second)):
                folder.mkdir(parents=True)
                write(folder)
            before = ask(place)
            shutil.rmtree(place)
            shutil.copytree(elsewhere, place)
            for path in place.rglob("*"):
                os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + SECOND))
            again, expected = ask(place), ask(elsewhere)
            if all(each.held for each in same(kind, before, expected)):
                yield broken(kind, "both contents give one answer")
            yield from same(f"{kind} that has been replaced", expected, again)


def _kinds(trial: Trial, parent: Path) -> dict[str, tuple[Write, Write, Ask]]:
    """How a first and a second content are written to a folder, and what is asked of it."""
    rng = trial.rng("anew")
    base, model = small_base(trial, parent)
    other = replace(model, decoder={name: value[::-1].copy() for name, value in model.decoder.items()})
    moved = replace(model, trainable={name: value[::-1].copy() for name, value in model.trainable.items()})
    settings = {**SETTINGS, "num_classes": model.scalars["classes"], "lora_rank": model.scalars["rank"], "lora_targets": "q_v"}
    settings |= {"lora_alpha": model.scalars["alpha"], "pooling": model.scalars["pooling"]}
    corpus = CorpusFile(parent / "texts.jsonl", 2)
    corpus.path.write_text("".join(json.dumps({"input": "q z q", "label": label}) + "\n" for label in (0, 1)))
    stream, another = (rng.integers(0, VOCAB, COUNT) for _ in range(2))

    def saved(of: Model, folder: Path) -> None:
        trial.classifiers.merged(base, settings, of.trainable, folder)

    def saved_as(given: tuple[Model, str], folder: Path) -> None:
        of, kind = given
        with tempfile.TemporaryDirectory() as aside:
            saved(of, Path(aside))
            shutil.copytree(Path(aside) / kind, folder / "saved")

    def rows(folder: Path) -> Any:
        return trial.corpora.read(corpus, Tokenizing(folder, 16)).rows

    return {
        "a corpus": _pair(_corpus, "ls", "id", lambda at: trial.corpora.load(CorpusFile(at / "c.jsonl", 2))),
        "a tokenizer": _pair(_tokenizer, "qz", "zq", rows),
        "settings": _pair(_settings, 4, 8, lambda at: trial.classifiers.given(at / "settings.yaml")),
        "token shards": _pair(_shards, stream, another, lambda at: trial.pretrainer.epoch(Tokens(at / "tokens", VOCAB, 2, 5), 0)),
        "a checkpoint": _pair(_checkpoint, model, other, lambda at: trial.files.read_checkpoint(at / "model")),
        "an .apr file": _pair(_apr, model, other, lambda at: trial.files.read_checkpoint(at / "model.apr")),
        "what a checkpoint says": _pair(_saying, (model, 3), (_shallower(model), 5), partial(_taken_from_it, trial, corpus.path)),
        "an adapter": _pair(saved, model, moved, lambda at: trial.commands.library("probabilities", at / "adapter", TEXTS)),
        "a merged model": _pair(saved, model, moved, lambda at: trial.commands.library("probabilities", at / "merged", TEXTS)),
        "an adapter, and a merged model in its place": _pair(
            saved_as, (model, "adapter"), (moved, "merged"), lambda at: trial.commands.library("probabilities", at / "saved", TEXTS)
        ),
    }


def _pair(write: Callable[[Any, Path], object], first: Any, second: Any, ask: Ask) -> tuple[Write, Write, Ask]:
    return partial(write, first), partial(write, second), ask


def _corpus(text: str, folder: Path) -> None:
    (folder / "c.jsonl").write_text("".join(json.dumps({"input": text, "label": label}) + "\n" for label in (0, 1)))


def _tokenizer(letters: str, folder: Path) -> None:
    """The shipped tokenizer, in which the first letter has the id of the least of them."""
    said = json.loads((CHECKPOINT / TOKENIZER).read_text())
    vocabulary = said["model"]["vocab"]
    ids = sorted(vocabulary[letter] for letter in letters)
    vocabulary |= dict(zip(letters, ids, strict=True))
    (folder / TOKENIZER).write_text(json.dumps(said))


def _settings(rank: int, folder: Path) -> None:
    (folder / "settings.yaml").write_text(f"lora_rank: {rank}\nepochs: 2\n")


def _shards(stream: Any, folder: Path) -> None:
    write_shards(folder / "tokens", [stream])


def _checkpoint(model: Model, folder: Path) -> None:
    model.write_checkpoint(folder / "model")


def _shallower(model: Model) -> Model:
    """The model without its second layer."""
    decoder = {name: value for name, value in model.decoder.items() if ".layers.1." not in name}
    return replace(model, scalars={**model.scalars, "layers": 1}, decoder=decoder)


def _saying(given: tuple[Model, int], folder: Path) -> None:
    """A checkpoint with a tokenizer, whose texts end with a token of that id."""
    model, end = given
    config = config_files.plain(model.scalars) | {"eos_token_id": end, "bos_token_id": end + 1}
    shutil.copyfile(CHECKPOINT / TOKENIZER, replace(model, config=config).write_checkpoint(folder / "model") / TOKENIZER)


def _taken_from_it(trial: Trial, corpus: Path, folder: Path) -> dict[str, Any]:
    """What commands take from a checkpoint's config.json: number of parameters, end of a text, special tokens."""
    model = f"--model={folder / 'model'}"
    with tempfile.TemporaryDirectory() as parent:
        run, tokens, further, exported = (Path(parent) / name for name in ("run", "tokens", "further", "exported"))
        settings = ("--epochs=1", "--warmup-fraction=0", "--validation-fraction=0", "--max-seq-len=8", "--no-quantize-nf4")
        trial.commands.run("train", model, f"--corpus={corpus}", f"--output={run}", *settings)
        trial.commands.run("tokenize", corpus, model, f"--output={tokens}")
        trial.commands.run("pretrain", model, f"--tokens={tokens}", f"--output={further}", "--seq=8", "--warmup-fraction=0")
        trial.commands.run("export", model, f"--output={exported}")
        written = {"config.yaml": (run / "config.yaml").read_text(), "tokens": b"".join(each.read_bytes() for each in tokens.glob("*.bin"))}
        return written | {str(each.relative_to(parent)): json.loads(each.read_text()) for each in Path(parent).rglob(CONFIG)}


def _apr(model: Model, folder: Path) -> None:
    stored = image(metadata(model.scalars), [plain(name, value, "F32") for name, value in model.decoder.items()])
    (folder / "model.apr").write_bytes(stored.pack())
