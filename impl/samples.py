"""A corpus as token ids: statistics, class weights, the validation part, and the order of an epoch.

No sample of a file is a Python object: its tokens lie in a temporary file, and its place, length and label in arrays, so that millions of
samples take some dozens of bytes of memory each.
"""

import errno
import hashlib
import math
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import index
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from blackswan.impl.config import ClassifyConfig
from blackswan.impl.corpus import Integers, Label, Sample, Statistics, read_corpus, statistics
from blackswan.impl.folder import DISK_ERRORS
from blackswan.impl.tokens import Tokens
from blackswan.impl.trainer import Batch

_ORDER, _SPLIT = 1, 2
"""Streams of random numbers of one seed, so that no draw repeats another one's."""
_IDS = "I"
_CHUNK_SAMPLES, _CHUNK_CHARACTERS = 1024, 1 << 20
"""Texts that are tokenised at once: as many, or where they are long, as many characters."""
Read = Callable[[int], None]
Indices = Sequence[int] | Integers


class _Ids(Protocol):
    """Token ids one after another."""

    def extend(self, ids: "array[int]", /) -> None:
        """Adds ids at the end."""

    def __getitem__(self, span: slice, /) -> "array[int]":
        """The ids of a span."""


class _IdsOnDisk:
    """Token ids of a corpus in a temporary file, which has no name and is gone with the process, however that ends.

    It is read and not mapped: mapped pages stay in the process's memory once they were touched. Raises an OSError that names the folder
    where it cannot be written.
    """

    def __init__(self, corpus: Path) -> None:
        self._corpus, self._file = corpus, tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  open as long as this object is
        weakref.finalize(self, self._file.close)

    def extend(self, ids: "array[int]") -> None:
        content = memoryview(ids.tobytes())
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            why = f"{error.strerror} for the tokens of {self._corpus}; make room, or name another folder by TMPDIR"
            raise OSError(error.errno, why, tempfile.gettempdir()) from None

    def __getitem__(self, span: slice) -> "array[int]":
        found = array(_IDS)
        count, start = found.itemsize * (span.stop - span.start), found.itemsize * span.start
        content = os.pread(self._file.fileno(), count, start)
        if len(content) < count:
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} for the tokens of {self._corpus}", tempfile.gettempdir())
        found.frombytes(content)
        return found


def _places(indices: Indices) -> Integers:
    """The indices as integers. Raises a ValueError for others, such as a mask, whose False and True would be the samples 0 and 1."""
    found = np.asarray(indices)
    if len(found) and found.dtype.kind not in "iu":
        raise ValueError(f"indices of dtype {found.dtype}: expected integers, the places of samples")
    return found.astype(np.int64)


class Rows(Sequence[list[int]]):
    """The token ids of each sample, read when they are asked for."""

    def __init__(self, ids: _Ids, starts: Integers, lengths: Integers) -> None:
        self._ids, self._starts, self.lengths = ids, starts, lengths

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]  # slices are `select`'s
        """The ids of a sample."""
        start = int(self._starts[index])
        return self._ids[start : start + int(self.lengths[index])].tolist()

    def select(self, indices: Integers) -> "Rows":
        """The rows at those indices, in that order."""
        return Rows(self._ids, self._starts[indices], self.lengths[indices])


@dataclass(frozen=True, eq=False)
class Samples:
    """A corpus whose texts are token ids, 1 to max_seq_len a text.

    `targets` are the classes, int64 [samples], or with `multi_label` one 0 or 1 a class, uint8 [samples, num_classes]. `text_lengths` are
    the lengths before truncation; without them nothing was cut.
    """

    rows: Rows
    targets: Integers
    num_classes: int
    multi_label: bool = False
    text_lengths: Integers | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], targets: Sequence[Label], num_classes: int, multi_label: bool = False) -> "Samples":
        """Samples of those token ids and classes, in memory. Raises a ValueError for another number or kind of labels, or other classes."""
        kept = _Collected(array(_IDS), num_classes, multi_label)
        kept.add([(ids, len(ids)) for ids in rows], targets)
        return kept.samples()

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.rows)

    def lengths(self) -> Integers:
        """Tokens of each sample, as the model reads it, [samples]."""
        return self.rows.lengths

    def statistics(self) -> Statistics:
        """Statistics of the corpus, the lengths before truncation. Raises a ValueError where there is no sample."""
        full = self.lengths() if self.text_lengths is None else self.text_lengths
        return statistics(self.targets, self.num_classes, full, int(np.sum(full > self.lengths())))

    def select(self, indices: Indices) -> "Samples":
        """The samples at those indices, in that order. Raises a ValueError for a mask."""
        places = _places(indices)
        full = None if self.text_lengths is None else self.text_lengths[places]
        return Samples(self.rows.select(places), self.targets[places], self.num_classes, self.multi_label, full)

    def batch(self, indices: Indices, tokens: Tokens, device: torch.device | str = "cpu") -> Batch:
        """The samples at those indices, padded to the longest of them.

        input_ids int64 and mask bool [batch, longest]; labels int64 [batch], with `multi_label` float32 [batch, num_classes].
        Raises a ValueError without an index, and for a mask.
        """
        places = _places(indices)
        input_ids, mask = tokens.pad([self.rows[index] for index in places])
        labels = torch.from_numpy(self.targets[places]).to(torch.float32 if self.multi_label else torch.int64)
        return Batch(input_ids.to(device), mask.to(device), labels.to(device))

    def require_read_with(self, config: ClassifyConfig, name: str) -> None:
        """Raises a ValueError where they were read with other settings than these: classes, kind of labels, longest sample."""
        for setting in ("num_classes", "multi_label"):
            found, expected = getattr(self, setting), getattr(config, setting)
            if found != expected:
                raise ValueError(f"the {name}samples were read with {setting} {found!r}, the settings say {expected!r}")
        wrong = self.lengths()[(self.lengths() < 1) | (self.lengths() > config.max_seq_len)]
        if len(wrong):
            raise ValueError(f"one of the {name}samples has {wrong[0]} tokens; expected 1 to max_seq_len, which is {config.max_seq_len}")

    def digest(self) -> str:
        """SHA-256 of tokens, lengths and classes."""
        state = hashlib.sha256(f"{self.targets.shape}\n".encode())
        for content in (self.targets, self.lengths()):
            state.update(np.ascontiguousarray(content).data)
        for row in self.rows:
            state.update(array(_IDS, row))
        return state.hexdigest()


class _Collected:
    """Samples while they are being read."""

    def __init__(self, ids: _Ids, num_classes: int, multi_label: bool) -> None:
        self._ids, self._classes, self._multi_label = ids, num_classes, multi_label
        self._targets, self._lengths, self._full = array("B" if multi_label else "q"), array("i"), array("i")

    def add(self, measured: Iterable[tuple[Sequence[int], int]], labels: Iterable[Label]) -> None:
        """Adds token ids with their number before truncation, and labels."""
        ids = array(_IDS)
        for row, length in measured:
            ids.extend(row)
            self._lengths.append(len(row))
            self._full.append(length)
        self._ids.extend(ids)
        entries, most = (self._classes, 1) if self._multi_label else (1, self._classes - 1)
        for label in labels:
            own = _integers(label if isinstance(label, tuple) else (label,))
            if isinstance(label, tuple) != self._multi_label or len(own) != entries or not 0 <= min(own) <= max(own) <= most:
                expected = f"a tuple of {entries} entries 0 or 1" if self._multi_label else f"an integer from 0 to {most}"
                raise ValueError(f"sample {len(self._targets) // entries + 1}: the label is {label!r}; expected {expected}")
            self._targets.extend(own)

    def samples(self) -> Samples:
        """All of them. Raises a ValueError where there are not as many labels as texts: the rest would be another sample's."""
        lengths, full, targets = np.asarray(self._lengths), np.asarray(self._full), np.asarray(self._targets)
        labels = len(targets) // (self._classes if self._multi_label else 1)
        if labels != len(lengths):
            raise ValueError(f"{len(lengths)} samples have {labels} labels; expected one label a sample")
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        targets = targets.reshape(-1, self._classes) if self._multi_label else targets
        return Samples(Rows(self._ids, starts, lengths), targets, self._classes, self._multi_label, full)


def _integers(entries: tuple[int, ...]) -> tuple[int, ...]:
    """The entries, be they NumPy's or torch's integers; none where one is no integer: a fraction or a text is not rounded or read."""
    try:
        return tuple(map(index, entries))
    except TypeError:
        return ()


def tokenize(
    samples: Iterable[Sample],
    tokens: Tokens,
    num_classes: int,
    multi_label: bool = False,
    *,
    ids: _Ids | None = None,
    tell: Read | None = None,
) -> Samples:
    """Every sample's text as token ids, once; they are added to `ids`, by default in memory. `tell` is told how many texts were read.

    Raises a ValueError for a label of the other kind, or that is none of the classes.
    """
    kept, count = _Collected(array(_IDS) if ids is None else ids, num_classes, multi_label), 0
    for chunk in _chunks(samples):
        kept.add(tokens.measure([sample.text for sample in chunk]), (sample.label for sample in chunk))
        count += len(chunk)
        if tell is not None:
            tell(count)
    return kept.samples()


def read_samples(path: Path, tokens: Tokens, num_classes: int, multi_label: bool = False, tell: Read | None = None) -> Samples:
    """The samples of a JSONL corpus as token ids, read once and kept in a temporary file.

    Raises what `read_corpus` raises, and an OSError that names the folder of temporary files where it has no room.
    """
    return tokenize(read_corpus(path, num_classes, multi_label), tokens, num_classes, multi_label, ids=_IdsOnDisk(path), tell=tell)


def _chunks(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    chunk: list[Sample] = []
    characters = 0
    for sample in samples:
        chunk.append(sample)
        characters += len(sample.text)
        if len(chunk) == _CHUNK_SAMPLES or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def split_validation(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """(training, validation), disjoint, together all samples, each in the corpus's order; a function of its arguments only.

    Every class (with `multi_label` every combination of classes) gives floor or ceil of `fraction` of its samples, chosen at random; a
    class never gives its last one. All classes together give `fraction`, the decimal number as it is written, of all samples, where they
    can; half a sample is rounded to the even number. A fraction of 0 gives an empty validation part. Raises a ValueError for a fraction
    outside 0 … 1 and where there are too few samples to give any.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction is {fraction!r}: expected at least 0 and below 1")
    order, count = _shuffled(len(samples), _SPLIT, seed), len(samples)
    codes: dict[bytes, int] = {}
    strata = np.fromiter((codes.setdefault(samples.targets[index].tobytes(), len(codes)) for index in order), np.int64, count)
    sizes = np.bincount(strata, minlength=len(codes))
    exact = Fraction(repr(float(fraction)))  # as it was written: 0.1 of 30 is 3
    total = min(max(1, round(exact * count)), count - 1) if fraction else 0
    shares = np.asarray(_shares(sizes.tolist(), exact, total, spare_last=not samples.multi_label), np.int64)
    place = np.empty(count, np.int64)  # of each sample among those of its stratum, in the shuffled order
    place[np.argsort(strata, kind="stable")] = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    held_out = np.zeros(count, bool)
    held_out[order] = place < shares[strata]
    if fraction and not held_out.any():
        raise ValueError(
            f"{count} samples of {len(codes)} classes leave none for validation; "
            "give a validation corpus, or validation_fraction 0 to train without validation"
        )
    return samples.select(np.flatnonzero(~held_out)), samples.select(np.flatnonzero(held_out))


def training_and_validation(samples: Samples, validation: Samples | None, fraction: float, seed: int) -> tuple[Samples, Samples | None]:
    """What a run trains on, and what it validates on: as given, or where no validation samples are, as `split_validation` makes them.

    None for validation where neither gives any. Raises as `split_validation` does.
    """
    if validation is not None or fraction == 0:
        return samples, validation
    return split_validation(samples, fraction, seed)


def balanced_weights(samples: Samples, kind: str) -> tuple[float, ...]:
    """A weight a class, inversely proportional to its number of samples n_c; `kind` is one of `config.BALANCED` and says the scale.

    "balanced" is N / (K n_c) of N labels and K classes, as in scikit-learn: the mean over the labels is 1, so that the loss, a mean over
    samples, and the clipping of its gradient keep their scale. "balanced_over_classes" has a mean of 1 over the classes instead; with one
    class rare its mean over the labels is far below 1. Raises a ValueError that names a class without samples.
    """
    counts = samples.statistics().class_counts
    if 0 in counts:
        raise ValueError(
            f"class {counts.index(0)} has no sample: balanced class weights need at least one of each class, give weights instead"
        )
    over_samples = kind == "balanced"
    scale = sum(counts) / len(counts) if over_samples else len(counts) / math.fsum(1 / count for count in counts)
    return tuple(scale / count for count in counts)


def epoch_order(count: int, seed: int, epoch: int) -> Integers:
    """A random permutation of 0 … count − 1, [count]; a function of its arguments only, so that a resumed run needs no random state."""
    return _shuffled(count, _ORDER, seed, epoch)


def effective_batches(order: Indices, size: int) -> Iterator[Indices]:
    """The order cut into batches of `size`; the last may be smaller. Raises a ValueError for a size below 1."""
    if size < 1:
        raise ValueError(f"the effective batch is {size}: expected at least 1")
    return (order[start : start + size] for start in range(0, len(order), size))


def _shuffled(count: int, stream: int, seed: int, epoch: int = 0) -> Integers:
    # NumPy makes words of 32 bits of these, as many as a number needs: the upper ones of a large seed must not be another's epoch.
    words = [stream, seed % 2**32, epoch, seed >> 32]
    # NumPy keeps the stream of a bit generator the same from version to version, but not those of Generator's methods (NEP 19)
    return np.argsort(np.random.PCG64(words).random_raw(count), kind="stable")


def _shares(counts: Sequence[int], fraction: Fraction, total: int, *, spare_last: bool) -> list[int]:
    """How many of each count make up the total, or less where they cannot, in proportion (largest remainders)."""
    room = [min(math.ceil(fraction * count), count - 1 if spare_last else count) for count in counts]
    shares = [min(math.floor(fraction * count), most) for count, most in zip(counts, room, strict=True)]
    with_room = [i for i in range(len(counts)) if shares[i] < room[i]]
    for i in sorted(with_room, key=lambda i: fraction * counts[i] - shares[i], reverse=True)[: max(0, total - sum(shares))]:
        shares[i] += 1
    return shares
