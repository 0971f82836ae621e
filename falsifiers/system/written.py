"""Corpora that a check writes itself, so that it knows what is in them."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import CorpusFile, Label
from blackswan.reference.table import Array

PIECES = (
    *("rm -rf", " ", "  ", "\n", "\r", "\t", "\u2028", "\x85", "\x1c", "\x0b", "\x00"),
    *('"', "\\", "é", "e\u0301", "ß", "漢字", "🙂", "\ufeff"),
)
"""Readers get these wrong: line breaks that end no JSON line, quotes, text outside ASCII, and text that could be normalised."""
WORDS = ("rm", "-rf", '"$TMP"', "for f in *;", "do", "done", "\n", "date +%s", "|| exit 1", "curl")


@dataclass(frozen=True)
class Written:
    """A corpus in a file, and what was written."""

    file: CorpusFile
    texts: list[str]
    labels: list[Label]

    @property
    def multi_hot(self) -> Array:
        """[samples, classes], whatever way the labels were written in."""
        return np.asarray([_multi_hot(label, self.file.classes) for label in self.labels])

    @property
    def expected_labels(self) -> list[Label]:
        """The labels as a reader must give them."""
        return [_multi_hot(label, self.file.classes) for label in self.labels] if self.file.multi_label else self.labels


def _multi_hot(label: Label, classes: int) -> list[int]:
    return label if isinstance(label, list) else [int(index == label) for index in range(classes)]


@contextmanager
def written(rng: Generator, *, multi_label: bool, count: int | None = None, also: Sequence[str] = ()) -> Iterator[Written]:
    """A corpus of odd texts (the first empty, one twice), scripts and `also`; with `multi_label` a third of the samples has a single label.

    In some corpora the last class has no sample.
    """
    count, classes = count or int(rng.integers(3, 40)), int(rng.integers(2, 7))
    texts = ["", *also, *(_text(rng) for _ in range(count - 2))]
    texts.append(texts[-1])
    used = classes - int(rng.random() < 0.3)
    labels = [_label(rng, classes, used, multi_label) for _ in texts]
    labels[-1] = labels[-2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        end = str(rng.choice(["\n", "\r\n"]))
        lines = [_line(rng, text, label) for text, label in zip(texts, labels, strict=True)]
        path.write_bytes((end.join(lines) + (end if rng.random() < 0.5 else "")).encode())
        yield Written(CorpusFile(path, classes, multi_label), texts, labels)


def _text(rng: Generator) -> str:
    if rng.random() < 0.5:
        places = rng.integers(len(PIECES), size=int(rng.integers(0, 12)))  # an array of texts would lose the NUL
        return "".join(PIECES[place] for place in places)
    words = rng.choice(WORDS, int(rng.integers(1, 60)))
    return " ".join(words)


def _label(rng: Generator, classes: int, used: int, multi_label: bool) -> Label:
    if multi_label and rng.random() < 2 / 3:
        return [*(int(on) for on in rng.integers(0, 2, used)), *[0] * (classes - used)]
    return int(rng.integers(0, used))


def _line(rng: Generator, text: str, label: Label) -> str:
    row = {"input": text, "labels" if isinstance(label, list) else "label": label}
    keys = sorted(row, reverse=bool(rng.random() < 0.5))
    separators = (", ", ": ") if rng.random() < 0.5 else (",", ":")
    line = json.dumps({key: row[key] for key in keys}, ensure_ascii=bool(rng.random() < 0.3), separators=separators)
    return f" \t{line}\t " if rng.random() < 0.1 else line
