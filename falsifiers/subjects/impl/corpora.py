"""Corpora and the plan of an epoch, as `impl` reads and makes them."""

from collections.abc import Sequence

import torch

from blackswan.falsifiers.subjects.doors import Label, Split
from blackswan.impl import samples


class Corpora:
    """See `doors.Corpora`."""

    def __init__(self, device: torch.device, path: str | None) -> None:
        del path
        self._device = device

    def epoch_order(self, count: int, seed: int, epoch: int) -> list[int]:
        """The order of an epoch."""
        return list(samples.epoch_order(count, seed, epoch))

    def effective_batches(self, order: Sequence[int], size: int) -> list[list[int]]:
        """The samples of each optimiser step."""
        return [list(batch) for batch in samples.effective_batches(order, size)]

    def split(self, labels: Sequence[Label], classes: int, fraction: float, seed: int) -> Split:
        """The two parts; each sample's one token is its place in the corpus."""
        training, validation = samples.split_validation(_numbered(labels, classes), fraction, seed)
        return Split(_places(training), _places(validation), _labels(training), _labels(validation))

    def balanced_weights(self, labels: Sequence[Label], classes: int) -> list[float]:
        """Balanced class weights."""
        return [float(weight) for weight in samples.balanced_weights(_numbered(labels, classes))]


def _places(part: samples.Samples) -> list[int]:
    return [row[0] for row in part.rows]


def _labels(part: samples.Samples) -> list[Label]:
    return [list(target) if isinstance(target, tuple) else target for target in part.targets]


def _numbered(labels: Sequence[Label], classes: int) -> samples.Samples:
    """Samples whose one token is their place in the corpus."""
    targets = tuple(tuple(label) if isinstance(label, list) else label for label in labels)
    return samples.Samples(tuple((index,) for index in range(len(labels))), targets, classes, isinstance(targets[0], tuple))
