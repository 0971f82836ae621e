"""What system claims ask of a subject, in plain Python objects and NumPy arrays: one protocol a subject matter.

A subject opens by `subject.door(name)` those that it has; for another it raises Lacks, and the claim is NOT_RUN with that reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blackswan.falsifiers.numeric.whole_model import WholeModel
from blackswan.falsifiers.subjects.protocol import TracedCall
from blackswan.reference.table import Array

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


Architecture = Mapping[str, Any]
"""The sizes and scalars of a decoder, by the names of `reference.decoder.DecoderConfig`, and `max_positions`."""
Parameters = Mapping[str, Array]
"""Arrays by the Hugging Face name of the parameter."""


@dataclass(frozen=True)
class Tokens:
    """Token shards, and how they are read: batches of `batch` rows of `seq` tokens; in the order of the stream where there is no seed."""

    folder: Path
    vocab: int
    batch: int
    seq: int
    seed: int | None = None


@dataclass(frozen=True)
class TokenRows:
    """Rows of an epoch: token ids and mask (true at real tokens), both [rows, seq], and the number of rows of each batch.

    `length` is the number of batches that the reader announces for the whole epoch.
    """

    input_ids: Array
    mask: Array
    batches: list[int]
    length: int


@dataclass(frozen=True)
class Pretraining:
    """A run from random weights of that seed. `settings` are by the names of `impl.pretrain_run.PretrainSettings`."""

    architecture: Architecture
    seed: int
    train: Tokens
    validation: Tokens | None
    output: Path
    tokenizer: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PretrainingStep:
    """A step that was made: its number in the run, from 1, and its epoch, from 0; the norm is taken before clipping."""

    step: int
    epoch: int
    loss: float
    gradient_norm: float
    tokens: int
    learning_rate: float


@dataclass(frozen=True)
class PretrainingRecord:
    """What a run did up to its end or its kill: steps, the validation loss of each epoch, parameters; the state's hash at the end."""

    steps: list[PretrainingStep]
    validation: list[float]
    parameters: Parameters
    state_hash: str


class TrainedDecoder(Protocol):
    """A session: a decoder that can be trained, validated and saved."""

    def parameters(self) -> Parameters:
        """The parameters as they are now."""

    def overwrite(self, parameter: str, index: int, value: float) -> None:
        """Puts a value into the flattened parameter."""

    def train(self, input_ids: Array) -> float:
        """The loss of an optimiser step on all parameters, on rows [batch, seq] without padding."""

    def moments(self) -> tuple[int, Mapping[str, Array]]:
        """Steps made, and both moments of each parameter: `exp_avg/<parameter>` and `exp_avg_sq/<parameter>`."""

    def validate(self, tokens: Tokens, micro_batch: int) -> float:
        """The mean loss over all tokens of an epoch that are predicted; NaN where none is."""

    def save(self, output: Path, tokenizer: Path, step: int) -> Path:
        """Writes the checkpoint after a step, and returns its folder."""


class Pretrainer(Protocol):
    """Language-model pre-training: streams of tokens, runs, their parts, and what they start from."""

    def epoch(self, tokens: Tokens, epoch: int, start: int = 0) -> TokenRows:
        """The rows of an epoch from batch `start` on."""

    def run(self, problem: Pretraining, stop_after: int | None = None, resume: bool = False) -> PretrainingRecord:
        """A run, killed after a step where one is named; or, resumed, the rest of one that was killed."""

    def random(self, architecture: Architecture, seed: int) -> TrainedDecoder:
        """A decoder with random weights."""

    def load(self, folder: Path) -> TrainedDecoder:
        """The decoder of a checkpoint, whose tokenizer can be read too."""

    def initial(self, architecture: Path | None, weights: Path | None) -> TrainedDecoder:
        """The decoder that a run of these checkpoint folders starts from."""

    def default_architecture(self) -> tuple[Architecture, int]:
        """What is trained where none is given, and the number of its parameters."""

    def state_hash(self, steps: int, moments: Mapping[str, Array]) -> str:
        """The hash of an optimiser's state, in hexadecimal."""


@dataclass(frozen=True)
class ModelOutputs:
    """Of a classifier and a batch: hidden states [batch, seq, hidden] by the path of the module that they come from, whatever they are at
    padding; logits [batch, classes]; the loss, a number; and the gradient of each trainable parameter by its name.
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


class Models(Protocol):
    """Whole classifiers."""

    def outputs(self, whole: WholeModel, dtype: str, rounded: Rounded | None = None) -> ModelOutputs:
        """A forward and backward pass in that dtype, or under a rounding. Lacks where the subject has no such dtype or rounding."""

    def calls(self, whole: WholeModel, dtype: str, block: str) -> list[TracedCall]:
        """The calls that the block at that path makes in both passes, with local gradients; none where they cannot be recorded."""


__all__ = [
    "Architecture",
    "Corpora",
    "Label",
    "Lacks",
    "ModelOutputs",
    "Models",
    "Parameters",
    "Pretrainer",
    "Pretraining",
    "PretrainingRecord",
    "PretrainingStep",
    "Rounded",
    "Session",
    "Split",
    "TokenRows",
    "Tokens",
    "TrainedDecoder",
]
