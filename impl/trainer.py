"""Training of a classifier: micro-batches, their mean over all workers, clipping, AdamW, schedule."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blackswan.impl import validation
from blackswan.impl.agreement import require_equal, require_finite, together
from blackswan.impl.classifier import Classifier
from blackswan.impl.dispatch import call, scope
from blackswan.impl.group import ALONE, Group
from blackswan.impl.operations.losses import require_class_weights
from blackswan.impl.optimiser import AdamW, require_not_negative

HELD = 4
"""Gradients of micro-batches that are kept side by side. Where one more comes they are averaged to one, so that memory does not grow with
the number of micro-batches."""
WEIGHTS_OF_SEVERAL = "class weights weight the cross-entropy of single labels; with several labels a sample leave them out"
_NO_GRADIENT = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class BatchResult:
    """Mean loss and number of correct samples of a batch, and the gradient's global norm before clipping (None without a step).

    With several labels a sample, it is correct when all of them are. `probabilities` [batch, classes] and `predicted`
    classes, [batch], or with several a sample 0 or 1 for each [batch, classes], where they were asked for.
    """

    loss: float
    correct: int
    total: int
    gradient_norm: float | None = None
    probabilities: Tensor | None = field(default=None, compare=False)
    predicted: Tensor | None = field(default=None, compare=False)

    @property
    def accuracy(self) -> float:
        """Share of correct samples, 0 for an empty batch."""
        return self.correct / self.total if self.total else 0.0


@dataclass(frozen=True)
class Batch:
    """Tokens and mask [batch, seq]; labels [batch], or with several a sample 0 or 1 for each class, [batch, classes] in float32."""

    input_ids: Tensor
    mask: Tensor
    labels: Tensor

    def split(self, size: int) -> "Iterator[Batch]":
        """Micro-batches of `size` samples, the last one may be smaller."""
        parts = zip(*(torch.split(tensor, size) for tensor in (self.input_ids, self.mask, self.labels)), strict=True)
        return (Batch(*part) for part in parts)


class Trainer:
    """Runs optimiser steps on a classifier.

    The rate of each of the `total_steps` steps is the schedule's; with None there is no end, and the rate stays what it is. `learning_rate`
    can be read and written. `micro_batch` is the number of samples in one forward and backward pass. With `multi_label` labels are 0 or 1
    for each class and the loss is the binary cross-entropy, without class weights.

    In a `group` of several workers each accumulates its share of a batch, which may be none of it; `apply` takes the mean over the samples
    of all, so that every worker makes the same step. An error of one worker in `train_batch` or `apply` is raised on all.

    Several trainers of a process, each with its own classifier, may make their steps in as many threads, and each leaves what it leaves
    alone; not while another thread estimates memory or is in a block of `impl.dispatch` other than `scope`, which would take their calls
    for its own.

    Raises a ValueError for a learning rate or a weight decay below 0 or not finite, a micro_batch below 1, a max_norm that is not above 0,
    and for class weights that are not one positive number a class.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        total_steps: int | None,
        micro_batch: int,
        learning_rate: float,
        warmup_fraction: float = 0.06,
        schedule: str = "linear",
        weight_decay: float = 0.01,
        max_norm: float | None = 1.0,
        class_weights: Tensor | None = None,
        multi_label: bool = False,
        group: Group = ALONE,
    ) -> None:
        if multi_label and class_weights is not None:
            raise ValueError(WEIGHTS_OF_SEVERAL)
        self.classifier, self.micro_batch = classifier, micro_batch
        self.class_weights = None if class_weights is None else class_weights.clone()  # the caller may write to its own
        self.multi_label, self.group = multi_label, group
        self.max_norm = math.inf if max_norm is None else max_norm
        require_not_negative("learning_rate", learning_rate)
        if micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}: expected a positive integer")
        if not self.max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}: expected a positive number, or None")
        if class_weights is not None:
            require_class_weights(class_weights, classifier.adaptation.classes)
        self.optimiser = AdamW(classifier.trainable_parameters(), weight_decay)
        self._accumulated: list[MicroResult] = []
        self.endless = total_steps is None
        self.learning_rates = [learning_rate] if total_steps is None else _schedule(total_steps, learning_rate, warmup_fraction, schedule)

    @property
    def learning_rate(self) -> float:
        """The rate of the next step; written, it holds for that step, and without a schedule until it is written again.

        Raises an IndexError after the last step of the schedule, and a ValueError for a rate that is not a finite number ≥ 0.
        """
        self._require_step_left()
        return self.learning_rates[0 if self.endless else self.optimiser.steps]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._require_step_left()
        require_not_negative("learning_rate", rate)
        self.learning_rates[0 if self.endless else self.optimiser.steps] = rate

    @property
    def accumulated(self) -> int:
        """Number of samples of this worker that wait for `apply`."""
        return sum(result.count for result in self._accumulated)

    def train_step(self, sample: Batch) -> BatchResult:
        """One optimiser step on one sample. Raises a ValueError for another number of them, and as `train_batch` does."""
        if len(sample.labels) != 1:
            raise ValueError(f"{len(sample.labels)} samples: train_step takes one, train_batch several")
        return self.train_batch(sample)

    def train_batch(self, batch: Batch) -> BatchResult:
        """One optimiser step on the mean over the batch's samples: zero, accumulate, average, clip, step.

        Raises a ValueError for an empty batch, bad labels and non-finite logits, an IndexError after the last step of the schedule, a
        FloatingPointError for a non-finite gradient and a RuntimeError while accumulated samples wait; nothing has changed then.
        """
        waiting = bool(self._accumulated)
        try:
            with together(self.group):
                if waiting:
                    raise RuntimeError(f"{self.accumulated} accumulated samples wait: call apply() or discard() first")
                if len(batch.labels) or self.group.size == 1:
                    self._accumulate(batch)
            return self.apply()
        except BaseException:
            if not waiting:
                self.discard()
            raise

    def accumulate(self, batch: Batch) -> BatchResult:
        """Adds the gradients of a batch's samples to those that the next `apply` averages; returns the batch's own mean loss.

        Raises as `train_batch` does; what was accumulated before is kept then.
        """
        return _summary(self._accumulate(batch))

    def apply(self) -> BatchResult:
        """One optimiser step on the mean over all accumulated samples, those of the other workers too.

        Raises a ValueError where there are none, an IndexError after the last step of the schedule and a FloatingPointError for a
        non-finite gradient; nothing has changed then, and the samples are still there.
        """
        self._require_step_left()
        with scope(f"steps.{self.optimiser.steps}"):
            mean = self._mean()
            if self.group.size == 1:  # the same samples, without their gradients side by side while the step takes its memory
                self._accumulated = [mean]
            with together(self.group):
                norm = self._step(mean.gradient)
        self.discard()
        if self.group.size > 1:
            require_equal(self.group, {"trainable parameters": self.optimiser.flat()})
        return BatchResult(float(mean.loss), int(mean.correct), mean.count, norm)

    def discard(self) -> None:
        """Forgets the accumulated samples."""
        self._accumulated = []
        self.optimiser.zero_gradients()

    def gradient_vector(self) -> Tensor:
        """The mean gradient over this worker's accumulated samples as one vector: per layer A then B, then head weight, head bias.

        Raises a ValueError where there are none.
        """
        if not self._accumulated:
            raise ValueError("no sample is accumulated: there is no gradient")
        return _average("gradient", [result.gradient for result in self._accumulated], _counts(self._accumulated))

    def apply_gradient_vector(self, vector: Tensor) -> BatchResult:
        """One optimiser step with a gradient in the order of `gradient_vector`; the accumulated samples are forgotten, their loss reported.

        A vector in another dtype or on another device, as NumPy's means are, is converted to those of the moments.

        Raises a ValueError for a vector of another length, and as `apply` does; nothing has changed then.
        """
        self._require_step_left()
        self.optimiser.split(vector)
        summary = _summary(self._accumulated)
        with scope(f"steps.{self.optimiser.steps}"):
            norm = self._step(vector.to(self.optimiser.exp_avg))
        self.discard()
        return BatchResult(summary.loss, summary.correct, summary.total, norm)

    @torch.no_grad()
    def forward_only(self, batch: Batch, probabilities: bool = False) -> BatchResult:
        """Mean loss and accuracy of a batch, and the classes' probabilities where asked for; changes nothing."""
        if len(batch.labels) == 0:
            return BatchResult(math.nan, 0, 0)
        self._require_batch(batch)
        results, logits = [], []
        for index, part in enumerate(batch.split(self.micro_batch)):
            with validation.counted_from(index * self.micro_batch):
                logits.append(self.classifier(part.input_ids, part.mask))
                loss = self.classifier.loss(logits[-1], part.labels, self.class_weights)
            results.append(MicroResult(len(part.labels), loss, self._correct(logits[-1], part.labels), _NO_GRADIENT))
        found = _summary(results)
        if not probabilities:
            return found
        every = torch.cat(logits)
        return replace(found, probabilities=class_probabilities(every, self.multi_label), predicted=classes_of(every, self.multi_label))

    def state(self) -> dict[str, Tensor]:
        """Everything that the next steps depend on: parameters, moments, step, and the rate of every step [total_steps], float64."""
        return self.optimiser.state() | {"learning_rates": torch.tensor(self.learning_rates, dtype=torch.float64, device="cpu")}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from what `state` gave. Raises a ValueError for the state of another run; nothing has changed then."""
        rates = state.get("learning_rates")
        if rates is None or rates.shape != (len(self.learning_rates),):
            found = "no learning_rates" if rates is None else f"learning_rates of shape {list(rates.shape)}"
            raise ValueError(f"training state: {found}, expected one for each of {len(self.learning_rates)} steps")
        self.optimiser.load_state({name: value for name, value in state.items() if name != "learning_rates"})
        self.learning_rates = rates.tolist()
        self.discard()

    def _accumulate(self, batch: Batch) -> "list[MicroResult]":
        if len(batch.labels) == 0:
            raise ValueError("the batch is empty: there is nothing to train on")
        self._require_batch(batch)
        self._require_step_left()
        with scope(f"steps.{self.optimiser.steps}"):
            if len(self._accumulated) == HELD:
                self._accumulated = [_joined(self._accumulated)]
            held, results = list(self._accumulated), []
            first = sum(result.micro_batches for result in held)
            for index, part in enumerate(batch.split(self.micro_batch)):
                if len(held) == HELD:
                    held = [_joined(held)]
                with validation.counted_from(index * self.micro_batch):
                    held.append(self._micro_batch(first + index, part))
                results.append(replace(held[-1], gradient=_NO_GRADIENT))
        self._accumulated = held
        return results

    def _micro_batch(self, index: int, part: Batch) -> "MicroResult":
        self.optimiser.zero_gradients()
        with scope(f"micro.{index}"):
            logits = self.classifier(part.input_ids, part.mask)
            loss = self.classifier.loss(logits, part.labels, self.class_weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        gradient = self.optimiser.flat_gradient()
        self.optimiser.zero_gradients()
        return MicroResult(len(part.labels), loss.detach(), self._correct(logits, part.labels), gradient)

    def _correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        right = classes_of(logits.detach(), self.multi_label) == labels
        return (right.all(dim=-1) if self.multi_label else right).sum()

    def _mean(self) -> "MicroResult":
        """Over the accumulated samples of all workers."""
        if self.group.size == 1:
            return _joined(self._required())
        with together(self.group):
            weighted = self._weighted()
            require_finite(weighted)
        total = self.group.sum(weighted)
        count = int(total[-1])
        if count == 0:
            raise ValueError("no worker has accumulated a sample: there is nothing to train on")
        return MicroResult(count, total[-3] / count, total[-2], total[:-3] / count)

    def _required(self) -> "list[MicroResult]":
        if not self._accumulated:
            raise ValueError("no sample is accumulated: there is nothing to train on")
        return self._accumulated

    def _weighted(self) -> Tensor:
        """This worker's sums over samples of the gradient and the loss, and its numbers of correct and of all samples, in one vector."""
        if not self._accumulated:
            return self.optimiser.exp_avg.new_zeros(len(self.optimiser.exp_avg) + 3)
        own = _joined(self._accumulated)
        numbers = torch.stack([own.correct.to(own.gradient), own.gradient.new_tensor(own.count)])
        return torch.cat([own.count * own.gradient, own.count * own.loss.to(own.gradient), numbers])

    def _step(self, gradient: Tensor) -> float:
        """Clips and steps; the norm before."""
        clipped, norm = self.optimiser.clip(gradient, self.max_norm)
        self.optimiser.step(clipped, self.learning_rate)
        return float(norm)

    def _require_batch(self, batch: Batch) -> None:
        """Raises a ValueError for tensors that do not belong together and labels of another kind; values are read elsewhere."""
        ids, mask, labels, classes = batch.input_ids, batch.mask, batch.labels, self.classifier.adaptation.classes
        if ids.ndim != 2 or ids.shape != mask.shape or not ids.shape[1]:
            raise ValueError(f"input_ids {list(ids.shape)} and mask {list(mask.shape)}: expected one shape [batch, seq], and not empty")
        if mask.dtype != torch.bool:
            raise ValueError(f"mask is {mask.dtype}: expected torch.bool, true at real tokens")
        samples = len(ids)
        shape = (samples, classes) if self.multi_label else (samples,)
        if labels.is_floating_point() != self.multi_label or labels.shape != shape:
            what = "0 or 1 for each class, float32" if self.multi_label else "one class a sample, int64"
            raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}; expected {what} {list(shape)}")

    def _require_step_left(self) -> None:
        if not self.endless and self.optimiser.steps >= len(self.learning_rates):
            raise IndexError(f"the schedule ends after {len(self.learning_rates)} steps")


def class_probabilities(logits: Tensor, multi_label: bool) -> Tensor:
    """Logits [batch, classes] → the probability of each class, float32: by softmax, or each by its own sigmoid with several labels."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if multi_label:
        return torch.sigmoid(wide)
    found: Tensor = call("probabilities", "softmax", x=wide)
    return found


def classes_of(logits: Tensor, multi_label: bool) -> Tensor:
    """Logits [batch, classes] → the most probable class [batch], or with several labels 0 or 1 for each class, [batch, classes]; int64."""
    return (logits > 0).long() if multi_label else logits.argmax(dim=-1)


def _schedule(total_steps: int, peak: float, warmup_fraction: float, kind: str) -> list[float]:
    name = "learning_rate_schedule"
    rates: Tensor = call(name, name, total_steps=total_steps, peak=peak, warmup_fraction=warmup_fraction, kind=kind)
    found: list[float] = rates.tolist()
    return found


@dataclass(frozen=True)
class MicroResult:
    """Of a micro-batch, or of several joined: number of samples, their mean loss, how many are correct, the mean gradient as one vector."""

    count: int
    loss: Tensor
    correct: Tensor
    gradient: Tensor
    micro_batches: int = 1


def _joined(results: "list[MicroResult]") -> MicroResult:
    """The means over the samples of all."""
    counts = _counts(results)
    loss = _average("loss", [result.loss for result in results], counts)
    correct = torch.stack([result.correct for result in results]).sum()
    gradient = _average("gradient", [result.gradient for result in results], counts)
    return MicroResult(sum(result.count for result in results), loss, correct, gradient, sum(result.micro_batches for result in results))


def _summary(results: list[MicroResult]) -> BatchResult:
    """Mean loss and correct samples of micro-batches; the loss of none is undefined."""
    if not results:
        return BatchResult(math.nan, 0, 0)
    loss = _average("loss", [result.loss for result in results], _counts(results))
    return BatchResult(float(loss), sum(int(result.correct) for result in results), sum(result.count for result in results))


def _counts(results: list[MicroResult]) -> Tensor:
    return torch.tensor([result.count for result in results], device=results[0].loss.device)


def _average(path: str, means: list[Tensor], counts: Tensor) -> Tensor:
    averaged: Tensor = call(path, "average_gradients", gradients=torch.stack([mean.flatten() for mean in means]), counts=counts)
    return averaged
