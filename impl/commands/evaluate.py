"""Loss, accuracy, precision, recall and F1 of each class, and the confusion matrix, of an adapter or a merged model on labelled texts."""

import argparse
import dataclasses
import heapq
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blackswan.impl.commands.common import add_adapter_options, open_saved

if TYPE_CHECKING:
    from blackswan.impl.evaluation import Evaluation, Matrix


MOST_ROWS, MOST_CLASSES = 50, 1000
"""Rows of a table that a person reads; of more classes the worst are shown."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_adapter_options(parser, required=False)
    parser.add_argument("--corpus", metavar="FILE", type=Path, required=True, help="labelled JSONL corpus")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def run(options: argparse.Namespace) -> None:
    """Prints the evaluation."""
    from blackswan.impl.progress import reading
    from blackswan.impl.samples import read_samples

    pipeline = open_saved(options)
    config, path = pipeline.config, options.corpus
    samples = read_samples(path, pipeline.tokens, config.num_classes, config.multi_label, reading(path, sys.stderr))
    if truncated := samples.statistics().truncated:
        print(f"{path}: {truncated} texts are longer than max_seq_len {config.max_seq_len}: their end is cut off", file=sys.stderr)
    evaluation = pipeline.evaluate(samples)
    if options.json:
        print(json.dumps(as_json(evaluation)))
    else:
        print("\n".join(lines(evaluation, config.multi_label)))


def as_json(evaluation: "Evaluation") -> dict[str, Any]:
    """The evaluation for programs. Of more than MOST_CLASSES classes the confusion is a list of [true, predicted, count] without zeros."""
    scores = [dataclasses.asdict(score) for score in evaluation.per_class]
    values = vars(evaluation) | {"per_class": scores, "macro_f1": macro_f1(evaluation)}
    if len(evaluation.per_class) > MOST_CLASSES:
        rows = enumerate(values.pop("confusion"))
        values["confusion_counts"] = [[true, taken, count] for true, row in rows for taken, count in enumerate(row) if count]
    return values


def macro_f1(evaluation: "Evaluation") -> float:
    """Mean of the classes' F1."""
    return sum(score.f1 for score in evaluation.per_class) / len(evaluation.per_class)


def lines(evaluation: "Evaluation", multi_label: bool) -> Iterator[str]:
    """The evaluation as tables."""
    yield f"{evaluation.total} samples  loss {evaluation.loss:.4f}  accuracy {evaluation.accuracy:.4f}  macro-F1 {macro_f1(evaluation):.4f}"
    yield ""
    yield f"{'class':>5}  {'precision':>9}  {'recall':>9}  {'F1':>9}  {'samples':>9}"
    scores = list(enumerate(evaluation.per_class))
    if len(scores) > MOST_ROWS:
        yield f"the {MOST_ROWS} classes of the lowest F1, of {len(scores)}; --json has all"
        scores = sorted(scores, key=lambda entry: (entry[1].f1, -entry[1].support))[:MOST_ROWS]
    for index, score in scores:
        yield f"{index:>5}  {score.precision:>9.4f}  {score.recall:>9.4f}  {score.f1:>9.4f}  {score.support:>9}"
    yield ""
    if len(evaluation.confusion) > MOST_ROWS:
        yield from _most_frequent(evaluation.confusion, multi_label)
        return
    yield from _table(evaluation.confusion, ["no, not found", "no, found", "yes, not found", "yes, found"] if multi_label else None)


def _most_frequent(confusion: "Matrix", multi_label: bool) -> Iterator[str]:
    """The confusions that happen most, where a table of all classes would be too large to read."""
    if multi_label:
        return
    cells = ((count, true, taken) for true, row in enumerate(confusion) for taken, count in enumerate(row) if count and true != taken)
    yield "the most frequent confusions: samples, true class, predicted class"
    for count, true, taken in heapq.nlargest(MOST_ROWS, cells):
        yield f"{count:>9}  {true:>5}  {taken:>5}"


def _table(confusion: "Matrix", columns: list[str] | None) -> Iterator[str]:
    names = columns or [str(index) for index in range(len(confusion[0]))]
    yield "labels by class: given and found" if columns else "confusion: rows are the true class, columns the predicted one"
    width = max(5, *map(len, names), *(len(str(count)) for row in confusion for count in row))
    yield "  ".join([" " * 5, *(name.rjust(width) for name in names)])
    for index, row in enumerate(confusion):
        yield "  ".join([str(index).rjust(5), *(str(count).rjust(width) for count in row)])
