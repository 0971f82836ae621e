"""Reading corpora, and the plan of an epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blackswan.reference.table import Array

Label = int | list[int]
"""A class, or of several labels a sample a 0 or 1 for each class."""


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
