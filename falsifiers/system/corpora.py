"""Corpora read back: every text and label exactly, and bad lines refused."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from blackswan.falsifiers.data import CLASSES, CORPUS_HELDOUT, CORPUS_TRAIN
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.subjects.doors.files import CorpusFile, Label
from blackswan.falsifiers.system.footprint import most_held
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.written import written

DAY = 24 * 3600 * 10**9
"""Nanoseconds."""


def corpus_arrives_exactly(trial: Trial) -> list[Comparison]:
    """Texts and labels of a written corpus, and of the shipped ones as `json` reads them, arrive in their order."""
    path = (CORPUS_TRAIN, CORPUS_HELDOUT)[trial.seed % 2]
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    shipped = CorpusFile(path, len(CLASSES))
    return _written(trial, multi_label=False) + _arrives(trial, shipped, [row["input"] for row in rows], [row["label"] for row in rows])


def multi_label_corpus_arrives_exactly(trial: Trial) -> list[Comparison]:
    """Lists of 0 and 1 arrive as they stand, single labels as the list with one 1."""
    return _written(trial, multi_label=True)


def _written(trial: Trial, *, multi_label: bool) -> list[Comparison]:
    with written(trial.rng("corpus"), multi_label=multi_label) as corpus:
        return _arrives(trial, corpus.file, corpus.texts, corpus.expected_labels, partial(_handled, corpus.file.path))


def _arrives(
    trial: Trial, file: CorpusFile, texts: Sequence[str], labels: Sequence[Label], meanwhile: Callable[[], None] | None = None
) -> list[Comparison]:
    found = trial.corpora.load(file, meanwhile)
    return same("texts and labels", list(zip(texts, labels, strict=True)), found)


def _handled(path: Path) -> None:
    """Other programs read a file, move it and give it other permissions: its content stays."""
    before = path.stat()
    path.chmod(0o600)
    os.utime(path, ns=(before.st_mtime_ns - DAY, before.st_mtime_ns))
    path.rename(path.with_suffix(".moved"))


LONGEST_LINE, ONE_LINE = 10_000_000, 2**25
"""Bytes that a line may have, and of a file that is one line."""
BAD_LINES: dict[str, tuple[str | bytes, str]] = {
    "label out of range": ('{"input": "ls", "label": 5}', "label"),
    "negative label": ('{"input": "ls", "label": -1}', "label"),
    "label of 33 bits": (f'{{"input": "ls", "label": {2**32 + 1}}}', "label"),
    "label of 65 bits": (f'{{"input": "ls", "label": {2**64 + 1}}}', "label"),
    "label as text": ('{"input": "ls", "label": "safe"}', "label"),
    "label as truth": ('{"input": "ls", "label": true}', "label"),
    "label that is half": ('{"input": "ls", "label": 1.5}', "label"),
    "label is null": ('{"input": "ls", "label": null}', "label"),
    "half a character": ('{"input": "\\ud83d", "label": 1}', "surrogate"),
    "half a character in capitals": ('{"input": "\\uD83D", "label": 1}', "surrogate"),
    "no input": ('{"label": 1}', "input"),
    "input as number": ('{"input": 3, "label": 1}', "input"),
    "unknown key": ('{"input": "ls", "label": 1, "weight": 2}', "weight"),
    "duplicate key": ('{"input": "ls", "label": 1, "label": 2}', "label"),
    "not an object": ("[1, 2]", "object"),
    "a control character": ('{"input": "l\ts", "label": 1}', "control"),
    "nested without end": ('{"input": ' + 100_000 * "[", "nested"),
    "not JSON": ('{"input": "ls", "label": 1', ""),
    "not UTF-8": (b'{"input": "\xff\xfe", "label": 1}', ""),
}
"""A line of a corpus with one label a sample, and a word of the refusal."""

BAD_LABELS: dict[str, tuple[str, str]] = {
    "list too short": ('"labels": [1, 0]', "labels"),
    "list too long": ('"labels": [1, 0, 0, 0]', "labels"),
    "empty list": ('"labels": []', "labels"),
    "no list": ('"labels": "100"', "labels"),
    "number instead of a list": ('"labels": 1', "labels"),
    "null": ('"labels": null', "labels"),
    "two": ('"labels": [1, 0, 2]', "labels"),
    "a number of nine bits": ('"labels": [1, 0, 257]', "labels"),
    "a number of 65 bits": (f'"labels": [1, 0, {2**64}]', "labels"),
    "minus one": ('"labels": [1, 0, -1]', "labels"),
    "half": ('"labels": [1, 0, 0.5]', "labels"),
    "truth": ('"labels": [true, 0, 0]', "labels"),
    "text in the list": ('"labels": ["1", 0, 0]', "labels"),
    "nested list": ('"labels": [[1, 0, 0]]', "labels"),
    "label and labels": ('"label": 0, "labels": [1, 0, 0]', "label"),
    "single label out of range": ('"label": 3', "label"),
    "single label as truth": ('"label": true', "label"),
    "list as the single label": ('"label": [1, 0, 0]', "label"),
}
"""The label of a line in a corpus with several labels a sample, and a word of the refusal."""

LOOSE: dict[bool, dict[str, tuple[str, int | list[int] | None]]] = {
    False: {"label as a float": ('{"input": "ls", "label": 1.0}', 1), "blank line": ("", None)},
    True: {
        "one as a float": ('{"input": "ls", "labels": [1.0, 0, 0]}', [1, 0, 0]),
        "single label as a float": ('{"input": "ls", "label": 1.0}', [0, 1, 0]),
        "blank line": ("", None),
    },
}
"""Lines with one label a sample, or with several, that may be refused, and otherwise have that label, or are none."""


def refuses_corpus(trial: Trial) -> Iterator[Comparison]:
    """A damaged line among good ones is refused with file and line number; so are a file that changes while it is read, one without a
    line, and no file. What is not written as it should be, and can mean one thing alone, is refused so too, or means that."""
    good = CORPUS_HELDOUT.read_bytes().splitlines()[:20]
    yield from _refuses_lines(trial, good, 5, False, BAD_LINES)
    yield from _loosely_written(trial, good, 5, False)
    yield from _refuses_changes(trial, good)
    with tempfile.TemporaryDirectory() as folder:
        file = CorpusFile(Path(folder) / "corpus.jsonl", 5)
        yield trial.refuses("no file", lambda: trial.corpora.load(file), file.path.name, "FileNotFoundError")
        ask = partial(trial.corpora.load, file)
        file.path.touch()
        yield trial.refuses("empty file", ask, file.path.name, "ValueError")
        os.truncate(file.path, ONE_LINE)  # as a file that is no text, or an array of JSON
        refuse = partial(trial.refuses, "a file of one line", ask, rf"{file.path.name}:1\b", "ValueError")
        beyond = max(0.0, most_held(refuse) / LONGEST_LINE - 3)  # a part is joined to what was read before, and cut
        yield value_at_most("held of a file of one line beyond three of the longest lines, in such lines", beyond, 1)
        yield refuse()


def _refuses_changes(trial: Trial, lines: Sequence[bytes]) -> list[Comparison]:
    """A corpus that grows, is cut or becomes another of its size between its first sample and its end is not taken for a whole one.

    The size alone tells of a file that grows or is cut, and a nanosecond of its time alone of one that keeps its size.
    """
    others = {"grows": [*lines, lines[0]], "is cut": lines[:-1], "is another of its size": [lines[0], *lines[:0:-1]]}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = CorpusFile(Path(folder) / "corpus.jsonl", 5)
        for name, other in others.items():
            file.path.write_bytes(b"\n".join(lines))
            ask = partial(trial.corpora.load, file, partial(overwritten, file.path, b"\n".join(other)))
            found.append(trial.refuses(f"a corpus that {name} while it is read", ask, file.path.name, "ValueError"))
    return found


def overwritten(path: Path, content: bytes) -> None:
    """Other content for a file, a nanosecond later where it is as long: a clock of the file system may not have moved."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns + (len(content) == before.st_size)))


def refuses_multi_label_corpus(trial: Trial) -> Iterator[Comparison]:
    """A damaged line among good ones is refused with file and line, and so is a list where one label a sample was asked for. What
    can mean one thing alone is refused so too, or means that."""
    single, several = b'{"input": "", "label": 2}', b'{"input": "ls", "labels": [0, 1, 1]}'
    bad = {name: (f'{{"input": "rm", {label}}}', message) for name, (label, message) in BAD_LABELS.items()}
    yield from _refuses_lines(trial, [several, single, b'{"input": "id", "labels": [0, 0, 0]}'] * 3, 3, True, bad)
    yield from _loosely_written(trial, [several, single, b'{"input": "id", "labels": [0, 0, 0]}'] * 3, 3, True)
    yield from _refuses_lines(trial, [single] * 4, 3, False, {"several labels, one asked for": (several, "one label")})


def _refuses_lines(
    trial: Trial, good: Sequence[bytes], classes: int, multi_label: bool, bad: Mapping[str, tuple[str | bytes, str]]
) -> list[Comparison]:
    rng, found = trial.rng("damage"), []
    with tempfile.TemporaryDirectory() as folder:
        file = CorpusFile(Path(folder) / "corpus.jsonl", classes, multi_label)
        for name, (line, message) in bad.items():
            at = int(rng.integers(0, len(good) + 1))
            damaged = line if isinstance(line, bytes) else line.encode()
            file.path.write_bytes(b"\n".join([*good[:at], damaged, *good[at:], b""]))
            wanted = rf"{file.path.name}:{at + 1}: .*{message}"
            found.append(trial.refuses(name, lambda: trial.corpora.load(file), wanted, "ValueError"))
    return found


def _loosely_written(trial: Trial, good: Sequence[bytes], classes: int, multi_label: bool) -> Iterator[Comparison]:
    """A line among good ones is refused with file and line, or has the label that it can have alone; the others have their own, and a bad
    line behind it has its own number."""
    rng, bad = trial.rng("written loosely"), b'{"input": "rm"}'
    with tempfile.TemporaryDirectory() as folder:
        file = CorpusFile(Path(folder) / "corpus.jsonl", classes, multi_label)
        load = partial(trial.corpora.load, file)
        file.path.write_bytes(b"\n".join([*good, b""]))
        expected = load()
        for name, (line, label) in LOOSE[multi_label].items():
            at = int(rng.integers(0, len(good) + 1))
            lines = [*good[:at], line.encode(), *good[at:]]
            file.path.write_bytes(b"\n".join([*lines, b""]))
            try:
                found = load()
            except SubjectError:
                yield trial.refuses(name, load, rf"{file.path.name}:{at + 1}: ", "ValueError")
                continue
            yield from same(name, repr([*expected[:at], *([] if label is None else [("ls", label)]), *expected[at:]]), repr([*found]))
            file.path.write_bytes(b"\n".join([*lines, bad, b""]))
            yield trial.refuses(f"a bad line behind: {name}", load, rf"{file.path.name}:{len(lines) + 1}: .*label", "ValueError")
