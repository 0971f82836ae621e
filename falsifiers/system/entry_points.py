"""The entry points of a pipeline: gradient vector, numbers of parameters, evaluation, the empty batch."""

from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly
from blackswan.falsifiers.system.run_problem import Problem, equal, group_of, near
from blackswan.reference.training import split


def gradient_vector_goes_out_and_in(attack: Attack, case: Case) -> list[Comparison]:
    """The vector is the reference's gradient in the order of layers, A before B, then the head.

    Given back it makes the step of `train_batch`, bit for bit; of another length it is refused, and nothing changes.
    """
    problem = Problem(attack, case)
    indices = list(range(5))
    asked = attack.answer(case, scalars=problem.request(calls=[("train_batch", indices)]))
    out = attack.answer(case, scalars=problem.request(calls=[("accumulate", indices), ("gradient_vector", None)]))
    vector = out["1/vector"]
    given = (vector[:-1], np.append(vector, vector[:1]), vector[:0], vector)
    calls = [("accumulate", indices), *(("apply_gradient_vector", each) for each in given)]
    back = attack.answer(case, scalars=problem.request(calls=calls))
    rows, labels = ([each[i] for i in indices] for each in problem.train)
    expected = problem.gradient(problem.parameters, rows, labels)
    found = [near(attack, "gradient vector", expected, vector)]
    found += [
        near(attack, name, part, got)
        for name, part, got in zip(problem.names, *(split(each, _shapes(problem)) for each in (expected, vector)), strict=True)
    ]
    for index, wrong in enumerate(given[:3], start=1):
        error = str(back.get(f"{index}/error", "accepted"))
        if not error.startswith("ValueError"):
            found.append(broken(f"vector of {len(wrong)} of {len(vector)} elements", "not refused", "ValueError", error))
        found += equal(group_of(out, "1/state/"), group_of(back, f"{index}/state/"), "after the refusal")
    return found + equal(group_of(asked, "0/state/"), group_of(back, "4/state/"), "after the step")


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    return [problem.parameters[f"parameters/{name}"].shape for name in problem.names]


def trainable_count_is_the_formulas(attack: Attack, case: Case) -> list[Comparison]:
    """Σ r · (in + out) + hidden · classes + classes: the length of the gradient vector, and the number that the summary states."""
    problem = Problem(attack, case)
    answer = attack.answer(case, scalars=problem.request(calls=[("accumulate", [0]), ("gradient_vector", None)]))
    scalars = problem.scalars
    targets = ("q_proj", "v_proj") if scalars["targets"] == "q_v" else ("_proj",)
    shapes = [value.shape for name, value in problem.parameters.items() if name.removesuffix(".weight").endswith(targets)]
    expected = sum(2 * sum(shape) for shape in shapes if len(shape) == 2) + scalars["hidden"] * problem.classes + problem.classes
    found = [compare_exactly("length of the gradient vector", np.asarray(expected), np.asarray(len(answer["1/vector"])))]
    if f"{expected:,} trainable" not in str(answer["summary"]):
        found.append(broken("summary", "another number of trainable parameters", f"{expected:,} trainable", str(answer["summary"])))
    return found


def evaluation_changes_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Training with evaluations between its calls, those that accumulate and apply too, against training without: the same bits.

    And an evaluation after a step gives the reference's loss at the parameters then, not what the step left behind.
    """
    problem = Problem(attack, case)
    train = [("train_batch", [0, 1, 2]), ("accumulate", [3, 4, 8]), ("apply", None), ("train_batch", [5, 6])]
    others: list[tuple[str, Any]] = [("evaluate", [4, 5, 7]), ("forward_only", [8, 2]), ("probabilities", [1]), ("evaluate", [0, 1, 2])]
    between = [call for step in train for call in (*others, step)] + others
    plain = attack.answer(case, scalars=problem.request(calls=train))
    mixed = attack.answer(case, scalars=problem.request(calls=between))
    found = []
    for step in range(len(train)):
        at = step * (len(others) + 1) + len(others)
        found += equal(group_of(plain, f"{step}/state/"), group_of(mixed, f"{at}/state/"), f"after call {step + 1}")
        rows, labels = ([each[i] for i in (4, 5, 7)] for each in problem.train)
        trainable = {name: np.asarray(v, np.float64) for name, v in group_of(mixed, f"{at}/state/trainable/").items()}
        found.append(near(attack, f"loss after call {step + 1}", problem.loss(trainable, rows, labels), mixed[f"{at + 1}/loss"]))
    return found


def empty_batch_has_accuracy_zero(attack: Attack, case: Case) -> list[Comparison]:
    """`forward_only` of no sample: total 0, correct 0, accuracy 0, no loss made up; a step on none is refused."""
    problem = Problem(attack, case)
    answer = attack.answer(case, scalars=problem.request(calls=[("forward_only", []), ("train_batch", [])]))
    numbers = {name: np.asarray(answer[f"0/{name}"], np.float64) for name in ("total", "correct", "accuracy")}
    found = [compare_exactly(name, np.asarray(0.0), value) for name, value in numbers.items()]
    found.append(compare_exactly("loss", np.asarray(np.nan), np.asarray(answer["0/loss"], np.float64)))
    if not str(answer.get("1/error", "")).startswith("ValueError"):
        found.append(broken("train_batch of no sample", "accepted"))
    return found
