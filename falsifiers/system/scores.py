"""What an evaluation counts: classes, accuracy, confusion, and the scores of each class."""

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, compare_exactly
from blackswan.falsifiers.system.run_problem import Problem, near
from blackswan.reference.table import Array

UNDECIDED = 1e-4
"""Of the largest logit: two that are closer may change places in float32."""
UNLIKELY = -20.0
"""Bias of a class whose logit is then below all others."""


def scores_are_of_the_largest_logits(attack: Attack, case: Case) -> list[Comparison]:
    """Classes, confusion, accuracy, precision, recall and F1 counted here, from the reference's logits; and the share of the first class
    of a sample on which two logits are too close, which the subject decides."""
    problem = Problem(attack, case, multi_label=case.seed % 2 == 1)
    # A text of these bytes has these bytes as its tokens.
    rows = [[number % 128 for number in row] for row in problem.train[0]]
    problem.train = rows, problem.train[1]
    if case.seed % 4 < 2:
        _forget_the_last_class(problem)
    every = list(range(len(rows)))
    answer = attack.answer(case, scalars=problem.request(calls=[("predict", every), ("evaluate", every)]))
    labels = np.asarray(problem.train[1])
    given = answer["0/classes"]
    expected = _classes(problem, rows, given)
    confusion = _confusion(problem, labels, expected)
    found = [
        compare_exactly("classes", expected, given),
        compare_exactly("confusion", confusion, answer["1/confusion"]),
        near(attack, "accuracy", np.mean((expected == labels).reshape(len(rows), -1).all(axis=1)), answer["1/accuracy"]),
    ]
    for name, value in _scores(confusion, problem.several).items():
        found.append(near(attack, name, value, answer[f"1/{name}"]))
    return found


def _forget_the_last_class(problem: Problem) -> None:
    """No sample has it, and none is taken for it."""
    rows, labels = problem.train
    last = problem.classes - 1
    problem.train = rows, [[*label[:last], 0] if problem.several else min(label, last - 1) for label in labels]
    bias = problem.parameters["parameters/score.bias"].copy()
    bias[last] = UNLIKELY
    problem.parameters["parameters/score.bias"] = bias


def _classes(problem: Problem, rows: list[list[int]], given: Array) -> Array:
    """By the reference's logits; the subject's own where these are undecided."""
    inputs = problem.inputs(problem.parameters, rows, problem.train[1])
    logits = reference.evaluate("classifier_forward", inputs, problem.scalars)["logits"]
    near_by = UNDECIDED * np.abs(logits).max()
    if problem.several:
        return np.where(np.abs(logits) < near_by, given, logits > 0).astype(np.int64)
    ordered = np.sort(logits, axis=1)
    return np.where(ordered[:, -1] - ordered[:, -2] < near_by, given, logits.argmax(axis=1)).astype(np.int64)


def _confusion(problem: Problem, labels: Array, classes: Array) -> Array:
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
