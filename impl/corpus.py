"""Classification corpora in JSONL, and their statistics."""

import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from blackswan.impl import strict_json

PERCENTILES = (50, 90, 95, 99)
LONGEST_LINE = 10_000_000
"""Bytes: far more than any model reads of one text, and less than what ends a tokenizer."""
Label = int | tuple[int, ...]
Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Sample:
    """A text with its class, or with one 0 or 1 a class."""

    text: str
    label: Label


@dataclass(frozen=True)
class Statistics:
    """Samples in all and of each class; percentiles and maximum of the lengths in tokens; how many texts lost their end to truncation."""

    total: int
    class_counts: tuple[int, ...]
    length_percentiles: dict[int, int]
    max_length: int
    truncated: int = 0

    @property
    def minority(self) -> int:
        """Number of samples of the rarest class."""
        return min(self.class_counts)

    @property
    def imbalance(self) -> float:
        """Samples of the most frequent class for each of the rarest; infinite where a class has none."""
        return max(self.class_counts) / self.minority if self.minority else math.inf


def load_corpus(path: Path, num_classes: int, multi_label: bool = False) -> list[Sample]:
    """All that `read_corpus` gives, at once: for a corpus that fits into memory."""
    return list(read_corpus(path, num_classes, multi_label))


def read_corpus(path: Path, num_classes: int, multi_label: bool = False) -> Iterator[Sample]:
    """The samples of a JSONL file, one `{"input": str, "label": int}` or `{"input": str, "labels": [0 or 1, …]}` a line.

    With `multi_label` every label is one 0 or 1 a class, and a single label is read so. One line is held at a time. Raises a
    FileNotFoundError, and a ValueError that names the file and the line for a bad line, or the file where it is empty or changes while it
    is read. Nothing is left out.
    """
    number = 0
    for number, line in enumerate(_lines(path), start=1):
        try:
            yield _sample(strict_json.loads(line), num_classes, multi_label)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not number:
        raise ValueError(f"{path}: the corpus is empty; expected one JSON object a line")


def statistics(labels: Integers, num_classes: int, lengths: Integers, truncated: int = 0) -> Statistics:
    """Statistics of samples with those labels, [samples] or 0 and 1 [samples, num_classes], and those lengths in tokens [samples].

    Percentiles are by nearest rank. A sample of several classes counts for each of them. Raises a ValueError where there is no sample or
    not a length for each.
    """
    if not len(labels) or len(lengths) != len(labels):
        raise ValueError(f"{len(labels)} samples and {len(lengths)} lengths: expected as many, and at least one")
    counts = np.bincount(labels, minlength=num_classes) if labels.ndim == 1 else labels.sum(axis=0, dtype=np.int64)
    ranked = np.sort(lengths)
    percentiles = {percent: int(ranked[-(-percent * len(ranked) // 100) - 1]) for percent in PERCENTILES}
    return Statistics(len(labels), tuple(counts.tolist()), percentiles, int(ranked[-1]), truncated)


def lines_of(file: IO[bytes], name: str) -> Iterator[bytes]:
    """The lines of a file as they stand, one at a time. A ValueError names file and line where one is longer than LONGEST_LINE, without its
    end, which is LF or CR LF."""
    for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 2), b""), start=1):
        if len(line) > LONGEST_LINE and len(line.removesuffix(b"\n").removesuffix(b"\r")) > LONGEST_LINE:
            raise ValueError(f"{name}:{number}: a line of more than {LONGEST_LINE:,} bytes; expected that many at most")
        yield line


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a corpus, while it stays as it is; a pipe that has a name, as a shell's `<(…)` has one, may grow."""
    if path.is_dir() or not path.exists():
        raise FileNotFoundError(f"{path}: no such file; expected a corpus in JSONL")
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        yield from lines_of(file, str(path))
        after = os.fstat(file.fileno())
    if stat.S_ISREG(before.st_mode) and (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ValueError(f"{path}: changed while it was read; wait until it is written, and start again")


def _sample(value: Any, num_classes: int, multi_label: bool) -> Sample:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    key = "labels" if "labels" in value else "label"
    if set(value) != {"input", key}:
        raise ValueError(f"keys {', '.join(map(short, value)) or '(none)'}; expected 'input' and either 'label' or 'labels'")
    text, label = value["input"], value[key]
    if not isinstance(text, str):
        raise ValueError(f"input is {short(text)}; expected a string")
    strict_json.require_text(text)
    if key == "labels":
        return Sample(text, _multi_hot(label, num_classes, multi_label))
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < num_classes:
        raise ValueError(f"label is {short(label)}; expected an integer from 0 to {num_classes - 1}")
    return Sample(text, tuple(int(index == label) for index in range(num_classes)) if multi_label else label)


def _multi_hot(labels: Any, num_classes: int, multi_label: bool) -> tuple[int, ...]:
    if not multi_label:
        raise ValueError("labels (several a sample), but one label a sample was asked for")
    valid = isinstance(labels, list) and all(isinstance(entry, int) and not isinstance(entry, bool) and entry in (0, 1) for entry in labels)
    if not valid or len(labels) != num_classes:
        raise ValueError(f"labels is {short(labels)}; expected a list of {num_classes} entries 0 or 1")
    return tuple(labels)
