"""Whole classifiers whose weights follow from a seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from blackswan.falsifiers.numeric.whole_model import WholeModel
from blackswan.falsifiers.subjects.protocol import TracedCall
from blackswan.reference.table import Array


@dataclass(frozen=True)
class ModelOutputs:
    """The answer of a classifier to a batch.

    `hidden` has states [batch, seq, hidden] by the path of their module, with any value at padding; `logits` are [batch, classes], the loss
    is a number, and `gradients` has that of each trainable parameter by its name.
    """

    hidden: Mapping[str, Array]
    logits: Array
    loss: Array
    gradients: Mapping[str, Array]


@dataclass(frozen=True)
class Rounded:
    """Operations in float32 whose inputs, results and gradients are rounded to that dtype; at random in the replay of that number."""

    dtype: str
    replay: int | None


class Model(Protocol):
    """A whole classifier, made of weights that both sides have."""

    def outputs(self, whole: WholeModel, dtype: str, rounded: Rounded | None = None) -> ModelOutputs:
        """A forward and backward pass in that dtype, or under a rounding. Lacks where the subject has no such dtype or rounding."""

    def calls(self, whole: WholeModel, dtype: str, block: str) -> list[TracedCall]:
        """The calls that the block at that path makes in both passes, with local gradients; none where they cannot be recorded."""
