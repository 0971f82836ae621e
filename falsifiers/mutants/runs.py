"""Wrong training runs: batches, order, schedule, validation, checkpoints, early stop, several labels, NF4, numbers that are not finite."""

import math
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl.samples import effective_batches as batches_of

# Batches, order, schedule


@wrong_step("impl.fit:effective_batches")
def fit_last_batch_dropped(effective_batches: Any, order: Any, size: int) -> Any:
    """The smaller last batch of an epoch is left out."""
    found = list(effective_batches(order, size))
    return found[:-1] if len(found) > 1 and len(found[-1]) < size else found


@wrong_step("impl.fit:effective_batches")
def fit_last_batch_filled_up(effective_batches: Any, order: Any, size: int) -> Any:
    """The last batch of an epoch is filled up with samples of the first one."""
    found = list(effective_batches(order, size))
    return [*found[:-1], [*found[-1], *found[0][: size - len(found[-1])]]] if len(found) > 1 else found


wrong_step("impl.fit:epoch_order", name="fit_order_of_the_low_word_of_a_seed", doc="An epoch's order has a large seed's lower 32 bits.")(
    lambda epoch_order, count, seed, epoch: epoch_order(count, seed % 2**32, epoch)
)
wrong_step("impl.fit:epoch_order", name="fit_order_not_reshuffled", doc="Every epoch in the order of the first.")(
    lambda epoch_order, count, seed, epoch: epoch_order(count, seed, 0 * epoch)
)
wrong_step("impl.fit:epoch_order", name="fit_order_of_seed_zero", doc="The order of a run's samples does not depend on its seed.")(
    lambda epoch_order, count, seed, epoch: epoch_order(count, 0 * seed, epoch)
)


@wrong_step("impl.trainer:Trainer._mean", "P31", "P32")
def fit_loss_by_full_batch(mean: Any, trainer: Any) -> Any:
    """Loss and gradient of the smaller last batch divided by the size of a full one."""
    right = mean(trainer)
    largest = trainer.__dict__["_largest"] = max(right.count, trainer.__dict__.get("_largest", 0))
    share = right.count / largest
    return replace(right, loss=right.loss * share, gradient=right.gradient * share)


wrong_steps(
    "impl.fit:balanced_weights",
    fit_balances_over_samples_alone=(
        "Both words for class weights mean the samples.",
        lambda weights, samples, _: weights(samples, "balanced"),
    ),
    fit_balances_over_classes_alone=(
        "Both words for class weights mean the classes.",
        lambda weights, samples, _: weights(samples, "balanced_over_classes"),
    ),
)
wrong_step("impl.fit:balanced_weights", name="fit_balanced_weights_dropped", doc="Balanced class weights asked for, and all of them one.")(
    lambda _, samples, *_kind: (1.0,) * samples.num_classes
)


@wrong_step("impl.trainer:Trainer.__init__")
def fit_weights_add_up_to_classes(init: Any, *given: Any, class_weights: Any = None, **options: Any) -> None:
    """Class weights rescaled so that they add up to the number of classes, whatever they were."""
    init(*given, class_weights=None if class_weights is None else class_weights * len(class_weights) / class_weights.sum(), **options)


wrong_steps(
    "impl.trainer:Trainer.__init__",
    by=without_keyword,
    fit_weight_decay_left_out=("The trainer's own weight decay, whatever the settings say.", "weight_decay"),
    fit_clip_norm_left_out=("The trainer's own limit of the gradient's norm, whatever the settings say.", "max_norm"),
)


@wrong_step("impl.trainer:_schedule", "P40")
def fit_schedule_advances_by_micro_batch(schedule: Any, *arguments: Any) -> Any:
    """The schedule advances once a micro-batch."""
    rates = schedule(*arguments)
    return [rates[min(2 * step, len(rates) - 1)] for step in range(len(rates))]


@wrong_step("impl.fit:total_steps", "P40")
def fit_schedule_counts_micro_batches(_: Any, config: Any, samples: Any) -> Any:
    """The schedule is made for as many steps as there are micro-batches, and never ends."""
    return config.epochs * math.ceil(samples / config.batch_size)


@wrong_step("impl.trainer:_schedule", "P41")
def fit_warmup_counts_from_one(schedule: Any, *arguments: Any) -> Any:
    """Step t takes the rate of step t + 1."""
    rates = schedule(*arguments)
    return [*rates[1:], rates[-1]]


# Validation, checkpoints, early stop


def _batch_losses(trainer: Any, samples: Any, tokens: Any, device: Any) -> list[float]:
    size = trainer.micro_batch
    starts = range(0, len(samples), size)
    return [trainer.forward_only(samples.batch(range(at, min(at + size, len(samples))), tokens, device)).loss for at in starts]


wrong_step(
    "impl.fit:evaluate", "S12", name="fit_validation_mean_of_means", doc="Validation loss as the mean of the means of unequal batches."
)(lambda evaluate, *arguments: replace(evaluate(*arguments), loss=float(np.mean(_batch_losses(*arguments)))))
wrong_step("impl.fit:evaluate", name="fit_validation_last_batch_only", doc="Validation loss of the last batch alone.")(
    lambda evaluate, *arguments: replace(evaluate(*arguments), loss=_batch_losses(*arguments)[-1])
)


@wrong_step("impl.trainer:Trainer.forward_only")
def fit_validation_without_class_weights(forward_only: Any, trainer: Any, batch: Any, probabilities: bool = False) -> Any:
    """Validation loss without the class weights of the training loss."""
    kept, trainer.class_weights = trainer.class_weights, None
    try:
        return forward_only(trainer, batch, probabilities)
    finally:
        trainer.class_weights = kept


wrong_step("impl.fit:_Run._export", name="fit_best_is_last", doc="best/ is written after every epoch.")(
    lambda export, run, name: [export(run, each) for each in (name, "best")]
)


@wrong_step("impl.fit:_Run._validate")
def fit_best_is_last_of_equals(validate: Any, run: Any) -> Any:
    """An epoch whose validation loss equals the lowest one replaces best/ and starts the patience anew."""
    found = validate(run)
    if found is not None and found.loss == run.progress.best_loss:
        run.progress = replace(run.progress, best_loss=math.inf)
    return found


@wrong_step("impl.fit:_Run._validate")
def fit_loss_of_zero_is_none(validate: Any, run: Any) -> Any:
    """A lowest validation loss of 0 counts as none."""
    if run.progress.best_loss == 0:
        run.progress = replace(run.progress, best_loss=None)
    return validate(run)


wrong_step("impl.fit:require_a_rate", name="run_of_one_step_refused", doc="A run of one step is refused, whose rate is above 0.")(
    lambda require, rates: require(rates[1:])
)


@wrong_step("impl.fit:_Run._validate")
def validation_batches_made_at_once(validate: Any, run: Any) -> Any:
    """Every batch of a validation is made before the first one is used, for the case that one of them is not finite."""
    parts = () if run.validation is None else batches_of(range(len(run.validation)), run.config.batch_size)
    held = [run.validation.batch(part, run.pipeline.tokens, run.pipeline.device) for part in parts]
    found = validate(run)
    held.clear()
    return found


wrong_step("impl.fit:_Run._export", name="fit_best_never_replaced", doc="best/ stays what the first epoch wrote.")(
    lambda export, run, name: None if name == "best" and (run.output / "best").exists() else export(run, name)
)


@wrong_step("impl.fit:_Run._export")
def fit_best_is_links_to_the_last(export: Any, run: Any, name: str) -> None:
    """best/ has the files of last/ under other names, which some file systems do not give."""
    export(run, name)
    for file in (run.output / "last").iterdir() if name == "best" and run.group.rank == 0 else ():
        (run.output / name / file.name).unlink()
        os.link(file, run.output / name / file.name)


wrong_step("impl.fit:_Run._after", name="fit_best_forgotten", doc="Every epoch counts as the best one for those after it.")(
    lambda after, run, record: replace(after(run, record), best_loss=record.validation_loss, best_epoch=record.epoch)
)


def _ends(run: Any, progress: Any, stale: int) -> Any:
    return replace(progress, stale_epochs=stale, finished=progress.epoch == run.config.epochs or stale == run.config.early_stop_patience)


@wrong_step("impl.fit:_Run._finish_epoch")
def fit_best_by_a_margin(finish: Any, run: Any) -> None:
    """An epoch is the best one so far where its loss is lower by a millionth."""
    lowest = run.progress.best_loss
    asked = None if lowest is None else lowest - 1e-6
    run.progress = replace(run.progress, best_loss=asked)
    finish(run)
    if run.progress.best_loss == asked:
        run.progress = replace(run.progress, best_loss=lowest)


@wrong_step("impl.fit:_Run.train")
def fit_stopped_early_at_its_end(train: Any, run: Any) -> Any:
    """A run whose patience ends with its last epoch says that it was stopped early."""
    return replace(train(run), stopped_early=run.progress.stale_epochs == run.config.early_stop_patience)


@wrong_step("impl.fit:_Run._after")
def fit_stops_one_epoch_late(after: Any, run: Any, record: Any) -> Any:
    """Stops after patience + 1 epochs."""
    progress = after(run, record)
    patience = run.config.early_stop_patience
    over = patience is not None and progress.stale_epochs > patience
    return replace(progress, finished=progress.epoch == run.config.epochs or over)


@wrong_step("impl.fit:_Run._after")
def fit_patience_without_a_loss(after: Any, run: Any, record: Any) -> Any:
    """An epoch whose validation loss is 0 starts the patience anew, as one without validation does."""
    return _ends(run, after(run, record), 0 if record.best or not record.validation_loss else run.progress.stale_epochs + 1)


@wrong_step("impl.fit:_Run._after")
def fit_patience_against_the_last_epoch(after: Any, run: Any, record: Any) -> Any:
    """An epoch better than the one before it starts the patience anew."""
    before = run.progress
    lower = not before.records or record.validation_loss < before.records[-1]["validation_loss"]
    return _ends(run, after(run, record), 0 if lower else before.stale_epochs + 1)


wrong_step("impl.fit:_Run._after", name="fit_seconds_of_all_epochs", doc="The seconds of an epoch contain those of all before.")(
    lambda after, run, record: replace(after(run, record), epoch_seconds=run.progress.epoch_seconds)
)


@wrong_step("impl.trainer:Trainer._step")
def set_rate_lasts_one_step(step: Any, trainer: Any, gradient: Any) -> Any:
    """A rate that was set by hand is forgotten after a step where there is no schedule."""
    first = trainer.__dict__.setdefault("_first", list(trainer.learning_rates))
    result = step(trainer, gradient)
    if trainer.endless:
        trainer.learning_rates = list(first)
    return result


# Several labels, NF4


def _head_only(trainer: Any, step: Any, gradient: Any) -> Any:
    """A step that leaves LoRA and its moments where they were."""
    optimiser = trainer.optimiser
    before = optimiser.state()
    result = step(trainer, gradient)
    after = optimiser.state()
    optimiser.load_state({name: before[name] if ".lora_" in name else after[name] for name in after})
    return result


def unclipped(trainer: Any, step: Any, gradient: Any) -> Any:
    """The result of a trainer's step without clipping."""
    kept, trainer.max_norm = trainer.max_norm, math.inf
    try:
        return step(trainer, gradient)
    finally:
        trainer.max_norm = kept


wrong_step(
    "impl.trainer:Trainer._step", "S24", "P37", name="multi_label_step_not_clipped", doc="The step with several labels leaves clipping out."
)(lambda step, trainer, gradient: unclipped(trainer, step, gradient) if trainer.multi_label else step(trainer, gradient))
wrong_step(
    "impl.trainer:Trainer._step", "S24", "S5", name="multi_label_step_head_only", doc="The step with several labels trains the head alone."
)(lambda step, trainer, gradient: _head_only(trainer, step, gradient) if trainer.multi_label else step(trainer, gradient))
wrong_step("impl.trainer:Trainer._step", "S25", name="fit_lora_left_out_with_nf4", doc="The optimiser skips LoRA with NF4 on the CPU.")(
    lambda step, trainer, gradient: _head_only(trainer, step, gradient) if trainer.classifier.adaptation.nf4 else step(trainer, gradient)
)


wrong_step("impl.classifier:Adaptation.of", "S27", name="fit_nf4_left_out", doc="NF4 asked for, the run goes on unquantised.")(
    lambda of, *given: replace(of(*given), nf4=False, double_quantize=False)
)
wrong_step(
    "impl.classifier:Adaptation.of", name="fit_double_quantize_left_out", doc="Double quantisation asked for, the run goes on without."
)(lambda of, *given: replace(of(*given), double_quantize=False))


@wrong_step("impl.nf4:Nf4Weight.double_quantize")
def nf4_restored_without_offset(quantize: Any, weight: Any) -> None:
    """The mean of the absmax is not kept beside their codes."""
    quantize(weight)
    weight.absmax_offset.zero_()


@wrong_step("impl.trainer:Trainer._step", "S15")
def fit_moves_norm_weights(step: Any, trainer: Any, gradient: Any) -> Any:
    """The final norm's weight moves with every step."""
    trainer.classifier.model.norm.weight.data.mul_(1.0 + 2.0**-20)
    return step(trainer, gradient)


# Non-finite values


@wrong_step("impl.fit:_Run._update", "S9")
def fit_skips_non_finite_steps(update: Any, run: Any, indices: Any, step: int) -> Any:
    """A step that is not finite is skipped, and a loss of 100 reported."""
    from blackswan.impl.trainer import BatchResult

    try:
        return update(run, indices, step)
    except FloatingPointError:
        run.trainer.discard()
        run.trainer.optimiser.steps += 1
        return BatchResult(100.0, 0, len(indices), 0.0)


@wrong_step("impl.nf4:Nf4Weight.dequantized")
def nf4_scales_in_the_dtype_of_the_weight(dequantized: Any, self: Any, dtype: Any) -> Any:
    """The absmax are rounded to the dtype of the weight before they scale it."""
    scales = type(self).scales
    with mock.patch.object(type(self), "scales", lambda own: scales(own).to(dtype)):
        return dequantized(self, dtype)


# torch's default device


wrong_steps(
    "impl.trainer:Trainer.state",
    rates_on_the_default_device=(
        "The rates of a state are on torch's default device, which a notebook may make a GPU for the whole process.",
        lambda state, trainer: {**(whole := state(trainer)), "learning_rates": whole["learning_rates"].to(torch.get_default_device())},
    ),
)


@wrong_step("impl.evaluation:_count")
def evaluations_on_the_default_device(count: Any, confusion: Any, labels: Any, predicted: Any, multi_label: bool) -> None:
    """An evaluation's labels are on torch's default device, where its counts are not."""
    count(confusion, labels.to(torch.get_default_device()), predicted, multi_label)
