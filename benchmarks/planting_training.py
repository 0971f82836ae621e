"""Wrong steps planted into the real trainer and optimiser."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.planting import Planted, both, method, step
from blackswan.impl import trainer
from blackswan.impl.decoder import Norm
from blackswan.impl.dispatch import scope
from blackswan.impl.optimiser import AdamW
from blackswan.impl.trainer import Batch, BatchResult, Trainer

STATE = ("exp_avg", "exp_avg_sq")


def _averaging(path: str, change: Callable[..., Tensor]) -> Planted:
    """The trainer's average of the losses or of the gradients, as `change(original, means, counts)` has it."""
    original = trainer._average

    def average(at: str, means: list[Tensor], counts: Tensor) -> Tensor:
        if at != path:
            return original(at, means, counts)
        return change(lambda some, weights: original(at, some, weights), means, counts)

    return patch.object(trainer, "_average", average)


def _keeping(chosen: Callable[[str], bool]) -> Planted:
    """Parameters that the optimiser leaves where they were, with their moments."""

    def kept(original: Callable[..., None], self: AdamW, gradient: Tensor, learning_rate: float) -> None:
        before = {name: self.split(value.clone()) for name, value in (("flat", self.flat()), *((n, getattr(self, n)) for n in STATE))}
        original(self, gradient, learning_rate)
        moments = {name: self.split(getattr(self, name)) for name in STATE}
        for name, parameter in self.parameters.items():
            if chosen(name):
                parameter.data.copy_(before["flat"][name])
                for moment in STATE:
                    moments[moment][name].copy_(before[moment][name])

    return method(AdamW, "step", kept)


def _stepping(change: Callable[..., None]) -> Planted:
    return method(AdamW, "step", change)


@step("clip_by_global_norm")
def train_averages_by_learning_rate() -> Planted:
    """Gradients summed over samples, the rate divided by the batch."""
    sizes: dict[str, int] = {}

    def summed(average: Callable[..., Tensor], means: list[Tensor], counts: Tensor) -> Tensor:
        sizes["batch"] = int(counts.sum())
        return average(means, counts) * sizes["batch"]

    def slower(original: Callable[..., None], self: AdamW, gradient: Tensor, learning_rate: float) -> None:
        original(self, gradient, learning_rate / sizes["batch"])

    return both(_averaging("gradient", summed), _stepping(slower))


@step("average_gradients")
def train_clips_before_averaging() -> Planted:
    """Each micro-batch's gradient clipped by itself, the mean not at all."""
    limits: dict[str, float] = {}

    def noted(original: Callable[..., Any], self: Trainer, batch: Batch) -> Any:
        limits["norm"] = kept = self.max_norm
        self.max_norm = math.inf
        try:
            return original(self, batch)
        finally:
            self.max_norm = kept

    def clipped(average: Callable[..., Tensor], means: list[Tensor], counts: Tensor) -> Tensor:
        return average([mean * (limits["norm"] / mean.norm()).clamp(max=1) for mean in means], counts)

    return both(method(Trainer, "train_batch", noted), _averaging("gradient", clipped))


@step("adamw_step")
def train_steps_head_only() -> Planted:
    """LoRA never moves."""
    return _keeping(lambda name: ".lora_" in name)


@step("adamw_step")
def train_lora_a_frozen() -> Planted:
    """A never moves."""
    return _keeping(lambda name: ".lora_A." in name)


@step("adamw_step")
def train_tail_skipped() -> Planted:
    """The head's bias never moves."""
    return _keeping(lambda name: name == "score.bias")


@step("adamw_step")
def train_shared_workspace() -> Planted:
    """Every layer takes the last layer's gradient."""

    def shared(original: Callable[..., None], self: AdamW, gradient: Tensor, learning_rate: float) -> None:
        parts = self.split(gradient)
        last = max((name.split(".")[2] for name in parts if ".lora_" in name), key=int)

        def written(name: str) -> str:
            pieces = name.split(".")
            return ".".join([*pieces[:2], last, *pieces[3:]]) if ".lora_" in name else name

        original(self, torch.cat([parts[written(name)].flatten() for name in parts]), learning_rate)

    return _stepping(shared)


@step("average_gradients")
def train_last_micro_batch_only() -> Planted:
    """Only the last micro-batch's gradient counts."""
    return _averaging("gradient", lambda average, means, counts: average(means[-1:], counts[-1:]))


@step("lora_linear")
def train_steps_per_micro_batch() -> Planted:
    """The optimiser steps once a micro-batch, at the batch's rate: the second micro-batch sees other adapters."""

    def stepped(_: Any, self: Trainer, batch: Batch) -> BatchResult:
        number, rate = self.optimiser.steps, self.learning_rate
        with scope(f"steps.{number}"):
            results = []
            for index, part in enumerate(batch.split(self.micro_batch)):
                self.optimiser.steps = number * math.ceil(len(batch.labels) / self.micro_batch) + index
                results.append(self._micro_batch(index, part))
                clipped, norm = self.optimiser.clip(results[-1].gradient, self.max_norm)
                self.optimiser.step(clipped, rate)
            self.optimiser.steps = number + 1
            counts = torch.tensor([result.count for result in results])
            loss = trainer._average("loss", [result.loss for result in results], counts)
        return BatchResult(float(loss), 0, len(batch.labels), float(norm))

    return method(Trainer, "train_batch", stepped)


def _rate(index: Callable[[Trainer], int]) -> Planted:
    def rate(self: Trainer) -> float:
        return self.learning_rates[min(index(self), len(self.learning_rates) - 1)]

    return patch.object(Trainer, "learning_rate", property(rate))


@step("adamw_step")
def train_schedule_per_micro_batch() -> Planted:
    """The schedule advances once a micro-batch."""
    sizes: dict[str, int] = {}

    def noted(original: Callable[..., Any], self: Trainer, batch: Batch) -> Any:
        sizes["parts"] = math.ceil(len(batch.labels) / self.micro_batch)
        return original(self, batch)

    return both(method(Trainer, "train_batch", noted), _rate(lambda self: self.optimiser.steps * sizes["parts"]))


@step("adamw_step")
def train_schedule_one_step_ahead() -> Planted:
    """Step t takes the rate of step t + 1."""
    return _rate(lambda self: self.optimiser.steps + 1)


def _clipping(change: Callable[..., Any]) -> Planted:
    return method(AdamW, "clip", change)


@step("clip_by_global_norm")
def train_without_clipping() -> Planted:
    """Nothing clipped."""
    return _clipping(lambda original, self, gradient, _: original(self, gradient, math.inf))


@step("clip_by_global_norm")
def train_max_norm_hard_coded() -> Planted:
    """Clipped to 1 whatever the configuration says."""
    return _clipping(lambda original, self, gradient, _: original(self, gradient, 1.0))


@step("clip_by_global_norm")
def train_gradients_not_zeroed() -> Planted:
    """The clipped gradient of the step before is still there."""

    def kept(original: Callable[..., Any], self: Any, gradient: Tensor, max_norm: float) -> Any:
        clipped, norm = original(self, gradient + getattr(self, "before", 0.0), max_norm)
        self.before = clipped
        return clipped, norm

    return _clipping(kept)


@step("clip_by_global_norm")
def train_reports_clipped_norm() -> Planted:
    """The norm after clipping recorded."""

    def after(original: Callable[..., Any], self: AdamW, gradient: Tensor, max_norm: float) -> Any:
        clipped, norm = original(self, gradient, max_norm)
        return clipped, norm.clamp(max=max_norm)

    return _clipping(after)


@step("rms_norm")
def train_moves_base_weights() -> Planted:
    """Norm weights moved as well, by the learning rate."""
    norms: list[Norm] = []
    original_init = Norm.__init__

    def init(self: Norm, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        norms.append(self)

    def moved(original: Callable[..., None], self: AdamW, gradient: Tensor, learning_rate: float) -> None:
        original(self, gradient, learning_rate)
        for norm in norms:
            norm.weight.data = norm.weight.data * (1 - learning_rate)

    return both(patch.object(Norm, "__init__", init), _stepping(moved))


@step("adamw_step")
def train_decay_on_head_only() -> Planted:
    """Weight decay taken back from LoRA."""

    def undecayed(original: Callable[..., None], self: AdamW, gradient: Tensor, learning_rate: float) -> None:
        before = self.split(self.flat())
        original(self, gradient, learning_rate)
        for name, parameter in self.parameters.items():
            if ".lora_" in name:
                parameter.data += learning_rate * self.weight_decay * before[name]

    return _stepping(undecayed)


@step("adamw_step")
def train_step_count_stuck() -> Planted:
    """Every step corrected as the first."""

    def stuck(original: Callable[..., None], self: AdamW, gradient: Tensor, learning_rate: float) -> None:
        steps, self.steps = self.steps, 0
        original(self, gradient, learning_rate)
        self.steps = steps + 1

    return _stepping(stuck)


@step("adamw_step")
def train_moments_reset() -> Planted:
    """Every step starts from zero moments."""

    def reset(original: Callable[..., None], self: AdamW, gradient: Tensor, learning_rate: float) -> None:
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.exp_avg), torch.zeros_like(self.exp_avg_sq)
        original(self, gradient, learning_rate)

    return _stepping(reset)


@step("weighted_cross_entropy")
def train_class_weights_dropped() -> Planted:
    """Class weights not passed on."""

    def unweighted(original: Callable[..., None], self: Trainer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "class_weights": None})

    return method(Trainer, "__init__", unweighted)


@step("average_gradients")
def train_reports_mean_of_micro_batch_losses() -> Planted:
    """Losses of unequal micro-batches averaged without their sizes."""
    return _averaging("loss", lambda average, means, counts: average(means, torch.ones_like(counts)))


@step("adamw_step")
def train_masters_low_precision() -> Planted:
    """Trainable parameters kept in bfloat16."""

    def rounded(original: Callable[..., None], self: AdamW, gradient: Tensor, learning_rate: float) -> None:
        original(self, gradient, learning_rate)
        for parameter in self.parameters.values():
            parameter.data.copy_(parameter.data.bfloat16())

    return _stepping(rounded)
