"""What system claims ask of a subject, in plain Python objects and NumPy arrays: one protocol a subject matter.

A subject opens by `subject.door(name)` those that it has; for another it raises Lacks, and the claim is NOT_RUN with that reason.
"""

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
class CorpusFile:
    """A corpus in JSONL, the number of its classes, and whether a sample may be of several."""

    path: Path
    classes: int
    multi_label: bool = False


@dataclass(frozen=True)
class Tokenizing:
    """The checkpoint folder whose tokenizer is used, None for bytes; how many tokens a text may have; the side of the padding."""

    tokenizer: Path | None
    max_seq_len: int
    padding_side: str = "right"


@dataclass(frozen=True)
class Statistics:
    """Samples in all and of each class; lengths in tokens before truncation: percentiles, the longest, how many were truncated."""

    total: int
    class_counts: tuple[int, ...]
    length_percentiles: dict[int, int]
    max_length: int
    truncated: int
    minority: int
    imbalance: float


@dataclass(frozen=True)
class TokenRows:
    """The ids and the label of each sample, and the tokenizer's id of padding, its number of ids and how it describes itself."""

    rows: list[list[int]]
    labels: list[Label]
    statistics: Statistics
    fill: int
    vocab: int
    description: str


@dataclass(frozen=True)
class Batch:
    """Ids and mask [samples, longest] and labels; ids and mask again from the raw texts."""

    input_ids: Array
    mask: Array
    labels: Array
    raw_input_ids: Array
    raw_mask: Array


class Corpora(Protocol):
    """Reading corpora, and the plan of an epoch."""

    def load(self, corpus: CorpusFile) -> list[tuple[str, Label]]:
        """The text and the label of each sample."""

    def read(self, corpus: CorpusFile, tokenizing: Tokenizing, places: Sequence[int] | None = None) -> TokenRows:
        """The corpus as token ids, or the samples at those places of it."""

    def batch(self, corpus: CorpusFile, tokenizing: Tokenizing, places: Sequence[int]) -> Batch:
        """The samples at those places as a batch."""

    def epoch_order(self, count: int, seed: int, epoch: int) -> list[int]:
        """The order of so many samples in an epoch of a run with that seed."""

    def effective_batches(self, order: Sequence[int], size: int) -> list[list[int]]:
        """The samples of each optimiser step."""

    def split(self, labels: Sequence[Label], classes: int, fraction: float, seed: int) -> Split:
        """A corpus with those labels in two parts."""

    def balanced_weights(self, labels: Sequence[Label], classes: int) -> list[float]:
        """Balanced class weights of a corpus with those labels."""


@dataclass(frozen=True)
class AdapterSettings:
    """What an adapter is besides its tensors. `alpha` is not divided by the rank; `nf4`: it was trained on weights in NF4."""

    classes: int
    rank: int
    alpha: float
    targets: str
    pooling: str
    nf4: bool


@dataclass(frozen=True)
class LoadedAdapter:
    """LoRA factors and head by their plain names, as stored, and the settings."""

    settings: AdapterSettings
    tensors: Mapping[str, Array]


class Files(Protocol):
    """Adapters and checkpoints in folders; `base` is the folder of the checkpoint that an adapter belongs to."""

    def save_adapter(self, folder: Path, base: Path, settings: AdapterSettings, tensors: Mapping[str, Array]) -> None:
        """Saves LoRA factors and head, over an adapter that is there."""

    def interrupted_save(
        self,
        folder: Path,
        base: Path,
        settings: AdapterSettings,
        tensors: Mapping[str, Array],
        *,
        step: int | None = None,
        limit: int | None = None,
    ) -> None:
        """The same in a process that is killed at that step in the file system, or that cannot write files of more bytes than `limit`."""

    def load_adapter(self, folder: Path, base: Path) -> LoadedAdapter:
        """An adapter as it arrives."""

    def adapter_logits(self, folder: Path, base: Path, input_ids: Array, mask: Array) -> Array:
        """The logits [samples, classes] in float32 of the checkpoint with the adapter, both loaded from their folders."""

    def merge(self, folder: Path, base: Path, merged: Path, trained_in: str | None = None) -> None:
        """Merges an adapter, trained in that dtype where it is not the checkpoint's own, into its checkpoint, as the folder `merged`."""

    def merged_logits(self, folder: Path, input_ids: Array, mask: Array) -> Array:
        """The logits [samples, classes] in float32 of a merged checkpoint and its head, loaded from their folder."""

    def copy_checkpoint(self, base: Path, folder: Path) -> Mapping[str, Array]:
        """Loads a checkpoint, saves it from the device as another folder, and gives the tensors that are loaded from there."""

    def load_decoder(self, folder: Path) -> Mapping[str, Array]:
        """The parameters of a checkpoint's decoder as they are on the device, in the dtype of the files."""

    def load_tokenizer(self, folder: Path) -> int:
        """The number of ids of a checkpoint's tokenizer."""


@dataclass(frozen=True)
class Workload:
    """A classifier on tied random weights with alpha twice the rank, and a batch [batch, seq] of its training; no label is the last class.

    `micro` samples are computed at a time (0: all), `accumulation` such batches make a step; `engine` is torch, by automatic
    differentiation, or fused, by hand-written layers.
    """

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    classes: int
    rank: int
    targets: str
    nf4: bool
    dtype: str
    batch: int
    seq: int
    seed: int = 0
    micro: int = 0
    accumulation: int = 1
    engine: str = "torch"
    theta: float = 1e4


@dataclass(frozen=True)
class Chosen:
    """The kind of a device by its torch name, its index, and how many warnings there were."""

    kind: str
    index: int
    warnings: int


@dataclass(frozen=True)
class Plant:
    """A value that is not finite: the last number of the parameter `name`, or (`where` is output or gradient) the first number that the
    `nth` of the `calls` that a forward pass makes of the operation `name` gives out, or passes back to its first input with a gradient."""

    where: str
    name: str
    value: float
    nth: int = 0
    calls: int = 1


class PlacedTrainer(Protocol):
    """A session: a trainer whose tensors are on the device, with one batch."""

    def content(self) -> dict[str, bytes]:
        """What each parameter and buffer and the optimiser's moments (`optimiser.exp_avg`, `optimiser.exp_avg_sq`) hold, by name."""

    def reported(self) -> dict[str, bytes]:
        """The trained parameters as the trainer's state reports them, which checkpoints are made of."""

    def gradients(self) -> list[str]:
        """The parameters that have a gradient."""

    def move(self, name: str) -> None:
        """Puts that tensor of `content` on another device."""

    def require_resident(self) -> None:
        """The subject's own proof that all is on the device; raises where a tensor is not."""

    def plant(self, plant: Plant) -> None:
        """Spoils the parameter, or every forward pass from here on."""

    def step(self) -> None:
        """A training step."""

    def origin(self, part: int) -> str | None:
        """Where a value that is not finite comes from, in words; parameters are searched `part` numbers at a time."""


class Devices(Protocol):
    """Where the subject computes."""

    def resolve(self, name: str) -> str:
        """The device of a name in the grammar cpu | cuda | cuda:N | auto."""

    def choose(self, name: str, present: Mapping[str, int]) -> Chosen:
        """The device that a name gives on a host with so many devices of each kind."""

    def trainer(self, work: Workload, weights: Mapping[str, Array]) -> PlacedTrainer:
        """A trainer that starts from those float32 weights."""


@dataclass(frozen=True)
class Card:
    """Bytes of a GPU: in all, free, and allocated by this process of what is not free."""

    total: int
    free: int
    own: int = 0


class Ledger(Protocol):
    """A session: the reservations of device memory on a host, kept in a folder."""

    def acquire(self, card: int, count: int) -> int:
        """Reserves bytes of that card for this process; the number of the reservation."""

    def update(self, reservation: int, count: int) -> None:
        """Another number of bytes."""

    def release(self, reservation: int) -> None:
        """Gives them back."""

    def reserved(self) -> list[int]:
        """The bytes that living processes have reserved of each card."""

    def run(self, card: int, count: int, block: Callable[[], object]) -> None:
        """Calls `block`, which needs so many bytes of the card, as a run is started."""

    def restart(self) -> None:
        """As after a restart of the host: all entries are those of earlier processes that had the same ids."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of each part of a training step, of all at the peak, and of what stays after a step."""

    parts: dict[str, int]
    total: int
    resident: int


@dataclass(frozen=True)
class Usage:
    """Bytes at the peak of loading and training and after it, without libraries' workspaces, and frozen tensors that require a gradient
    or have one."""

    peak: int
    resident: int
    thawed: int


@dataclass(frozen=True)
class Growth:
    """The steps made, and after them and not before: bytes live; bytes and segments that the allocator holds, given out or not."""

    made: int
    live: int
    reserved: int
    segments: int


@dataclass(frozen=True)
class Quantised:
    """Bytes that the host's allocator gave out at the peak of loading, those that stay, and the absmax of each projection in NF4."""

    peak: int
    resident: int
    absmax: dict[str, Array]


class Memory(Protocol):
    """Memory of devices. Lacks where the bytes of a kind of device are not known."""

    def ledger(self, folder: Path, cards: Sequence[Card]) -> Ledger:
        """The ledger in a folder, on a host with those cards."""

    def require_kernels(self) -> None:
        """Lacks where the kernels by which a GPU's memory is estimated are not installed."""

    def estimate(self, work: Workload, kind: str | None = None) -> Estimate:
        """What a step takes on a device of that kind, which need not be here; None is the subject's own."""

    def measure(self, work: Workload, steps: int = 3) -> Usage:
        """What the device's allocator gives out over loading and steps: the first may capture a graph, the next have all state."""

    def saved(self, work: Workload) -> int:
        """Bytes that automatic differentiation saves in a forward pass, without the model's own."""

    def grown(self, work: Workload, lengths: Sequence[int], warm_up: int, steps: int) -> Growth:
        """What steps leave behind after others that warm up, on batches of those lengths in turn."""

    def load_nf4(self, folder: Path) -> Quantised:
        """A checkpoint loaded into a classifier with NF4."""


@dataclass(frozen=True)
class FreshClassifier:
    """Trainable tensors by name, the logits of some texts, and those of the same decoder and head without an update."""

    trainable: dict[str, Array]
    logits: Array
    plain: Array


class Classifiers(Protocol):
    """Classifiers as a run starts from them."""

    def fresh(self, model: Path | Mapping[str, Any], settings: Mapping[str, Any], texts: Sequence[str]) -> FreshClassifier:
        """On a checkpoint, or on random weights of an architecture, with a run's settings."""


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
