"""Every number of `evaluate` and `predict`, counted anew from the files; and the same texts by every way in."""

import json
import math
import re
import shutil
from collections import UserList
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare, value_at_most, value_inside
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.commands import Said
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.system.command_problem import LARGE_TEXT, MAX_SEQ_LEN, ODD, Small, options, piped, small, texts_of, tokenizer
from blackswan.falsifiers.system.footprint import most_held
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, reads_files
from blackswan.reference.table import Array

PRINTED = 0.5e-4 + 1e-9
"""Half a unit of the last digit that the tables show."""
QUOTIENTS = Errors.flat(1e-12)
"""Quotients and means of counts, in float64 on both sides."""
TABLE, CELLS = 50, 1000
"""A table has so many rows, and a confusion matrix in JSON so many classes."""
LARGE = 1_234_567
"""A count that is wider than a column."""
HEADINGS = {"precision": "precision", "recall": "recall", "f1": "F1", "support": "samples"}
"""The heading of each score's column; that of the classes is `class`."""
FOUND = ("not found", "found")
UNDECIDED = 1e-4
"""Two logits that are closer than this share of the largest one may change places in float32."""


@dataclass(frozen=True)
class Answers:
    """Labelled texts, and the answers to them from the reference's logits of one adapter; a class that the logits leave open is the
    subject's."""

    problem: Small
    texts: list[str]
    labels: list[Label]
    logits: Array
    classes: Array

    @classmethod
    def of(cls, problem: Small, adapter: Path, texts: Sequence[str], labels: Sequence[Label], given: Array) -> "Answers":
        """`given` are the classes that the subject answers."""
        logits = problem.logits(adapter, texts)
        near = UNDECIDED * np.abs(logits).max()
        if problem.several:
            classes = np.where(np.abs(logits) < near, given, logits > 0)
        else:
            ordered = np.sort(logits, axis=1)
            classes = np.where(ordered[:, -1] - ordered[:, -2] < near, given, logits.argmax(axis=1))
        return cls(problem, list(texts), list(labels), logits, classes.astype(np.int64))

    @property
    def probabilities(self) -> Array:
        """[texts, classes]: σ of the logits with several labels, else their softmax."""
        if self.problem.several:
            return np.asarray(1.0 / (1.0 + np.exp(-self.logits)))
        powers = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    @property
    def loss(self) -> float:
        """The mean over the texts."""
        return float(self.problem.losses(self.logits, self.labels).mean())

    @property
    def accuracy(self) -> float:
        """The share of texts whose labels are all right."""
        return float((self.classes == np.asarray(self.labels)).reshape(len(self.texts), -1).all(axis=1).mean())

    @property
    def confusion(self) -> Array:
        """[true class, class], or with several labels [class, absent or present · 2 + not found or found]."""
        labels = np.asarray(self.labels)
        if self.problem.several:
            return np.stack([np.bincount(column, minlength=4) for column in (2 * labels + self.classes).T])
        found = np.zeros((self.problem.classes, self.problem.classes), np.int64)
        np.add.at(found, (labels, self.classes), 1)
        return found

    @property
    def scores(self) -> dict[str, Array]:
        """Precision, recall, F1 and support of each class; 0 where there is nothing to divide by."""
        confusion = self.confusion
        hits, claimed, support = (
            (confusion[:, 3], confusion[:, 1] + confusion[:, 3], confusion[:, 2] + confusion[:, 3])
            if self.problem.several
            else (confusion.diagonal(), confusion.sum(axis=0), confusion.sum(axis=1))
        )
        shares = {name: _share(hits, of) for name, of in (("precision", claimed), ("recall", support))}
        return {**shares, "f1": _share(2 * hits, claimed + support), "support": support}


def _share(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole != 0, dtype=np.float64)


@reads_files
def evaluations_are_counted_anew(trial: Trial) -> Iterator[Comparison]:
    """All that `evaluate` and `predict` print of a run's folder, of its last adapter and of the merged one is counted anew.

    The run is trained by the command, or by the library with class weights that are a word, and after each epoch worse on the samples that
    validate it: its best adapter is the first one. One corpus has every class, one lacks a class, one has a single text. Models have one
    label a text, several, or many classes. A folder of the adapter and of its base is the adapter. One run was copied without its state.
    """
    for kind, settings in _kinds(trial).items():
        with _trained(trial, kind, settings) as (problem, run):
            merged = problem.folder / "merged"
            if problem.classes < TABLE:
                trial.commands.run("merge", f"--adapter={run}", f"--output={merged}")
            if kind == "one label":
                shutil.rmtree(run / "state")
            for place, corpus in enumerate(_corpora(trial, problem)):
                doors = {"run": (f"--adapter={run}", "best")}
                if place == 0 and problem.classes < TABLE:  # what fails for the run's folder and not before is the choice of its adapter
                    doors = {"last": (f"--adapter={run / 'last'}", "last")} | doors | {"merged": (f"--model={merged}", "best")}
                    doors |= {"merged, as an adapter": (f"--adapter={merged}", "best")}
                    if kind == "one label":
                        among = shutil.copytree(run / "last", problem.folder / "among the files of its base")
                        shutil.copytree(problem.base, among, dirs_exist_ok=True)
                        doors |= {"last, among the files of its base": (f"--adapter={among}", "last")}
                for door, (option, part) in doors.items():
                    judged = _counted_anew(trial, kind, problem, run / part, option, corpus, tables=door == "run")
                    yield from (replace(each, tensor=f"{door}: {each.tensor}") for each in judged)
                if problem.classes > CELLS:
                    break
    yield from _at_the_bounds(trial)


def _at_the_bounds(trial: Trial) -> Iterator[Comparison]:
    """A table shows all rows in order of as many classes as it has room for, and JSON the whole matrix; of one class more they do not."""
    for several, classes in ((False, TABLE), (False, CELLS), (True, TABLE), (True, CELLS), (True, CELLS + 1)):
        confusion = np.zeros((classes, 4 if several else classes), np.int64)
        confusion[-1, -1] = LARGE
        shown, lines = trial.commands.evaluation_of(confusion, several)
        name, whole = f"{classes} classes, {'several labels' if several else 'one label'}", classes <= TABLE
        rows = [int(line.split()[0]) for line in lines if re.fullmatch(r" *\d+(  +\d\.\d{4}){3}  +\d+", line)]
        yield from same(f"{name}: rows of the table", list(range(classes if whole else TABLE)), rows)
        yield from same(f"{name}: whether some are chosen", not whole, any("lowest F1" in line for line in lines))
        title = next((line for line in lines if line.startswith(("confusion:", "labels by class"))), None)
        yield from same(f"{name}: whether the whole confusion is in the tables", whole, title is not None)
        if title:
            yield from same(f"{name}: lengths of the confusion's lines", 1, len({len(line) for line in lines[lines.index(title) + 1 :]}))
        key = "confusion" if classes <= CELLS else "confusion_counts"
        yield from same(f"{name}: how JSON has the confusion", [key], [each for each in shown if each.startswith("confusion")])
        confusion[classes // 2, 1], confusion[1, 0] = 3, 2
        cells = [[*map(int, at), int(confusion[tuple(at)])] for at in np.argwhere(confusion)]
        expected = confusion.tolist() if classes <= CELLS else cells
        yield from same(f"{name}: the confusion of JSON", expected, _confusion(trial, confusion, several, key))
    yield from _most_frequent(trial)


def _most_frequent(trial: Trial) -> list[Comparison]:
    """Of more confusions than a table has room for, those of most samples come first, and right answers are none."""
    classes = TABLE + 1
    confusion = trial.rng("most frequent").permutation(classes**2).reshape(classes, classes)
    _, lines = trial.commands.evaluation_of(confusion, several=False)
    wrong = ((int(count), *map(int, at)) for at, count in np.ndenumerate(confusion) if at[0] != at[1])
    start = next((at for at, line in enumerate(lines) if line.startswith("the most frequent")), len(lines))
    shown = [tuple(map(int, line.split())) for line in lines[start + 1 :]]
    return same("the most frequent confusions", sorted(wrong, reverse=True)[:TABLE], shown)


def _confusion(trial: Trial, confusion: Array, several: bool, key: str) -> list[list[int]]:
    """The confusion matrix of the JSON that the command prints, under its key."""
    return [list(row) for row in trial.commands.evaluation_of(confusion, several)[0].get(key, ())]


Corpus = tuple[Path, list[str], list[Label]]


def _kinds(trial: Trial) -> dict[str, dict[str, Any]]:
    """Settings by kind of model."""
    rng, many = trial.rng("kinds"), TABLE + 10
    return {
        "one label": {"num_classes": 4, "multi_label": False, "class_weights": "balanced_over_classes"},
        "several labels": {"num_classes": 3, "multi_label": True, "quantize_nf4": True, "double_quantize": True},
        "many classes": {
            **{"num_classes": many, "multi_label": False, "epochs": 1, "lora_targets": "down_proj,v_proj"},
            **{"class_weights": rng.uniform(0.5, 2.0, many).tolist()},
        },
        "many labels": {"num_classes": TABLE + 1, "multi_label": True, "epochs": 1, "quantize_nf4": True},
        "more classes": {"num_classes": CELLS + 1, "multi_label": False, "epochs": 1},
    }


def _corpora(trial: Trial, problem: Small) -> Iterator[Corpus]:
    """One without a class, one with every class, one with a single text; their files, texts and labels."""
    rng = trial.rng("corpora")
    texts = texts_of(rng, 8 if problem.classes < TABLE else 70)
    for name, given, absent in (
        ("without", texts[:7], int(rng.integers(problem.classes))),
        ("every", texts, None),
        ("single", texts[-1:], None),
    ):
        labels = problem.labels(rng, len(given), absent)
        yield problem.corpus(name, given, labels), given, labels


@contextmanager
def _trained(trial: Trial, name: str, settings: Mapping[str, Any]) -> Iterator[tuple[Small, Path]]:
    """A problem, and the folder of its run, whose best epoch is the first: what is right in training is wrong in validation."""
    with small(trial, name, settings) as problem:
        rng = trial.rng("corpus")
        texts = texts_of(rng, 9)
        labels = problem.labels(rng, 9)
        other: list[Label] = [[1 - one for one in each] if isinstance(each, list) else (each + 1) % problem.classes for each in labels]
        files = {"corpus": problem.corpus("train", texts, labels), "validation": problem.corpus("validation", texts, other)}
        files |= {"model": problem.base}
        if isinstance(problem.settings["class_weights"], str):  # by the library, for the command makes numbers of the word
            trial.trainer.fit_files("pipeline", problem.settings, problem.folder / "run", **files)
        else:
            given = [f"--{name}={value}" for name, value in {**files, "output": problem.folder / "run"}.items()]
            trial.commands.run("train", *given, *options(problem.settings), heard=name != "many labels")
        yield problem.with_weights_of(labels), problem.folder / "run"


def _counted_anew(
    trial: Trial, name: str, problem: Small, adapter: Path, option: str, corpus: Corpus, *, tables: bool
) -> Iterator[Comparison]:
    """What predict, evaluate --json and perhaps evaluate print of one corpus."""
    path, texts, labels = corpus
    asked = (option, f"--corpus={path}")
    shown, wanted = _answers(trial, problem, adapter, asked, texts, labels)
    yield from _probable(trial, name, wanted, shown)
    if problem.classes > CELLS:  # of so many classes none would be right by chance
        labels = [int(wanted.classes[0]), *labels[1:]]
        wanted = replace(wanted, labels=labels)
        problem.corpus(path.stem, texts, labels)
    told = trial.commands.run("evaluate", *asked, "--json")
    yield from _as_json(trial, name, wanted, json.loads(told.out))
    cut = sum(len(tokenizer().encode(text).ids) > MAX_SEQ_LEN for text in texts)
    warning = f"{path}: {cut} texts are longer than max_seq_len {MAX_SEQ_LEN}: their end is cut off\n" if cut else ""
    yield from same(f"texts that are cut off, beside JSON <{name}>", warning, told.err)
    if tables and len(texts) == 1:
        without = trial.commands.run("evaluate", *asked, "--json", heard=False)
        yield from same(f"JSON without a standard error <{name}>", told.out, without.out)
    if tables and problem.classes <= CELLS:
        said = trial.commands.run("evaluate", *asked)
        yield from _as_tables(trial, name, wanted, said.out)
        yield from same(f"texts that are cut off <{name}>", warning, said.err)


def _answers(
    trial: Trial,
    problem: Small,
    adapter: Path,
    asked: Sequence[object],
    texts: Sequence[str],
    labels: Sequence[Label],
    given: bytes = b"",
) -> tuple[list[dict[str, Any]], Answers]:
    """The lines of `predict`, none where a terminal could not show them, and the answers that are expected."""
    said = trial.commands.run("predict", *asked, stdin=given)
    lines = _lines(said.out if said.out.isascii() else "")
    name = "labels" if problem.several else "label"
    shape = (len(texts), problem.classes) if problem.several else (len(texts),)
    answered = np.asarray([line[name] for line in lines])
    return lines, Answers.of(problem, adapter, texts, labels, answered if answered.shape == shape else np.zeros(shape, np.int64))


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n") if line]


def _probable(trial: Trial, name: str, wanted: Answers, lines: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    """Texts, classes and probabilities of `predict`."""
    label = "labels" if wanted.problem.several else "label"
    expected = [{"input", label, "probabilities"}] * len(wanted.texts)
    if [set(line) for line in lines] != expected:
        yield broken(f"keys of predict's lines <{name}>", "other ones", str(expected[0]), str([sorted(line) for line in lines])[:200])
        return
    yield from same(f"texts of predict <{name}>", wanted.texts, [line["input"] for line in lines])
    yield trial.near(f"probabilities of predict <{name}>", wanted.probabilities, np.asarray([line["probabilities"] for line in lines]))
    yield from same(f"classes of predict <{name}>", wanted.classes.tolist(), [line[label] for line in lines])


def _as_json(trial: Trial, name: str, wanted: Answers, shown: Mapping[str, Any]) -> Iterator[Comparison]:
    """Each field of the JSON object."""
    large = wanted.problem.classes > CELLS
    keys = {"loss", "accuracy", "total", "per_class", "macro_f1", "confusion_counts" if large else "confusion"}
    if shown.keys() != keys:
        yield broken(f"fields <{name}>", "other ones", str(sorted(keys)), str(sorted(shown)))
        return
    yield trial.near(f"loss <{name}>", wanted.loss, shown["loss"])
    yield _quotient(f"accuracy <{name}>", wanted.accuracy, shown["accuracy"])
    yield from same(f"total <{name}>", len(wanted.texts), shown["total"])
    confusion = wanted.confusion
    cells = [[int(i), int(j), int(confusion[i, j])] for i, j in np.argwhere(confusion)] if large else confusion.tolist()
    yield from same(f"confusion <{name}>", cells, shown["confusion_counts" if large else "confusion"])
    for score, value in wanted.scores.items():
        yield _quotient(f"{score} of each class <{name}>", value, np.asarray([each[score] for each in shown["per_class"]]))
    yield _quotient(f"macro-F1 <{name}>", wanted.scores["f1"].mean(), shown["macro_f1"])


def _quotient(name: str, expected: Any, actual: Any) -> Comparison:
    return compare(name, np.asarray(expected, np.float64), np.asarray(actual, np.float64), QUOTIENTS, UNIT_ROUNDOFF["float32"])


def _as_tables(trial: Trial, name: str, wanted: Answers, text: str) -> Iterator[Comparison]:
    """Each number of the tables below its heading, at the digits that they have."""
    lines, scores, confusion = text.splitlines(), wanted.scores, wanted.confusion
    head = re.fullmatch(r"(\d+) samples  loss ([\d.]+)  accuracy ([\d.]+)  macro-F1 ([\d.]+)", lines[0])
    yield from same(f"samples of the tables <{name}>", str(len(wanted.texts)), head and head[1])
    limit = PRINTED + float(trial.literal(np.asarray(wanted.loss)).max)
    means = {"loss": (wanted.loss, limit), "accuracy": (wanted.accuracy, PRINTED), "macro-F1": (scores["f1"].mean(), PRINTED)}
    for place, (what, (value, most)) in enumerate(means.items(), start=2):
        yield value_inside(f"{what} of the tables <{name}>", value - float(head[place] if head else "nan"), -most, most)
    ranked = sorted(range(wanted.problem.classes), key=lambda at: (scores["f1"][at], -scores["support"][at]))[:TABLE]
    expected = ranked if wanted.problem.classes > TABLE else sorted(ranked)
    numbers = [map(float, line.split()) for line in lines if re.fullmatch(r" *\d+(  +\d\.\d{4}){3}  +\d+", line)]
    rows = [dict(zip(lines[2].split(), row, strict=False)) for row in numbers]
    yield from same(f"rows of the tables <{name}>", expected, [row.get("class") for row in rows])
    for score, heading in HEADINGS.items():
        away = max((abs(row.get(heading, math.inf) - scores[score][at]) for row, at in zip(rows, expected, strict=False)), default=math.inf)
        yield value_inside(f"{score} of the tables <{name}>", away, 0.0, PRINTED)
    start = next(
        (at for at, line in enumerate(lines) if line.startswith(("confusion:", "labels by class", "the most frequent"))), len(lines)
    )
    yield from _confusion_table(name, wanted, confusion, [re.split("  +", line.strip()) for line in lines[start:]])


def _confusion_table(name: str, wanted: Answers, confusion: Array, rows: Sequence[Sequence[str]]) -> Iterator[Comparison]:
    """The table has a title, and shows the whole matrix below its headings, or of many classes the most frequent confusions."""
    if wanted.problem.classes <= TABLE:
        title, headings = "confusion: rows are the true class, columns the predicted one", [*map(str, range(wanted.problem.classes))]
        if wanted.problem.several:
            title, headings = "labels by class: given and found", [f"{given}, {found}" for given in ("no", "yes") for found in FOUND]
        expected = [[title], headings, *([str(index), *map(str, row)] for index, row in enumerate(confusion.tolist()))]
        yield from same(f"confusion of the tables <{name}>", expected, [list(row) for row in rows])
    elif wanted.problem.several:
        yield from same(f"a table of too many labels <{name}>", [], list(rows))
    else:
        wrong = [(int(confusion[i, j]), int(i), int(j)) for i, j in np.argwhere(confusion) if i != j]
        title = "the most frequent confusions: samples, true class, predicted class"
        yield from same(f"title of the most frequent confusions <{name}>", [[title]], [list(row) for row in rows[:1]])
        shown = [tuple(map(int, row)) for row in rows[1:]]
        yield from same(
            f"counts of the most frequent confusions <{name}>",
            sorted((each[0] for each in wrong), reverse=True)[:TABLE],
            [each[0] for each in shown],
        )
        yield value_at_most(f"most frequent confusions that there are not <{name}>", len(set(shown) - set(wrong)), 0)


@reads_files
def texts_by_every_door(trial: Trial) -> Iterator[Comparison]:
    """Texts from a corpus, from a file by line, from standard input, from the command line and by the library have the same answers.

    They have white space at either end, other line ends inside or before the end, or nothing at all; lines end by LF or CRLF, the last one
    perhaps by none. Some stand there twice, beside each other and apart. All answers are the reference's.
    """
    rng = trial.rng("doors")
    with _trained(trial, "doors", {"num_classes": 4, "learning_rate": 0.5}) as (problem, run):
        drawn = texts_of(rng, len(ODD) + 2)
        texts = ["rm\r", drawn[0], *drawn, *drawn[:2], "ls\r"]
        labels = problem.labels(rng, len(texts))
        ends = ["\r\n", *(str(end) for end in rng.choice(["\n", "\r\n"], len(texts) - 2)), "\r\n"]
        content = "".join(text + end for text, end in zip(texts, ends, strict=True)).encode()
        (problem.folder / "lines.txt").write_bytes(content)
        (problem.folder / "open lines.txt").write_bytes(content.removesuffix(ends[-1].encode()))
        doors = {
            "corpus": ([f"--corpus={problem.corpus('texts', texts, labels)}"], b""),
            "corpus without labels": ([f"--corpus={_without_labels(problem, texts)}"], b""),
            "file": ([f"--input={problem.folder / 'lines.txt'}"], b""),
            "file whose last line has no end": ([f"--input={problem.folder / 'open lines.txt'}"], b""),
            "standard input": (["--input=-"], content),
            "command line": (["--", *texts], b""),
        }
        around = content + f"{LARGE_TEXT}\n".encode() + content  # lines before and behind those that memory holds
        large = ([f"--adapter={run}", "--input=-"], [*texts, LARGE_TEXT, *texts], [*labels, labels[0], *labels], around)
        shown, wanted = _answers(trial, problem, run / "best", *large)
        yield from (replace(each, tensor=f"beside a large text: {each.tensor}") for each in _probable(trial, "every line", wanted, shown))
        batch = texts[: problem.settings["batch_size"]]
        kinds = (tuple(batch), UserList(batch), np.asarray(batch, object))
        first, *others = (trial.commands.library("probabilities", run / "best", each) for each in kinds)
        for each, kind in zip(others, ("a program's own sequence", "an array"), strict=True):
            yield from same(f"library: probabilities of texts in {kind}", first, each)
        for door, (asked, given) in doors.items():
            shown, wanted = _answers(trial, problem, run / "best", (f"--adapter={run}", *asked), texts, labels, given)
            yield from (replace(each, tensor=f"{door}: {each.tensor}") for each in _probable(trial, "every line", wanted, shown))
            bits = np.asarray([line["probabilities"] for line in shown[: len(batch)]], first.dtype)
            yield from same(f"{door}: probabilities of the first batch, bit for bit the library's", first, bits)
        yield from _beyond_memory(trial, run, problem.folder / "large")
        yield from _read_once(trial, run, content, _without_labels(problem, texts), problem.folder / "texts.jsonl")
        (problem.folder / "empty").write_bytes(b"")
        for option in ("--input", "--corpus"):
            said = trial.commands.run("predict", f"--adapter={run}", f"{option}={problem.folder / 'empty'}")
            yield from same(f"what predict prints of no text <{option}>", "", said.out)
        listed = trial.commands.run("predict", f"--adapter={run}", "--input=-", stdin=b"\n").out
        without = trial.commands.attempt("predict", f"--adapter={run}", "", temporary_files=False)
        yield from same("answer where no temporary file can be made", (0, listed), (without.status, without.out))
        yield from same("answer to an empty text alone", listed, trial.commands.run("predict", f"--adapter={run}", "").out)
        yield from same("the library's answers to no text", [], trial.commands.library("predict", run / "best", []).tolist())
        opened = trial.commands.opened(run / "best", texts, labels)
        wanted = Answers.of(problem, run / "best", texts, labels, opened.classes)
    ids = [tokenizer().encode(text).ids[:MAX_SEQ_LEN] or [0] for text in texts]
    yield from same("library: token ids", ids, opened.ids)
    yield trial.near("library: probabilities", wanted.probabilities, opened.probabilities)
    yield from same("library: classes", wanted.classes.tolist(), opened.classes.tolist())


def _beyond_memory(trial: Trial, run: Path, file: Path) -> Iterator[Comparison]:
    """Python holds a small share of texts while they are read, of which the last is refused."""
    file.write_bytes((b"ls -l " * 10_000 + b"\n") * 100 + b"\xff\n")
    said = list[Said]()
    peak = most_held(lambda: said.append(trial.commands.attempt("predict", f"--adapter={run}", f"--input={file}")))
    yield from same("status of predict of a large file that ends in no text", 4, said[0].status)
    yield value_at_most("share of texts in memory while they are read", peak / file.stat().st_size, 0.3)


def _read_once(trial: Trial, run: Path, content: bytes, corpus: Path, labelled: Path) -> Iterator[Comparison]:
    """Lines of a pipe that has a name, which can be read only once, have the answers of a file's, and so have those of a corpus.

    Nothing can be written beside a pipe.
    """
    pipes = [("predict", "--input", content, "-")]
    pipes += [(command, "--corpus", file.read_bytes(), str(file)) for command, file in (("predict", corpus), ("evaluate", labelled))]
    for command, option, written, file in pipes:
        asked = (command, f"--adapter={run}")
        with piped(written) as name:
            said = trial.commands.run(*asked, f"{option}={name}")
        expected = trial.commands.run(*asked, f"{option}={file}", stdin=content).out
        yield from same(f"what {command} says of a pipe by name <{option}>", expected, said.out)


def _without_labels(problem: Small, texts: Sequence[str]) -> Path:
    """A corpus of which some lines have a label that no class has, and others none; and a `text` that is not asked about."""
    path = problem.folder / "unlabelled.jsonl"
    beside: tuple[dict[str, Any], ...] = ({}, {"label": -1}, {"text": "date", "label": "rm"})
    rows = [{"input": text} | beside[place % len(beside)] for place, text in enumerate(texts)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return path
