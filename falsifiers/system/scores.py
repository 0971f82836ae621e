"""Claims about an evaluation's counts: classes, accuracy, confusion, and the scores of each class."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Corpus
from blackswan.falsifiers.system.run_problem import SmallRun, small_run
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

UNDECIDED = 1e-4
"""Two logits that are closer than this share of the largest one may change places in float32."""
MANY = 300
"""Times that every sample is there, so that no byte counts the samples of a cell, and samples of a batch."""
LOST, SUMMED = 30, 1e-10
"""So many small losses beside a large one, and a share of their mean that sums in float64 keep."""
WAITING = 8
"""So many batches of an evaluation may wait for the model at most; the memory of a whole corpus has no room."""
BEYOND, SEVERAL = 2**16 + 1, 2**13
"""One sample more than 16 bits count, and samples of a batch of them."""
CLASS_WEIGHTS, WEIGHED = (1.001, 2.003, 0.2503), 1e-6
"""Weights of classes which bfloat16 rounds by a thousandth or so, and a share of a loss that float32 keeps."""
UNLIKELY = -20.0
"""Bias of a class whose logit is then below all others."""


def scores_are_of_the_largest_logits(trial: Trial) -> Iterator[Comparison]:
    """Classes, confusion, accuracy, precision, recall and F1 are those counted here from the reference's logits.

    Where two logits of a sample are too close, its class is the subject's. In half of the cases the last class has no sample. In a third of
    them every sample is there some hundred times, which changes counts alone.
    """
    times = MANY if trial.seed % 3 == 0 else 1
    batch: dict[str, Any] = {"batch_size": MANY} if times > 1 else {}
    problem = small_run(trial, multi_label=trial.seed % 2 == 1, **batch)
    # A text of these bytes has these bytes as its tokens.
    rows = [[number % 128 for number in row] for row in problem.training.rows]
    problem = replace(problem, training=Corpus(rows, problem.training.labels))
    if trial.seed % 4 < 2:
        problem = _without_the_last_class(problem)
    every = range(len(rows))
    pipeline = trial.trainer.pipeline(problem)
    given, evaluation = pipeline.predict(every), pipeline.evaluate([*every] * times)
    labels, expected = np.asarray(problem.training.labels), _classes(problem, given)
    confusion = times * _confusion(problem, labels, expected)
    accuracy = np.mean((expected == labels).reshape(len(rows), -1).all(axis=1))
    yield from same("classes", expected, given)
    if times > 1:
        yield from same("classes of many texts", np.concatenate([given] * times), pipeline.predict([*every] * times))
    yield from same("confusion", confusion, evaluation.confusion)
    yield trial.near("accuracy", accuracy, evaluation.accuracy)
    yield from (trial.near(name, value, getattr(evaluation, name)) for name, value in _scores(confusion, problem.several).items())


def sums_and_bounds_are_exact(trial: Trial) -> Iterator[Comparison]:
    """Of several labels those are found whose logits are above 0, by however little, in bfloat16 too; of one that of the largest logit,
    though its probability is rounded to that of another; and a mean is that of its samples.

    Logits are the biases of the head. One sample has a loss beside which float32 loses those of the others. A few batches are made ahead
    of the model, not all of them, in a run's validation too.
    """
    for dtype, smallest in (("bfloat16", 2.0**-9), ("bfloat16", 2.0**-30), ("float32", 2.0**-30)):
        problem = small_run(trial, multi_label=True, dtype=dtype, batch_size=1)
        bias = np.resize(np.array([smallest, -smallest, 0.0]), problem.classes).astype(np.float32)
        pipeline, expected = trial.trainer.pipeline(_by_biases(problem, bias)), np.tile(bias > 0, (2, 1)).astype(np.int64)
        label = f"logits of {smallest} in {dtype}"
        yield from same(f"classes, {label}", expected, pipeline.predict([0, 1]))
        confusion = _confusion(problem, np.asarray(problem.training.labels[:2]), expected)
        yield from same(f"confusion, {label}", confusion, pipeline.evaluate([0, 1]).confusion)
    yield from _largest_by_little(trial)
    bias = np.where(np.arange(problem.classes) == 0, np.float32(2**24), np.float32(0.0))
    labels: list[Label] = [[int(place > 0), *[0] * (problem.classes - 1)] for place in range(len(problem.training.labels))]
    problem = _by_biases(replace(problem, training=replace(problem.training, labels=labels)), bias)
    pipeline, places = trial.trainer.pipeline(problem), [0, *[1] * LOST]
    own = {place: pipeline.evaluate([place]).loss for place in (0, 1)}
    mean = math.fsum(own[place] for place in places) / len(places)
    yield value_at_most("share of a mean loss that is lost", abs(pipeline.evaluate(places).loss - mean) / mean, SUMMED)
    yield value_at_most("samples that wait for the model", pipeline.evaluated_ahead([1] * WAITING * 3), WAITING)
    pipeline = trial.trainer.pipeline(small_run(trial, batch_size=1, epochs=1, warmup_fraction=0.0))
    yield value_at_most("samples of a validation that wait", pipeline.validated_ahead([1] * WAITING * 3), WAITING)
    yield from _weighed_as_given(trial)
    yield from _counted_beyond_16_bits(trial)


def _largest_by_little(trial: Trial) -> Iterator[Comparison]:
    """The class of the largest logit is found, one after another, where softmax gives all of them the same number."""
    problem = small_run(trial, batch_size=1)
    for largest in range(problem.classes):
        bias = np.where(np.arange(problem.classes) == largest, np.float32(2.0**-30), np.float32(0.0))
        pipeline, expected = trial.trainer.pipeline(_by_biases(problem, bias)), np.full(2, largest)
        yield from same(f"classes, logit {largest} the largest by little", expected, pipeline.predict([0, 1]))
        confusion = _confusion(problem, np.asarray(problem.training.labels[:2]), expected)
        yield from same(f"confusion, logit {largest} the largest by little", confusion, pipeline.evaluate([0, 1]).confusion)


def _weighed_as_given(trial: Trial) -> Iterator[Comparison]:
    """A sample of three equal logits has its class's weight times ln 3 for a loss; bfloat16 does not hold the weights."""
    for dtype in ("bfloat16", "float32"):
        problem = small_run(trial, dtype=dtype, class_weights=list(CLASS_WEIGHTS))
        pipeline = trial.trainer.pipeline(_by_biases(problem, np.zeros(len(CLASS_WEIGHTS), np.float32)))
        for place, weight in enumerate(CLASS_WEIGHTS):  # the first samples have the classes in order
            lost = abs(pipeline.evaluate([place]).loss / (weight * math.log(len(CLASS_WEIGHTS))) - 1)
            yield value_at_most(f"share that is lost of a loss of weight {weight} in {dtype}", lost, WEIGHED)


def _counted_beyond_16_bits(trial: Trial) -> Iterator[Comparison]:
    """A cell of the confusion, and the right answers of an evaluation and of a step, count more samples than a byte or 16 bits do: one of
    the shortest, again and again, whose class or another one has the largest logit."""
    problem = small_run(trial, batch_size=SEVERAL)
    shortest = min(range(len(problem.training)), key=lambda place: len(problem.training.rows[place]))
    label = problem.training.labels[shortest]
    assert isinstance(label, int)
    for taken in ((label + 1) % problem.classes, label):
        bias = np.where(np.arange(problem.classes) == taken, np.float32(1.0), np.float32(0.0))
        pipeline, expected = trial.trainer.pipeline(_by_biases(problem, bias)), np.zeros((problem.classes, problem.classes), np.int64)
        expected[label, taken] = BEYOND
        evaluation = pipeline.evaluate([shortest] * BEYOND)
        yield from same(f"confusion of more samples than 16 bits count, taken for {taken}", expected, evaluation.confusion)
        yield from same(f"accuracy of more samples than 16 bits count, taken for {taken}", float(taken == label), evaluation.accuracy)
    accumulated = pipeline.accumulate([shortest] * SEVERAL)
    yield from same("right answers of more samples than a byte counts", SEVERAL, accumulated.correct)


def _by_biases(problem: SmallRun, bias: Array) -> SmallRun:
    weight = np.zeros_like(problem.parameters["score.weight"])
    rows = [[number % 128 for number in row] for row in problem.training.rows]
    parameters = {**problem.parameters, "score.weight": weight, "score.bias": bias}
    return replace(problem, training=replace(problem.training, rows=rows), parameters=parameters)


def _without_the_last_class(problem: SmallRun) -> SmallRun:
    """No sample has it, and none is taken for it."""
    last = problem.classes - 1
    labels: list[Label] = [[*label[:last], 0] if isinstance(label, list) else min(label, last - 1) for label in problem.training.labels]
    bias = problem.parameters["score.bias"].copy()
    bias[last] = UNLIKELY
    return replace(problem, training=Corpus(problem.training.rows, labels), parameters={**problem.parameters, "score.bias": bias})


def _classes(problem: SmallRun, given: Array) -> Array:
    """The classes of the largest reference logits, or the subject's own where two logits are too close."""
    inputs = problem.inputs({}, problem.training.samples())
    logits = reference.evaluate("classifier_forward", inputs, problem.scalars)["logits"]
    near_by = UNDECIDED * np.abs(logits).max()
    if problem.several:
        return np.where(np.abs(logits) < near_by, given, logits > 0).astype(np.int64)
    ordered = np.sort(logits, axis=1)
    return np.where(ordered[:, -1] - ordered[:, -2] < near_by, given, logits.argmax(axis=1)).astype(np.int64)


def _confusion(problem: SmallRun, labels: Array, classes: Array) -> Array:
    """[true class, class], or with several labels [class, (absent or present) · 2 + (not found or found)]."""
    if problem.several:
        cells = 2 * labels + classes
        return np.stack([np.bincount(column, minlength=4) for column in cells.T])
    found = np.zeros((problem.classes, problem.classes), np.int64)
    np.add.at(found, (labels, classes), 1)
    return found


def _scores(confusion: Array, several: bool) -> dict[str, Array]:
    """Precision, recall, F1 and support of each class; 0 where there is nothing to divide by."""
    hits, claimed, support = (
        (confusion[:, 3], confusion[:, 1] + confusion[:, 3], confusion[:, 2] + confusion[:, 3])
        if several
        else (confusion.diagonal(), confusion.sum(axis=0), confusion.sum(axis=1))
    )
    precision, recall = (_share(hits, of) for of in (claimed, support))
    return {"precision": precision, "recall": recall, "f1": _share(2 * precision * recall, precision + recall), "support": support}


def _share(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole != 0, dtype=np.float64)
