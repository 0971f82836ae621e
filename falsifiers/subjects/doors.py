"""What system claims ask of a subject, in plain Python objects and NumPy arrays: one protocol a subject matter.

A subject opens by `subject.door(name)` those that it has; for another it raises Lacks, and the claim is NOT_RUN with that reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


class Devices(Protocol):
    """Devices by their names."""

    def resolve(self, name: str) -> str:
        """The device of a name in the grammar cpu | cuda | cuda:N | auto."""


__all__ = [
    "AdapterSettings",
    "Batch",
    "Corpora",
    "CorpusFile",
    "Devices",
    "Files",
    "Label",
    "Lacks",
    "LoadedAdapter",
    "Session",
    "Split",
    "Statistics",
    "TokenRows",
    "Tokenizing",
]
