"""Corpora, token shards and adapters on disk, and what is read from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.reference.table import Array

Label = int | list[int]
"""A class, or of several labels a sample a 0 or 1 for each class."""
NO_LABELS: tuple[Any, ...] = (0.9, 1.0, float("nan"), "1", None, -1, 64, 2**63)
"""These are no labels: none of them is an integer that numbers one of a few classes, or that is 0 or 1."""
NO_INDICES: Mapping[str, Any] = {"a mask": np.array([False, True]), "a mask in a list": [False, True], "fractions": [0.0, 1.9]}
"""These are no places of samples, though some are taken for the places 0 and 1."""
LATE = 3000
"""So many texts are before one that is refused by its number, more than are made into tokens at once."""


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
class TokenRows:
    """The ids and the label of each sample, and the tokenizer's id of padding, its number of ids and how it describes itself.

    `statistics` are by name: `total` samples, `class_counts`, the smallest class (`minority`), the largest over the smallest (`imbalance`);
    and of the lengths in tokens before truncation `length_percentiles`, `max_length` and how many were `truncated`.
    """

    rows: list[list[int]]
    labels: list[Label]
    statistics: dict[str, Any]
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


@dataclass(frozen=True)
class Split:
    """The places in the corpus of the samples for training and for validation, and the labels that each part gives them."""

    training: list[int]
    validation: list[int]
    training_labels: list[Label]
    validation_labels: list[Label]


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
class AdapterSettings:
    """The settings of an adapter. `alpha` is not divided by the rank; `nf4` says that it was trained on weights in NF4, `double_quantize`
    that their absmax were quantised in turn."""

    classes: int
    rank: int
    alpha: float
    targets: str
    pooling: str
    nf4: bool
    double_quantize: bool


@dataclass(frozen=True)
class LoadedAdapter:
    """LoRA factors and head by their plain names, as stored, the settings, and what else was saved with them."""

    settings: AdapterSettings
    tensors: Mapping[str, Array]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedHead:
    """The head of a sequence classifier, the number of labels that its configuration says, that it has itself and that its layer says, and
    whether as many labels as before have lost their names in the configuration, or the program's random numbers have moved."""

    weight: Array
    bias: Array
    labels: int
    own_labels: int
    outputs: int
    renamed: bool = False
    drew: bool = False
