"""Pre-training of language models on streams of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blackswan.reference.table import Array

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
class StreamRows:
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

    def epoch(self, tokens: Tokens, epoch: int, start: int = 0) -> StreamRows:
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
