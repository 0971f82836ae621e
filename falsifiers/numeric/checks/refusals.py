"""Refusals: an input made bad must raise the named error with a word of its cause, and change nothing."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.reference.table import Array

Bad = Callable[[Case, Generator], Mapping[str, Array]]


def _non_finite(name: str) -> Bad:
    def make(case: Case, rng: Generator) -> Mapping[str, Array]:
        value = case.inputs[name].copy()
        value.reshape(-1)[rng.integers(value.size)] = rng.choice([np.nan, np.inf, -np.inf])
        return {name: value}

    return make


def _label_out_of_range(case: Case, rng: Generator) -> Mapping[str, Array]:
    labels, classes = case.inputs["labels"].copy(), case.inputs["logits"].shape[1]
    labels[rng.integers(labels.size)] = rng.choice([-1, classes, classes + 7])
    return {"labels": labels}


def _one_class(case: Case, rng: Generator) -> Mapping[str, Array]:
    del rng
    one = {"logits": case.inputs["logits"][:, :1], "labels": np.zeros_like(case.inputs["labels"])}
    return one | ({"class_weights": np.ones(1)} if "class_weights" in case.inputs else {})


def _nothing_to_predict(case: Case, rng: Generator) -> Mapping[str, Array]:
    mask = np.zeros_like(case.inputs["mask"])
    mask[np.arange(len(mask)), rng.integers(0, mask.shape[1], len(mask))] = True
    return {"mask": mask}


def _empty_sample(case: Case, rng: Generator) -> Mapping[str, Array]:
    mask = case.inputs["mask"].copy()
    mask[rng.integers(len(mask))] = False
    return {"mask": mask}


BAD: dict[str, Bad] = {
    "non_finite_logits": _non_finite("logits"),
    "non_finite_gradients": _non_finite("gradients"),
    "label_out_of_range": _label_out_of_range,
    "one_class": _one_class,
    "nothing_to_predict": _nothing_to_predict,
    "empty_sample": _empty_sample,
}


def truncate(path: Path, rng: Generator) -> None:
    """Leaves a part of a file that lacks more than the white space at its end, without which JSON is still whole."""
    content = path.read_bytes()
    path.write_bytes(content[: int(rng.integers(0, len(content.rstrip())))])


def refuses(attack: Attack, case: Case) -> list[Comparison]:
    """The bad input raises `error` and its text holds `message`; that the arrays are as they were holds for every answer."""
    arguments = attack.claim.arguments
    changes = BAD[str(arguments["bad"])](case, generator_for(case.seed, "bad input"))
    error, message = str(arguments["error"]), str(arguments["message"])
    if not attack.subject.names_errors:
        error, message = "Exception", ""
    return [refusal(lambda: attack.answer(case, inputs=changes), error, message)]


def refusal(ask: Callable[[], object], error: str, message: str) -> Comparison:
    """Whether `ask` raises the error (one of several between `|`) with the message (a regular expression, any case)."""
    try:
        answer = ask()
    except SubjectError as raised:
        cause = raised.__cause__
        if cause is None:
            return broken("refusal", str(raised))
        name, text = type(cause).__name__, str(cause)
        accepted = not {kind.__name__ for kind in type(cause).__mro__}.isdisjoint(error.split("|"))
        if accepted and re.search(message, text, re.IGNORECASE):
            return Comparison("refusal", True, 0.0, "refusal")
        return broken("refusal", "another error", f"{error} mentioning {message!r}", f"{name}: {text}")
    return broken("refusal", "accepted", f"{error} mentioning {message!r}", f"an answer: {_shown(answer)}")


def _shown(answer: object) -> str:
    try:
        return str(answer)[:80]
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "with a number of thousands of digits"
