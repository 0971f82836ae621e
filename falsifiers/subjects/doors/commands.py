"""Commands as a user gives them, and what the user sees."""

from dataclasses import dataclass
from typing import Any

from blackswan.reference.table import Array

NOTHING = -1.0
"""In place of the step from which on TensorBoard hides what was shown before, where it hides nothing."""


@dataclass(frozen=True)
class Said:
    """The end of a command: its exit status, and the text on standard output and on standard error."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Opened:
    """The answers of a saved classifier to the calls of the library, on all texts at once.

    The classes of `predict`, [texts] or with several labels [texts, classes], the probabilities of `probabilities`, [texts, classes], and
    the fields of `evaluate`, by name; and the token ids of `encode`, a list a text.
    """

    classes: Array
    probabilities: Array
    evaluation: dict[str, Any]
    ids: list[list[int]]
