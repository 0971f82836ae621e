"""Loss, accuracy and confusion of a classifier on samples."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blackswan.impl.agreement import together
from blackswan.impl.group import shard
from blackswan.impl.samples import Samples
from blackswan.impl.tokens import Tokens
from blackswan.impl.trainer import Trainer

Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ClassScore:
    """How well one class is recognised; a quotient without a denominator is 0. `support` is the number of samples that have it."""

    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Evaluation:
    """The loss is the mean over samples, as in training. With several labels a sample, it is correct when all of them are.

    `confusion[i][j]` counts the samples of class i that were taken for class j. With several labels it has a row of four numbers a class:
    absent and not found, absent and found, present and not found, present and found.
    """

    loss: float
    accuracy: float
    total: int
    per_class: tuple[ClassScore, ...]
    confusion: Matrix


def evaluate(trainer: Trainer, samples: Samples, tokens: Tokens, device: torch.device) -> Evaluation:
    """The evaluation of all samples, shared out among the workers of the trainer's group; changes nothing.

    Raises a ValueError without samples, and a FloatingPointError for a non-finite loss.
    """
    if not len(samples):
        raise ValueError("no samples: there is nothing to evaluate")
    classes, group = samples.num_classes, trainer.group
    own = shard(range(len(samples)), group.rank, group.size)
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")
    confusion = torch.zeros(classes, 4 if samples.multi_label else classes, dtype=torch.int64, device="cpu")
    with together(group):
        for start in range(0, len(own), trainer.micro_batch):
            batch = samples.batch(own[start : start + trainer.micro_batch], tokens, device)
            result = trainer.forward_only(batch, probabilities=True)
            assert result.predicted is not None
            sums += torch.tensor([result.loss * result.total, result.correct], dtype=torch.float64, device="cpu")
            _count(confusion, batch.labels.cpu(), result.predicted.cpu(), samples.multi_label)
    loss_sum, correct = group.sum(sums).tolist()
    confusion = group.sum(confusion)
    loss = loss_sum / len(samples)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss over {len(samples)} samples is {loss}")
    rows = tuple(tuple(row) for row in confusion.tolist())
    return Evaluation(loss, correct / len(samples), len(samples), _scores(rows, samples.multi_label), rows)


def _count(confusion: Tensor, labels: Tensor, predicted: Tensor, multi_label: bool) -> None:
    """Adds a batch to the counts, in place."""
    if multi_label:
        cell = 2 * labels.long() + predicted
        confusion += torch.stack([(cell == index).sum(dim=0) for index in range(4)], dim=1)
    else:
        confusion.index_put_((labels, predicted), torch.ones_like(labels), accumulate=True)


def _scores(rows: Matrix, multi_label: bool) -> tuple[ClassScore, ...]:
    if multi_label:
        return tuple(_score(found=row[3], claimed=row[1] + row[3], support=row[2] + row[3]) for row in rows)
    claimed = [sum(column) for column in zip(*rows, strict=True)]
    return tuple(_score(found=row[index], claimed=claimed[index], support=sum(row)) for index, row in enumerate(rows))


def _score(*, found: int, claimed: int, support: int) -> ClassScore:
    precision, recall = found / claimed if claimed else 0.0, found / support if support else 0.0
    f1 = 2 * found / (claimed + support) if claimed + support else 0.0
    return ClassScore(precision, recall, f1, support)
