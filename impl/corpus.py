"""Classification corpora in JSONL, and their statistics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blackswan.impl import strict_json

PERCENTILES = (50, 90, 95, 99)
LONGEST_LINE = 10_000_000
"""Bytes: far more than any model reads of one text, and less than what ends a tokenizer."""
Label = int | tuple[int, ...]


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
    """The samples of a JSONL file, one `{"input": str, "label": int}` or `{"input": str, "labels": [0 or 1, …]}` a line.

    With `multi_label` every label is one 0 or 1 a class, and a single label is read so. Raises a FileNotFoundError, and a ValueError that
    names the file and the line for a bad line, or the file for an empty corpus. Nothing is left out.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a corpus in JSONL")
    samples = []
    for number, line in enumerate(_lines(path), start=1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{path}:{number}: a line of {len(line):,} bytes; expected {LONGEST_LINE:,} at most")
        try:
            samples.append(_sample(strict_json.loads(line), num_classes, multi_label))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not samples:
        raise ValueError(f"{path}: the corpus is empty; expected one JSON object a line")
    return samples


def statistics(labels: Sequence[Label], num_classes: int, lengths: Sequence[int], truncated: int = 0) -> Statistics:
    """Statistics of samples with those labels and lengths in tokens; percentiles by nearest rank.

    A sample of several classes counts for each of them. Raises a ValueError where there is no sample or not a length for each.
    """
    if not labels or len(lengths) != len(labels):
        raise ValueError(f"{len(labels)} samples and {len(lengths)} lengths: expected as many, and at least one")
    counts = [0] * num_classes
    for label in labels:
        for index in (label,) if isinstance(label, int) else [i for i, on in enumerate(label) if on]:
            counts[index] += 1
    ranked = sorted(lengths)
    percentiles = {percent: ranked[-(-percent * len(ranked) // 100) - 1] for percent in PERCENTILES}
    return Statistics(len(labels), tuple(counts), percentiles, ranked[-1], truncated)


def _lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def _sample(value: Any, num_classes: int, multi_label: bool) -> Sample:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    key = "labels" if "labels" in value else "label"
    if set(value) != {"input", key}:
        raise ValueError(f"keys {', '.join(map(repr, value)) or '(none)'}; expected 'input' and either 'label' or 'labels'")
    text, label = value["input"], value[key]
    if not isinstance(text, str):
        raise ValueError(f"input is {text!r}; expected a string")
    text.encode()  # half of a surrogate pair is valid JSON, but no text
    if key == "labels":
        return Sample(text, _multi_hot(label, num_classes, multi_label))
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < num_classes:
        raise ValueError(f"label is {label!r}; expected an integer from 0 to {num_classes - 1}")
    return Sample(text, tuple(int(index == label) for index in range(num_classes)) if multi_label else label)


def _multi_hot(labels: Any, num_classes: int, multi_label: bool) -> tuple[int, ...]:
    if not multi_label:
        raise ValueError("labels (several a sample), but one label a sample was asked for")
    valid = isinstance(labels, list) and all(isinstance(entry, int) and not isinstance(entry, bool) and entry in (0, 1) for entry in labels)
    if not valid or len(labels) != num_classes:
        raise ValueError(f"labels is {labels!r}; expected a list of {num_classes} entries 0 or 1")
    return tuple(labels)
