"""A corpus as token ids: statistics, class weights, the validation part, and the order of an epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from blackswan.impl.corpus import Label, Sample, Statistics, load_corpus, statistics
from blackswan.impl.tokens import Tokens
from blackswan.impl.trainer import Batch

_ORDER, _SPLIT = 1, 2
"""Streams of random numbers of one seed, so that no draw repeats another one's."""


@dataclass(frozen=True)
class Samples:
    """A corpus whose texts are token ids, 1 to max_seq_len a text.

    A target is the class, or with `multi_label` one 0 or 1 a class. `text_lengths` are the lengths before truncation; without them
    nothing was cut.
    """

    rows: tuple[tuple[int, ...], ...]
    targets: tuple[Label, ...]
    num_classes: int
    multi_label: bool = False
    text_lengths: tuple[int, ...] | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.rows)

    def lengths(self) -> list[int]:
        """Tokens of each sample, as the model reads it."""
        return [len(row) for row in self.rows]

    def statistics(self) -> Statistics:
        """Statistics of the corpus, the lengths before truncation. Raises a ValueError where there is no sample."""
        full = self.lengths() if self.text_lengths is None else self.text_lengths
        truncated = sum(length > kept for length, kept in zip(full, self.lengths(), strict=True))
        return statistics(self.targets, self.num_classes, full, truncated)

    def select(self, indices: Sequence[int]) -> "Samples":
        """The samples at those indices, in that order."""
        full = None if self.text_lengths is None else tuple(self.text_lengths[index] for index in indices)
        rows, targets = tuple(self.rows[index] for index in indices), tuple(self.targets[index] for index in indices)
        return Samples(rows, targets, self.num_classes, self.multi_label, full)

    def batch(self, indices: Sequence[int], tokens: Tokens, device: torch.device | str = "cpu") -> Batch:
        """The samples at those indices, padded to the longest of them.

        input_ids int64 and mask bool [batch, longest]; labels int64 [batch], with `multi_label` float32 [batch, num_classes].
        Raises a ValueError without an index.
        """
        input_ids, mask = tokens.pad([self.rows[index] for index in indices])
        labels = torch.tensor([self.targets[index] for index in indices], dtype=torch.float32 if self.multi_label else torch.int64)
        return Batch(input_ids.to(device), mask.to(device), labels.to(device))


def tokenize(samples: Sequence[Sample], tokens: Tokens, num_classes: int, multi_label: bool = False) -> Samples:
    """Every sample's text as token ids, once. Raises a ValueError for a label of the other kind."""
    for number, sample in enumerate(samples, start=1):
        if isinstance(sample.label, tuple) != multi_label:
            expected = f"a tuple of {num_classes} entries 0 or 1" if multi_label else "an integer"
            raise ValueError(f"sample {number}: the label is {sample.label!r}; expected {expected}")
    measured = [tokens.measure(sample.text) for sample in samples]
    rows, full = tuple(tuple(ids) for ids, _ in measured), tuple(length for _, length in measured)
    return Samples(rows, tuple(sample.label for sample in samples), num_classes, multi_label, full)


def read_samples(path: Path, tokens: Tokens, num_classes: int, multi_label: bool = False) -> Samples:
    """The samples of a JSONL corpus as token ids. Raises what `load_corpus` raises."""
    return tokenize(load_corpus(path, num_classes, multi_label), tokens, num_classes, multi_label)


def split_validation(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """(training, validation), disjoint, together all samples, each in the corpus's order; a function of its arguments only.

    Every class (with `multi_label` every combination of classes) gives floor or ceil of `fraction` of its samples, chosen at random; a
    class never gives its last one. A fraction of 0 gives an empty validation part. Raises a ValueError for a fraction outside 0 … 1 and
    where there are too few samples to give any.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction is {fraction!r}: expected at least 0 and below 1")
    strata: dict[Label, list[int]] = {}
    for index in _shuffled(len(samples), _SPLIT, seed):
        strata.setdefault(samples.targets[index], []).append(index)
    exact = Fraction(repr(float(fraction)))  # as it was written: 0.1 of 30 is 3
    total = min(max(1, round(exact * len(samples))), len(samples) - 1) if fraction else 0
    counts = _shares([len(members) for members in strata.values()], exact, total, spare_last=not samples.multi_label)
    held_out = {index for members, count in zip(strata.values(), counts, strict=True) for index in members[:count]}
    if fraction and not held_out:
        raise ValueError(
            f"{len(samples)} samples of {len(strata)} classes leave none for validation; "
            "give a validation corpus, or validation_fraction 0 to train without validation"
        )
    every = range(len(samples))
    return samples.select([i for i in every if i not in held_out]), samples.select([i for i in every if i in held_out])


def training_and_validation(samples: Samples, validation: Samples | None, fraction: float, seed: int) -> tuple[Samples, Samples | None]:
    """What a run trains on, and what it validates on: as given, or where no validation samples are, as `split_validation` makes them.

    None for validation where neither gives any. Raises as `split_validation` does.
    """
    if validation is not None or fraction == 0:
        return samples, validation
    return split_validation(samples, fraction, seed)


def balanced_weights(samples: Samples) -> tuple[float, ...]:
    """A weight a class, inversely proportional to its number of samples; they add up to num_classes.

    Raises a ValueError that names a class without samples.
    """
    counts = samples.statistics().class_counts
    if 0 in counts:
        raise ValueError(
            f"class {counts.index(0)} has no sample: balanced class weights need at least one of each class, give weights instead"
        )
    scale = samples.num_classes / math.fsum(1 / count for count in counts)
    return tuple(scale / count for count in counts)


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A random permutation of 0 … count − 1; a function of its arguments only, so that a resumed run needs no random state."""
    return _shuffled(count, _ORDER, seed, epoch)


def effective_batches(order: Sequence[int], size: int) -> list[list[int]]:
    """The order cut into batches of `size`; the last may be smaller. Raises a ValueError for a size below 1."""
    if size < 1:
        raise ValueError(f"the effective batch is {size}: expected at least 1")
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def _shuffled(count: int, *entropy: int) -> list[int]:
    # NumPy keeps the stream of a bit generator the same from version to version, but not those of Generator's methods (NEP 19)
    order: list[int] = np.argsort(np.random.PCG64(list(entropy)).random_raw(count), kind="stable").tolist()
    return order


def _shares(counts: Sequence[int], fraction: Fraction, total: int, *, spare_last: bool) -> list[int]:
    """How many of each count make up the total, or less where they cannot, in proportion (largest remainders)."""
    room = [min(math.ceil(fraction * count), count - 1 if spare_last else count) for count in counts]
    shares = [min(math.floor(fraction * count), most) for count, most in zip(counts, room, strict=True)]
    with_room = [i for i in range(len(counts)) if shares[i] < room[i]]
    for i in sorted(with_room, key=lambda i: fraction * counts[i] - shares[i], reverse=True)[: max(0, total - sum(shares))]:
        shares[i] += 1
    return shares
