"""Corpora and the plan of an epoch, as `impl` reads and makes them."""

import copy
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from blackswan.falsifiers.subjects.doors.files import Batch, CorpusFile, Label, Split, Tokenizing, TokenRows
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.impl.disks import limited, writing
from blackswan.falsifiers.subjects.impl.workers import on_ranks
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.impl import checkpoint, samples, tokens
from blackswan.impl import corpus as corpora
from blackswan.impl.group import Group

if TYPE_CHECKING:
    import torch

STATISTICS = ("total", "class_counts", "length_percentiles", "max_length", "truncated", "minority", "imbalance")

BESIDE = 7
"""So many tokens more may a text have by another reader of the same tokenizer."""
ALONE = 2**20
"""Characters of a text that is tokenised by itself."""
TOGETHER = 0.6
"""Seconds in which two processes read a corpus at once, so that each is stopped in the midst of a read many times."""

MOMENT = 0.1
"""Seconds after which a thread goes on while another one has no answer yet."""

PATIENCE = 60.0
"""Seconds after which a process that reads such a corpus hangs."""


class Corpora(Door):
    """Reading corpora, and the plan of an epoch."""

    def load(self, corpus: CorpusFile, meanwhile: Callable[[], object] | None = None) -> list[tuple[str, Label]]:
        """The text and the label of each sample; after the first one that is called."""
        found: list[tuple[str, Label]] = []
        for sample in corpora.read_corpus(corpus.path, corpus.classes, corpus.multi_label):
            if meanwhile is not None and not found:
                meanwhile()
            found.append((sample.text, _label(sample.label)))
        return found

    def read(self, corpus: CorpusFile, tokenizing: Tokenizing, places: Sequence[int] | None = None) -> TokenRows:
        """The corpus as token ids, or the samples at those places of it."""
        tokenizer = _tokens(tokenizing)
        found = _samples(corpus, tokenizer)
        found = found if places is None else found.select(places)
        before = found.targets.copy()
        with suppress(ValueError):  # where they can be changed, the statistics were asked of others before
            found.targets[:] = before[0]
            found.statistics()
            found.targets[:] = before
        said = found.statistics()
        statistics = {name: getattr(said, name) for name in STATISTICS}
        return TokenRows(list(found.rows), _labels(found), statistics, tokenizer.fill, tokenizer.vocab, tokenizer.description)

    def batch(self, corpus: CorpusFile, tokenizing: Tokenizing, places: Sequence[int]) -> Batch:
        """The samples at those places as a batch, once one of them, one of all and the rows were written over, and the corpus read with a
        higher limit."""
        tokenizer = _tokens(tokenizing)
        read = _samples(corpus, tokenizer)
        _samples(corpus, _tokens(replace(tokenizing, max_seq_len=tokenizing.max_seq_len + 1)))
        for some in (range(len(read)), places):
            other = read.batch(some, tokenizer, self._device)
            for value in (other.input_ids, other.mask, other.labels):
                value.zero_()
        for row in read.rows:
            row.clear()
        found = read.batch(places, tokenizer, self._device)
        texts = [text for text, _ in self.load(corpus)]
        for text in texts:
            tokenizer.encode(text).clear()  # a list that was given out is the caller's
        raw = tokenizer.batch([texts[place] for place in places])
        return Batch(*(value.cpu().numpy() for value in (found.input_ids, found.mask, found.labels, *raw)))

    def behind(self, tokens: int, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """The rows as samples of a corpus on a disk that begins with a sample of so many tokens, of which the file system stores none."""
        before, calls, handles = _without_a_name(), count(), list[int]()

        def asked() -> None:
            if next(calls) != 2:
                return
            handles.extend(handle for file, handle in _without_a_name().items() if file not in before)
            try:
                for handle in handles:
                    os.ftruncate(handle, os.fstat(handle).st_size * (tokens + 1))  # there is one id so far
                    os.lseek(handle, 0, os.SEEK_END)
            except OSError as error:
                raise Lacks(f"a temporary file of so many tokens: {error}") from None

        read = _of_rows([[1], _Hole(tokens), *rows], alone=2, asked=asked).rows
        return list(read.select(np.arange(2, len(rows) + 2)))

    def in_parts(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """The rows as samples of a corpus on a disk of which the system takes seven bytes at most at a call, as a full one takes a part."""
        with writing(7):
            return list(_of_rows(rows).rows)

    def without_room(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """The same on a disk that has room for a thousand ids."""
        with limited(4000):
            return list(_of_rows(rows).rows)

    def of_lost(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """The same on a disk that has lost the second half of the ids by the time that they are asked for."""
        before = _without_a_name()
        held = _of_rows(rows).rows
        for file, handle in _without_a_name().items():
            if file not in before:
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
        return list(held)

    def at_once(self, corpus: CorpusFile, tokenizing: Tokenizing) -> int:
        """The most characters that are given to the tokenizer at once as a corpus is read."""
        tokenizer, counts = _tokens(tokenizing), [0]
        measure = tokenizer.measure

        def counted(texts: Sequence[str]) -> Any:
            counts.append(sum(map(len, texts)))
            return measure(texts)

        with mock.patch.object(tokenizer, "measure", counted):
            _samples(corpus, tokenizer)
        return max(counts)

    def between_calls(self, texts: Sequence[str], tokenizing: Tokenizing) -> list[list[list[int]]]:
        """The ids of the texts that a tokenizer gives one thread, and another one each time that the first has called a function of C."""
        tokenizer, found, before = _tokens(tokenizing), list[Future[list[list[int]]]](), sys.getprofile()

        def ask() -> list[list[int]]:
            return [ids for ids, _ in tokenizer.measure(texts)]

        with ThreadPoolExecutor(1) as other:

            def also(_: Any, event: str, __: Any) -> None:
                if event == "c_return":
                    found.append(other.submit(ask))
                    wait(found[-1:], timeout=MOMENT)  # it may have to wait for this one

            sys.setprofile(also)
            try:
                own = ask()
            finally:
                sys.setprofile(before)
        return [own, *(each.result() for each in found)]

    def without_its_file(self, texts: Sequence[str], tokenizing: Tokenizing) -> list[list[list[int]]]:
        """The ids of the texts by a tokenizer whose files are gone since it was opened, and by a copy of it."""
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(shutil.copytree(tokenizing.tokenizer or "", Path(parent) / "copy"))
            opened = tokens.load_tokenizer(folder, tokenizing.max_seq_len, tokenizing.padding_side)
        return [[ids for ids, _ in each.measure(texts)] for each in (copy.deepcopy(opened), opened)]

    def by_two_processes(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """How many of the rows each of two processes finds otherwise that go on with a corpus on a disk, and read all of it at once."""
        context, read, expected = multiprocessing.get_context("fork"), _of_rows(rows).rows, [[*row] for row in rows]
        start, wrong = context.Barrier(2, timeout=30), context.Array("q", [len(rows)] * 2)

        def compare(place: int) -> None:
            start.wait()
            until, found = time.monotonic() + TOGETHER, 0
            while time.monotonic() < until and not found:
                found = sum(read[at] != row for at, row in enumerate(expected))
            wrong[place] = found

        processes = [context.Process(target=compare, args=(place,)) for place in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
            process.kill()  # one that hangs has found nothing
        return [wrong[0], wrong[1]]

    def epoch_order(self, count: int, seed: int, epoch: int) -> list[int]:
        """The order of so many samples in an epoch of a run with that seed; before it is read to its end that of the next one is made, and
        afterwards it is written over where that can be, as whoever was given it may."""
        order = samples.epoch_order(count, seed, epoch)
        first = list(order[: count // 2])
        samples.epoch_order(count, seed, epoch + 1)
        given = first + list(order[count // 2 :])
        with suppress(TypeError, ValueError):
            order[:] = 0
        return given

    def effective_batches(self, order: Sequence[int], size: int) -> list[list[int]]:
        """The samples of each optimiser step."""
        return [list(batch) for batch in samples.effective_batches(order, size)]

    def split(self, labels: Sequence[Label], classes: int, fraction: float, seed: int) -> Split:
        """A corpus with those labels in two parts."""
        training, validation = samples.split_validation(_numbered(labels, classes), fraction, seed)
        return Split(_places(training), _places(validation), _labels(training), _labels(validation))

    def parts_known_by_their_samples(self, labels: Sequence[Label], classes: int, fraction: float, seed: int) -> list[bool]:
        """Says of each part of a split of those labels whether its digest is that of the same samples, read by themselves."""
        parts = samples.split_validation(_numbered(labels, classes), fraction, seed)
        alone = [samples.Samples.of([*each.rows], _given(_labels(each)), classes, each.multi_label) for each in parts]
        return [part.digest() == own.digest() for part, own in zip(parts, alone, strict=True)]

    def known_by(self, rows: Sequence[Sequence[int]], labels: Sequence[Any]) -> str:
        """What run.json says of samples of two classes."""
        return samples.Samples.of(rows, labels, 2, isinstance(labels[0], tuple)).digest()

    def held_by_digest(self, rows: Sequence[Sequence[int]]) -> int:
        """The most bytes that Python holds while samples whose ids are on the disk are made into what run.json says of them."""
        found = _of_rows(rows)
        tracemalloc.start()
        try:
            found.digest()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def left_by_a_kill(self, corpus: CorpusFile, tokenizing: Tokenizing) -> tuple[list[str], bool]:
        """Returns the names that temporary files have while the token ids of a corpus are held, and whether one without a name is among
        them on the disk."""
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
            held = _samples(corpus, _tokens(tokenizing))
            left = sorted(each.name for each in Path(folder).iterdir()) if len(held) else []
            return left, any(file.startswith(os.path.realpath(folder)) for file in _without_a_name())

    def elsewhere(self, call: str, *given: Any) -> Any:
        """What a call of this door answers in another process, where sets have another order."""
        (outcome,) = on_ranks(_elsewhere, 1, (call, given), self._device)
        if outcome.answer is None:
            raise RuntimeError(outcome.ended)
        return outcome.answer

    def balanced_weights(self, labels: Sequence[Label], classes: int, kind: str) -> list[float]:
        """Class weights of a corpus with those labels; `kind` is balanced or balanced_over_classes."""
        return [float(weight) for weight in samples.balanced_weights(_numbered(labels, classes), kind)]


def _without_a_name() -> dict[str, int]:
    """The open files of this process that have no name any more, each with a handle."""
    found = dict[str, int]()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if (file := str(each.readlink())).endswith(" (deleted)"):
                found[file] = int(each.name)
    return found


class _Hole(list[int]):
    """Stands for so many ids, of which there is none."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens


def _of_rows(rows: Sequence[Sequence[int]], alone: int = 0, asked: Callable[[], None] = lambda: None) -> samples.Samples:
    """Samples of a corpus on a disk whose texts have those ids. The first `alone` texts are so long that each is tokenised by itself, and
    `asked` is called before the tokenizer answers."""

    def measure(texts: Sequence[str]) -> list[tuple[Sequence[int], int]]:
        asked()
        return [(row, len(row)) for row in (rows[int(text)] for text in texts)]

    tokenizer: Any = SimpleNamespace(measure=measure)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        texts = (str(place).rjust(ALONE if place < alone else 1) for place in range(len(rows)))
        path.write_text("".join(json.dumps({"input": text, "label": 0}) + "\n" for text in texts))
        return samples.read_samples(path, tokenizer, 2)


def _elsewhere(group: Group, device: "torch.device", call: str, given: tuple[Any, ...]) -> Any:
    del group
    return getattr(Corpora(device), call)(*given)


def _places(part: samples.Samples) -> list[int]:
    return [row[0] for row in part.rows]


def _labels(part: samples.Samples) -> list[Label]:
    labels: list[Label] = part.targets.tolist()
    return labels


def _given(labels: Sequence[Label]) -> list[corpora.Label]:
    return [tuple(label) if isinstance(label, list) else label for label in labels]


def _label(label: corpora.Label) -> Label:
    return list(label) if isinstance(label, tuple) else label


def _tokens(tokenizing: Tokenizing) -> tokens.Tokens:
    """The tokens of those settings. Two other readers of the same tokenizer with another limit are made before these are asked, the last
    one where nothing lies beside it."""
    limit, side = tokenizing.max_seq_len, tokenizing.padding_side
    if not tokenizing.tokenizer:
        return tokens.ByteTokens(limit, side)
    found = tokens.load_tokenizer(tokenizing.tokenizer, limit, side)
    tokens.load_tokenizer(tokenizing.tokenizer, limit + BESIDE, side)
    with tempfile.TemporaryDirectory() as bare:
        shutil.copyfile(checkpoint.belonging(tokenizing.tokenizer, checkpoint.TOKENIZER), Path(bare) / checkpoint.TOKENIZER)
        tokens.load_tokenizer(Path(bare), limit + BESIDE, side)
    return found


def _samples(corpus: CorpusFile, tokenizer: tokens.Tokens) -> samples.Samples:
    return samples.read_samples(corpus.path, tokenizer, corpus.classes, corpus.multi_label)


def _numbered(labels: Sequence[Label], classes: int) -> samples.Samples:
    """Samples whose one token is their place in the corpus."""
    targets = _given(labels)
    return samples.Samples.of([(index,) for index in range(len(labels))], targets, classes, isinstance(targets[0], tuple))
