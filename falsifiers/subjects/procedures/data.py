"""Corpora, token ids, batches and the plan of an epoch, as a subject runs them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.impl import corpus, samples, tokens
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]
Outputs = dict[str, Array]


def load(scalars: Scalars, device: torch.device) -> Outputs:
    """The corpus at `path`: labels, and the texts as UTF-8 bytes one after the other with the length of each."""
    del device
    found = corpus.load_corpus(Path(scalars["path"]), scalars["classes"], scalars.get("multi_label", False))
    texts = [sample.text.encode() for sample in found]
    return {
        "labels": np.asarray([sample.label for sample in found]),
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "text_bytes": np.asarray([len(text) for text in texts]),
    }


def read(scalars: Scalars, device: torch.device) -> Outputs:
    """The corpus at `path`, or the samples `indices` of it, as token ids, and its statistics.

    `tokenizer` is a checkpoint folder, or empty for bytes.
    """
    del device
    tokenizer = _tokens(scalars)
    found = _samples(scalars, tokenizer)
    if "indices" in scalars:
        found = found.select(scalars["indices"])
    statistics = found.statistics()
    return {
        "ids": np.asarray([token for row in found.rows for token in row]),
        "lengths": np.asarray(found.lengths()),
        "labels": np.asarray(found.targets),
        "total": np.asarray(statistics.total),
        "class_counts": np.asarray(statistics.class_counts),
        "percentiles": np.asarray(list(statistics.length_percentiles.items())),
        "max_length": np.asarray(statistics.max_length),
        "truncated": np.asarray(statistics.truncated),
        "imbalance": np.asarray(statistics.imbalance, np.float64),
        "minority": np.asarray(statistics.minority),
        "fill": np.asarray(tokenizer.fill),
        "vocab": np.asarray(tokenizer.vocab),
        "description": np.frombuffer(tokenizer.description.encode(), np.uint8),
    }


def batch(scalars: Scalars, device: torch.device) -> Outputs:
    """The samples `indices` of the corpus at `path` as a batch, tokenised before and from raw text."""
    tokenizer = _tokens(scalars)
    found = _samples(scalars, tokenizer).batch(scalars["indices"], tokenizer, device)
    texts = [sample.text for sample in corpus.load_corpus(Path(scalars["path"]), scalars["classes"], scalars["multi_label"])]
    raw_ids, raw_mask = tokenizer.batch([texts[index] for index in scalars["indices"]])
    named = {"input_ids": found.input_ids, "mask": found.mask, "labels": found.labels, "raw_input_ids": raw_ids, "raw_mask": raw_mask}
    return {name: value.cpu().numpy() for name, value in named.items()}


def _tokens(scalars: Scalars) -> tokens.Tokens:
    limit, side = scalars["max_seq_len"], scalars.get("padding_side", "right")
    return tokens.load_tokenizer(Path(scalars["tokenizer"]), limit, side) if scalars["tokenizer"] else tokens.ByteTokens(limit, side)


def _samples(scalars: Scalars, tokenizer: tokens.Tokens) -> samples.Samples:
    return samples.read_samples(Path(scalars["path"]), tokenizer, scalars["classes"], scalars["multi_label"])
