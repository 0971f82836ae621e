"""Whole classifiers that are made of the weights of both sides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Whole(Protocol):
    """A classifier and a batch, such as a `numeric.whole_model.WholeModel`."""

    @property
    def scalars(self) -> Mapping[str, Any]:
        """Architecture, LoRA, pooling and whether its projections are NF4, by name."""

    @property
    def inputs(self) -> Mapping[str, Array]:
        """input_ids and mask [batch, seq], labels [batch]."""

    def parameters(self) -> Mapping[str, Array]:
        """The parameters by Hugging Face name; with NF4 those of projections are to be quantised."""


@dataclass(frozen=True)
class Given:
    """A classifier and a batch as plain arrays, which another process can read."""

    scalars: Mapping[str, Any]
    inputs: Mapping[str, Array]
    arrays: Mapping[str, Array]

    def parameters(self) -> Mapping[str, Array]:
        """The arrays."""
        return self.arrays


@dataclass(frozen=True)
class Described:
    """What a user says of a model beside the model: a map of names, the content of config.json, the pooling before a head of classes, and
    LoRA's alpha. The configuration and alpha are looked up in the model where they are not said."""

    names: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    pooling: str = "last"
    alpha: float | None = None


class Model(Protocol):
    """A whole classifier, made of weights that both sides have."""

    def outputs(self, whole: Whole, dtype: str, rounded: Rounded | None = None) -> ModelOutputs:
        """A forward and backward pass in that dtype, or under a rounding. Lacks where the subject has no such dtype or rounding."""

    def calls(self, whole: Whole, dtype: str, block: str) -> list[TracedCall]:
        """The calls that the block at that path makes in both passes, with local gradients; none where they cannot be recorded."""
