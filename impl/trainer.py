"""Training of a classifier: micro-batches, clipping, AdamW, schedule."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from impl.classifier import Classifier
from impl.dispatch import call, scope
from impl.optimiser import AdamW


@dataclass(frozen=True)
class BatchResult:
    """Mean loss and number of correct samples of a batch, and the gradient's global norm before clipping (None without a step)."""

    loss: float
    correct: int
    total: int
    gradient_norm: float | None = None

    @property
    def accuracy(self) -> float:
        """Share of correct samples, 0 for an empty batch."""
        return self.correct / self.total if self.total else 0.0


@dataclass(frozen=True)
class Batch:
    """Tokens and mask [batch, seq], labels [batch]."""

    input_ids: Tensor
    mask: Tensor
    labels: Tensor

    def split(self, size: int) -> "Iterator[Batch]":
        """Micro-batches of `size` samples, the last one may be smaller."""
        parts = zip(*(torch.split(tensor, size) for tensor in (self.input_ids, self.mask, self.labels)), strict=True)
        return (Batch(*part) for part in parts)


class Trainer:
    """Runs optimiser steps on a classifier.

    The rate of each of the `total_steps` steps is the schedule's; `learning_rate` can be read and written. `micro_batch` is the number
    of samples in one forward and backward pass.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        total_steps: int,
        micro_batch: int,
        learning_rate: float,
        warmup_fraction: float = 0.06,
        schedule: str = "linear",
        weight_decay: float = 0.01,
        max_norm: float | None = 1.0,
        class_weights: Tensor | None = None,
    ) -> None:
        self.classifier, self.micro_batch, self.class_weights = classifier, micro_batch, class_weights
        self.max_norm = math.inf if max_norm is None else max_norm
        self.optimiser = AdamW(classifier.trainable_parameters(), weight_decay)
        rates: Tensor = call(
            "learning_rate_schedule",
            "learning_rate_schedule",
            total_steps=total_steps,
            peak=learning_rate,
            warmup_fraction=warmup_fraction,
            kind=schedule,
        )
        self.learning_rates: list[float] = rates.tolist()

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.learning_rates[self.optimiser.steps]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.learning_rates[self.optimiser.steps] = rate

    def train_batch(self, batch: Batch) -> BatchResult:
        """One optimiser step on the mean over the batch's samples: zero, accumulate, average, clip, step.

        Raises a ValueError for an empty batch, bad labels and non-finite logits, an IndexError after the last step of the schedule and a
        FloatingPointError for a non-finite gradient; nothing has changed then.
        """
        if len(batch.labels) == 0:
            raise ValueError("the batch is empty: there is nothing to train on")
        if self.optimiser.steps >= len(self.learning_rates):
            raise IndexError(f"the schedule ends after {len(self.learning_rates)} steps")
        with scope(f"steps.{self.optimiser.steps}"):
            results = [self._micro_batch(index, part) for index, part in enumerate(batch.split(self.micro_batch))]
            counts = torch.tensor([result.count for result in results], device=batch.labels.device)
            loss = _average("loss", [result.loss for result in results], counts)
            gradient = _average("gradient", [result.gradient for result in results], counts)
            clipped, norm = self.optimiser.clip(gradient, self.max_norm)
            self.optimiser.step(clipped, self.learning_rate)
        return BatchResult(float(loss), sum(int(result.correct) for result in results), len(batch.labels), float(norm))

    @torch.no_grad()
    def forward_only(self, batch: Batch) -> BatchResult:
        """Mean loss and accuracy of a batch; changes nothing."""
        if len(batch.labels) == 0:
            return BatchResult(math.nan, 0, 0)
        results = []
        for part in batch.split(self.micro_batch):
            logits = self.classifier(part.input_ids, part.mask)
            loss = self.classifier.loss(logits, part.labels, self.class_weights)
            results.append(_MicroResult(len(part.labels), loss, _correct(logits, part.labels), torch.empty(0)))
        counts = torch.tensor([result.count for result in results], device=batch.labels.device)
        loss = _average("loss", [result.loss for result in results], counts)
        return BatchResult(float(loss), sum(int(result.correct) for result in results), len(batch.labels))

    def _micro_batch(self, index: int, part: Batch) -> "_MicroResult":
        self.optimiser.zero_gradients()
        with scope(f"micro.{index}"):
            logits = self.classifier(part.input_ids, part.mask)
            loss = self.classifier.loss(logits, part.labels, self.class_weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        gradient = self.optimiser.flat_gradient()
        self.optimiser.zero_gradients()
        return _MicroResult(len(part.labels), loss.detach(), _correct(logits, part.labels), gradient)


@dataclass(frozen=True)
class _MicroResult:
    count: int
    loss: Tensor
    correct: Tensor
    gradient: Tensor


def _correct(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.detach().argmax(dim=-1) == labels).sum()


def _average(path: str, means: list[Tensor], counts: Tensor) -> Tensor:
    averaged: Tensor = call(path, "average_gradients", gradients=torch.stack([mean.flatten() for mean in means]), counts=counts)
    return averaged
