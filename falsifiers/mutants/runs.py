"""Wrong training runs: batches, order, schedule, validation, checkpoints, early stop, resuming, several labels, NF4, evaluation."""

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.registry import named_step, step_mutant


def _rewritten(progress: Any, **changes: Any) -> Any:
    return replace(progress, **changes)


# Batches, order, schedule


@step_mutant("blackswan.impl.fit", "effective_batches", "own")
def fit_last_batch_dropped(effective_batches: Any) -> Any:
    """The smaller last batch of an epoch is left out."""

    def whole_only(order: Any, size: int) -> Any:
        found = effective_batches(order, size)
        return found[:-1] if len(found) > 1 and len(found[-1]) < size else found

    return whole_only


@step_mutant("blackswan.impl.fit", "effective_batches", "own")
def fit_last_batch_filled_up(effective_batches: Any) -> Any:
    """The last batch of an epoch is filled up with samples of the first one."""

    def filled(order: Any, size: int) -> Any:
        found = effective_batches(order, size)
        return [*found[:-1], [*found[-1], *found[0][: size - len(found[-1])]]] if len(found) > 1 else found

    return filled


@step_mutant("blackswan.impl.fit", "epoch_order", "own")
def fit_order_not_reshuffled(epoch_order: Any) -> Any:
    """Every epoch in the order of the first."""
    return lambda count, seed, epoch: epoch_order(count, seed, 0 * epoch)


@step_mutant("blackswan.impl.trainer", "Trainer._mean", "P31", "P32")
def fit_loss_by_full_batch(mean: Any) -> Any:
    """Loss and gradient of the smaller last batch divided by the size of a full one."""
    full: dict[int, int] = {}

    def divided(trainer: Any) -> Any:
        right = mean(trainer)
        largest = full[id(trainer)] = max(right.count, full.get(id(trainer), 0))
        share = right.count / largest
        return replace(right, loss=right.loss * share, gradient=right.gradient * share)

    return divided


@step_mutant("blackswan.impl.fit", "balanced_weights", "own")
def fit_balanced_weights_dropped(balanced_weights: Any) -> Any:
    """Balanced class weights asked for, and all of them one."""
    del balanced_weights
    return lambda samples: (1.0,) * samples.num_classes


named_step(
    "fit_weight_decay_left_out",
    "own",
    "The trainer's own weight decay, whatever the settings say.",
    without_keyword("weight_decay"),
    "blackswan.impl.trainer",
    "Trainer.__init__",
)
named_step(
    "fit_clip_norm_left_out",
    "own",
    "The trainer's own limit of the gradient's norm, whatever the settings say.",
    without_keyword("max_norm"),
    "blackswan.impl.trainer",
    "Trainer.__init__",
)


@step_mutant("blackswan.impl.trainer", "_schedule", "P40")
def fit_schedule_advances_by_micro_batch(schedule: Any) -> Any:
    """The schedule advances once a micro-batch."""

    def fast(*arguments: Any) -> Any:
        rates = schedule(*arguments)
        return [rates[min(2 * step, len(rates) - 1)] for step in range(len(rates))]

    return fast


@step_mutant("blackswan.impl.fit", "total_steps", "P40")
def fit_schedule_counts_micro_batches(total_steps: Any) -> Any:
    """The schedule is made for as many steps as there are micro-batches, and never ends."""
    del total_steps
    return lambda config, samples: config.epochs * math.ceil(samples / config.batch_size)


@step_mutant("blackswan.impl.trainer", "_schedule", "P41")
def fit_warmup_counts_from_one(schedule: Any) -> Any:
    """Step t takes the rate of step t + 1."""

    def ahead(*arguments: Any) -> Any:
        rates = schedule(*arguments)
        return [*rates[1:], rates[-1]]

    return ahead


# Validation, checkpoints, early stop


def _batch_losses(trainer: Any, samples: Any, tokens: Any, device: Any) -> list[float]:
    size = trainer.micro_batch
    starts = range(0, len(samples), size)
    return [trainer.forward_only(samples.batch(range(at, min(at + size, len(samples))), tokens, device)).loss for at in starts]


@step_mutant("blackswan.impl.fit", "evaluate", "S12")
def fit_validation_mean_of_means(evaluate: Any) -> Any:
    """Validation loss as the mean of the means of unequal batches."""
    return lambda *arguments: replace(evaluate(*arguments), loss=float(np.mean(_batch_losses(*arguments))))


@step_mutant("blackswan.impl.fit", "evaluate", "own")
def fit_validation_last_batch_only(evaluate: Any) -> Any:
    """Validation loss of the last batch alone."""
    return lambda *arguments: replace(evaluate(*arguments), loss=_batch_losses(*arguments)[-1])


@step_mutant("blackswan.impl.trainer", "Trainer.forward_only", "own")
def fit_validation_without_class_weights(forward_only: Any) -> Any:
    """Validation loss without the class weights of the training loss."""

    def unweighted(trainer: Any, batch: Any, probabilities: bool = False) -> Any:
        kept, trainer.class_weights = trainer.class_weights, None
        try:
            return forward_only(trainer, batch, probabilities)
        finally:
            trainer.class_weights = kept

    return unweighted


@step_mutant("blackswan.impl.fit", "_Run._export", "own")
def fit_best_is_last(export: Any) -> Any:
    """best/ is written after every epoch."""
    return lambda run, name: [export(run, each) for each in (name, "best")]


@step_mutant("blackswan.impl.fit", "_Run._validate", "own")
def fit_best_is_last_of_equals(validate: Any) -> Any:
    """An epoch whose validation loss equals the lowest one replaces best/ and starts the patience anew."""

    def lenient(run: Any) -> Any:
        found = validate(run)
        if found is not None and found.loss == run.progress.best_loss:
            run.progress = replace(run.progress, best_loss=math.inf)
        return found

    return lenient


@step_mutant("blackswan.impl.fit", "_Run._export", "own")
def fit_best_never_replaced(export: Any) -> Any:
    """best/ stays what the first epoch wrote."""
    return lambda run, name: None if name == "best" and (run.output / "best").exists() else export(run, name)


@step_mutant("blackswan.impl.fit", "_Run._after", "own")
def fit_best_forgotten(after: Any) -> Any:
    """Every epoch counts as the best one for those after it."""
    return lambda run, record: _rewritten(after(run, record), best_loss=record.validation_loss, best_epoch=record.epoch)


def _ends(run: Any, progress: Any, stale: int) -> Any:
    return replace(progress, stale_epochs=stale, finished=progress.epoch == run.config.epochs or stale == run.config.early_stop_patience)


@step_mutant("blackswan.impl.fit", "_Run._after", "own")
def fit_stops_one_epoch_late(after: Any) -> Any:
    """Stops after patience + 1 epochs."""

    def late(run: Any, record: Any) -> Any:
        progress = after(run, record)
        patience = run.config.early_stop_patience
        over = patience is not None and progress.stale_epochs > patience
        return replace(progress, finished=progress.epoch == run.config.epochs or over)

    return late


@step_mutant("blackswan.impl.fit", "_Run._after", "own")
def fit_patience_against_the_last_epoch(after: Any) -> Any:
    """An epoch better than the one before it starts the patience anew."""

    def against_last(run: Any, record: Any) -> Any:
        before = run.progress
        lower = not before.records or record.validation_loss < before.records[-1]["validation_loss"]
        return _ends(run, after(run, record), 0 if lower else before.stale_epochs + 1)

    return against_last


# Resuming


def _after_continuing(change: Any) -> Any:
    """The change of a run that has just read its state."""

    def wrap(continue_from: Any) -> Any:
        def wrong(run: Any, progress: Any, tensors: Any) -> None:
            continue_from(run, progress, tensors)
            change(run)

        return wrong

    return wrap


@step_mutant("blackswan.impl.fit", "_Run._continue_from", "own")
def resume_forgets_moments(continue_from: Any) -> Any:
    """Moments are zero after continuing."""

    def change(run: Any) -> None:
        run.trainer.optimiser.exp_avg.zero_()
        run.trainer.optimiser.exp_avg_sq.zero_()

    return _after_continuing(change)(continue_from)


@step_mutant("blackswan.impl.fit", "_Run._continue_from", "own")
def resume_forgets_schedule(continue_from: Any) -> Any:
    """Schedule and bias correction begin again after continuing."""

    def change(run: Any) -> None:
        run.trainer.optimiser.steps = 0

    return _after_continuing(change)(continue_from)


@step_mutant("blackswan.impl.trainer", "Trainer.load_state", "own")
def resume_forgets_rates(load_state: Any) -> Any:
    """Rates that were set are the schedule's again after continuing."""

    def forgetful(trainer: Any, state: Any) -> None:
        kept = list(trainer.learning_rates)
        load_state(trainer, state)
        trainer.learning_rates = kept

    return forgetful


def _progress_without(**changes: Any) -> Any:
    def change(run: Any) -> None:
        run.progress = replace(run.progress, **changes)

    return _after_continuing(change)


named_step(
    "resume_forgets_position",
    "own",
    "The epoch begins again after continuing, its first samples are read twice.",
    _progress_without(position=0),
    "blackswan.impl.fit",
    "_Run._continue_from",
)
named_step(
    "resume_forgets_best_loss",
    "own",
    "The first epoch after continuing is the best one.",
    _progress_without(best_loss=None),
    "blackswan.impl.fit",
    "_Run._continue_from",
)
named_step(
    "resume_forgets_patience",
    "own",
    "Epochs without a better loss are counted from zero after continuing.",
    _progress_without(stale_epochs=0),
    "blackswan.impl.fit",
    "_Run._continue_from",
)
named_step(
    "resume_forgets_loss_sum",
    "own",
    "The epoch's training loss leaves out the steps before the kill.",
    _progress_without(loss_sum=0.0),
    "blackswan.impl.fit",
    "_Run._continue_from",
)


@step_mutant("blackswan.impl.fit", "_Run._save", "own")
def resume_state_before_the_step(save: Any) -> Any:
    """The state counts a step whose tensors it does not have yet."""

    def early(run: Any) -> None:
        kept, state = run.trainer.state, run.trainer.state()
        earlier = run.__dict__.get("_earlier", state)
        run.trainer.state = lambda: {**earlier, "step": state["step"]}
        try:
            save(run)
        finally:
            run.trainer.state = kept
        run.__dict__["_earlier"] = state

    return early


@step_mutant("blackswan.impl.training_state", "write_atomically", "own")
def resume_state_written_in_place(write_atomically: Any) -> Any:
    """The state is written over the old one; a kill leaves half of it."""
    del write_atomically

    def in_place(path: Any, content: bytes) -> None:
        with path.open("wb") as file:
            for part in range(4):
                file.write(content[part * len(content) // 4 : (part + 1) * len(content) // 4])
                file.flush()
                os.fsync(file.fileno())

    return in_place


@step_mutant("blackswan.impl.fit", "_Run._validate", "own")
def resume_state_counts_an_unfinished_epoch(validate: Any) -> Any:
    """The state says that an epoch is over before its validation and its adapters are."""

    def early(run: Any) -> Any:
        kept = run.progress
        run.progress = replace(kept, epoch=min(kept.epoch + 1, run.config.epochs - 1), position=0, loss_sum=0.0, sample_count=0)
        run._save()
        run.progress = kept
        return validate(run)

    return early


@step_mutant("blackswan.impl.fit", "_differences", "own")
def resume_ignores_what_differs(differences: Any) -> Any:
    """A run is continued with other settings and samples without a word."""
    del differences
    return lambda *_: iter(())


@step_mutant("blackswan.impl.fit", "_FREE", "own")
def resume_ignores_most_settings(free: Any) -> Any:
    """A run is continued with another alpha, schedule or seed without a word."""
    return (*free, "lora_alpha", "schedule", "seed")


@step_mutant("blackswan.impl.training_state", "_digest", "own")
def resume_trusts_damage(digest: Any) -> Any:
    """The state's checksum is not looked at."""
    del digest
    return lambda *_: ""


@step_mutant("blackswan.impl.training_state", "_digest", "own")
def resume_trusts_progress(digest: Any) -> Any:
    """The state's checksum is that of its tensors alone."""
    return lambda text, tensors: digest(text[:0], tensors)


@step_mutant("blackswan.impl.training_state", "_digest", "own")
def resume_trusts_tensors(digest: Any) -> Any:
    """The state's checksum leaves out the content of its tensors."""
    return lambda text, tensors: digest(text, dict.fromkeys(tensors, torch.zeros(1)))


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
    """What the step of a trainer gives where nothing is clipped."""
    kept, trainer.max_norm = trainer.max_norm, math.inf
    try:
        return step(trainer, gradient)
    finally:
        trainer.max_norm = kept


@step_mutant("blackswan.impl.trainer", "Trainer._step", "S24", "P37")
def multi_label_step_not_clipped(step: Any) -> Any:
    """The step with several labels leaves clipping out."""
    return lambda trainer, gradient: unclipped(trainer, step, gradient) if trainer.multi_label else step(trainer, gradient)


@step_mutant("blackswan.impl.trainer", "Trainer._step", "S24", "S5")
def multi_label_step_head_only(step: Any) -> Any:
    """The step with several labels trains the head alone."""
    return lambda trainer, gradient: _head_only(trainer, step, gradient) if trainer.multi_label else step(trainer, gradient)


@step_mutant("blackswan.impl.trainer", "Trainer._step", "S25")
def fit_lora_left_out_with_nf4(step: Any) -> Any:
    """With NF4 on the CPU the optimiser skips LoRA."""
    return lambda trainer, gradient: _head_only(trainer, step, gradient) if trainer.classifier.adaptation.nf4 else step(trainer, gradient)


@step_mutant("blackswan.impl.classifier", "Adaptation.of", "S27")
def fit_nf4_left_out(of: Any) -> Any:
    """NF4 asked for, the run goes on unquantised."""
    return classmethod(lambda cls, settings: replace(of.__func__(cls, settings), nf4=False))


@step_mutant("blackswan.impl.trainer", "Trainer._step", "S15")
def fit_moves_norm_weights(step: Any) -> Any:
    """The final norm's weight moves with every step."""

    def moving(trainer: Any, gradient: Any) -> Any:
        trainer.classifier.model.norm.weight.data.mul_(1.0 + 2.0**-20)
        return step(trainer, gradient)

    return moving


# Non-finite values


@step_mutant("blackswan.impl.fit", "_Run._update", "S9")
def fit_skips_non_finite_steps(update: Any) -> Any:
    """A step that is not finite is skipped, and a loss of 100 reported."""

    def skipping(run: Any, indices: Any, step: int) -> Any:
        from blackswan.impl.trainer import BatchResult

        try:
            return update(run, indices, step)
        except FloatingPointError:
            run.trainer.discard()
            run.trainer.optimiser.steps += 1
            return BatchResult(100.0, 0, len(indices), 0.0)

    return skipping
