"""What system claims ask of a subject, in plain Python objects and NumPy arrays: one protocol a subject matter.

A subject opens by `subject.door(name)` those that it has; for another it raises Lacks, and the claim is NOT_RUN with that reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Label = int | list[int]
"""A class, or of several labels a sample a 0 or 1 for each class."""


class Lacks(Exception):  # noqa: N818  # a reason not to run, no error
    """The subject has no such door, or cannot do here what is asked; the text says why."""


class Session:
    """Base of an object that a door opens and whose methods are further questions: a pipeline, a ledger, a stream of tokens."""


@dataclass(frozen=True)
class Split:
    """The places in the corpus of the samples for training and for validation, and the labels that each part gives them."""

    training: list[int]
    validation: list[int]
    training_labels: list[Label]
    validation_labels: list[Label]


class Corpora(Protocol):
    """Reading corpora, and the plan of an epoch."""

    def epoch_order(self, count: int, seed: int, epoch: int) -> list[int]:
        """The order of so many samples in an epoch of a run with that seed."""

    def effective_batches(self, order: Sequence[int], size: int) -> list[list[int]]:
        """The samples of each optimiser step."""

    def split(self, labels: Sequence[Label], classes: int, fraction: float, seed: int) -> Split:
        """A corpus with those labels in two parts."""

    def balanced_weights(self, labels: Sequence[Label], classes: int) -> list[float]:
        """Balanced class weights of a corpus with those labels."""


__all__ = ["Corpora", "Label", "Lacks", "Session", "Split"]
