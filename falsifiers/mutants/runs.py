"""Wrong training runs: batches, order, schedule, validation, checkpoints, early stop, resuming, several labels, NF4, evaluation."""

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.patches import step_mutant


def _rewritten(progress: Any, **changes: Any) -> Any:
    return replace(progress, **changes)


# Batches, order, schedule


@step_mutant("fit_last_batch_dropped", "blackswan.impl.fit", "effective_batches")
def _(effective_batches: Any) -> Any:
    def whole_only(order: Any, size: int) -> Any:
        found = effective_batches(order, size)
        return found[:-1] if len(found) > 1 and len(found[-1]) < size else found

    return whole_only


@step_mutant("fit_last_batch_filled_up", "blackswan.impl.fit", "effective_batches")
def _(effective_batches: Any) -> Any:
    def filled(order: Any, size: int) -> Any:
        found = effective_batches(order, size)
        return [*found[:-1], [*found[-1], *found[0][: size - len(found[-1])]]] if len(found) > 1 else found

    return filled


@step_mutant("fit_order_not_reshuffled", "blackswan.impl.fit", "epoch_order")
def _(epoch_order: Any) -> Any:
    return lambda count, seed, epoch: epoch_order(count, seed, 0 * epoch)


@step_mutant("fit_loss_by_full_batch", "blackswan.impl.trainer", "Trainer._mean")
def _(mean: Any) -> Any:
    full: dict[int, int] = {}

    def divided(trainer: Any) -> Any:
        right = mean(trainer)
        largest = full[id(trainer)] = max(right.count, full.get(id(trainer), 0))
        share = right.count / largest
        return replace(right, loss=right.loss * share, gradient=right.gradient * share)

    return divided


@step_mutant("fit_balanced_weights_dropped", "blackswan.impl.fit", "balanced_weights")
def _(balanced_weights: Any) -> Any:
    del balanced_weights
    return lambda samples: (1.0,) * samples.num_classes


step_mutant("fit_weight_decay_left_out", "blackswan.impl.trainer", "Trainer.__init__")(without_keyword("weight_decay"))
step_mutant("fit_clip_norm_left_out", "blackswan.impl.trainer", "Trainer.__init__")(without_keyword("max_norm"))


@step_mutant("fit_schedule_advances_by_micro_batch", "blackswan.impl.trainer", "_schedule")
def _(schedule: Any) -> Any:
    def fast(*arguments: Any) -> Any:
        rates = schedule(*arguments)
        return [rates[min(2 * step, len(rates) - 1)] for step in range(len(rates))]

    return fast


@step_mutant("fit_schedule_counts_micro_batches", "blackswan.impl.fit", "total_steps")
def _(total_steps: Any) -> Any:
    del total_steps
    return lambda config, samples: config.epochs * math.ceil(samples / config.batch_size)


@step_mutant("fit_warmup_counts_from_one", "blackswan.impl.trainer", "_schedule")
def _(schedule: Any) -> Any:
    def ahead(*arguments: Any) -> Any:
        rates = schedule(*arguments)
        return [*rates[1:], rates[-1]]

    return ahead


# Validation, checkpoints, early stop


def _batch_losses(trainer: Any, samples: Any, tokens: Any, device: Any) -> list[float]:
    size = trainer.micro_batch
    starts = range(0, len(samples), size)
    return [trainer.forward_only(samples.batch(range(at, min(at + size, len(samples))), tokens, device)).loss for at in starts]


@step_mutant("fit_validation_mean_of_means", "blackswan.impl.fit", "evaluate")
def _(evaluate: Any) -> Any:
    return lambda *arguments: replace(evaluate(*arguments), loss=float(np.mean(_batch_losses(*arguments))))


@step_mutant("fit_validation_last_batch_only", "blackswan.impl.fit", "evaluate")
def _(evaluate: Any) -> Any:
    return lambda *arguments: replace(evaluate(*arguments), loss=_batch_losses(*arguments)[-1])


@step_mutant("fit_validation_without_class_weights", "blackswan.impl.trainer", "Trainer.forward_only")
def _(forward_only: Any) -> Any:
    def unweighted(trainer: Any, batch: Any, probabilities: bool = False) -> Any:
        kept, trainer.class_weights = trainer.class_weights, None
        try:
            return forward_only(trainer, batch, probabilities)
        finally:
            trainer.class_weights = kept

    return unweighted


@step_mutant("fit_best_is_last", "blackswan.impl.fit", "_Run._export")
def _(export: Any) -> Any:
    return lambda run, name: [export(run, each) for each in (name, "best")]


@step_mutant("fit_best_is_last_of_equals", "blackswan.impl.fit", "_Run._validate")
def _(validate: Any) -> Any:
    def lenient(run: Any) -> Any:
        found = validate(run)
        if found is not None and found.loss == run.progress.best_loss:
            run.progress = replace(run.progress, best_loss=math.inf)
        return found

    return lenient


@step_mutant("fit_best_never_replaced", "blackswan.impl.fit", "_Run._export")
def _(export: Any) -> Any:
    return lambda run, name: None if name == "best" and (run.output / "best").exists() else export(run, name)


@step_mutant("fit_best_forgotten", "blackswan.impl.fit", "_Run._after")
def _(after: Any) -> Any:
    return lambda run, record: _rewritten(after(run, record), best_loss=record.validation_loss, best_epoch=record.epoch)


def _ends(run: Any, progress: Any, stale: int) -> Any:
    return replace(progress, stale_epochs=stale, finished=progress.epoch == run.config.epochs or stale == run.config.early_stop_patience)


@step_mutant("fit_stops_one_epoch_late", "blackswan.impl.fit", "_Run._after")
def _(after: Any) -> Any:
    def late(run: Any, record: Any) -> Any:
        progress = after(run, record)
        patience = run.config.early_stop_patience
        over = patience is not None and progress.stale_epochs > patience
        return replace(progress, finished=progress.epoch == run.config.epochs or over)

    return late


@step_mutant("fit_patience_against_the_last_epoch", "blackswan.impl.fit", "_Run._after")
def _(after: Any) -> Any:
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


@step_mutant("resume_forgets_moments", "blackswan.impl.fit", "_Run._continue_from")
def _(continue_from: Any) -> Any:
    def change(run: Any) -> None:
        run.trainer.optimiser.exp_avg.zero_()
        run.trainer.optimiser.exp_avg_sq.zero_()

    return _after_continuing(change)(continue_from)


@step_mutant("resume_forgets_schedule", "blackswan.impl.fit", "_Run._continue_from")
def _(continue_from: Any) -> Any:
    def change(run: Any) -> None:
        run.trainer.optimiser.steps = 0

    return _after_continuing(change)(continue_from)


@step_mutant("resume_forgets_rates", "blackswan.impl.trainer", "Trainer.load_state")
def _(load_state: Any) -> Any:
    def forgetful(trainer: Any, state: Any) -> None:
        kept = list(trainer.learning_rates)
        load_state(trainer, state)
        trainer.learning_rates = kept

    return forgetful


def _progress_without(**changes: Any) -> Any:
    def change(run: Any) -> None:
        run.progress = replace(run.progress, **changes)

    return _after_continuing(change)


step_mutant("resume_forgets_position", "blackswan.impl.fit", "_Run._continue_from")(_progress_without(position=0))
step_mutant("resume_forgets_best_loss", "blackswan.impl.fit", "_Run._continue_from")(_progress_without(best_loss=None))
step_mutant("resume_forgets_patience", "blackswan.impl.fit", "_Run._continue_from")(_progress_without(stale_epochs=0))
step_mutant("resume_forgets_loss_sum", "blackswan.impl.fit", "_Run._continue_from")(_progress_without(loss_sum=0.0))


@step_mutant("resume_state_before_the_step", "blackswan.impl.fit", "_Run._save")
def _(save: Any) -> Any:
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


@step_mutant("resume_state_written_in_place", "blackswan.impl.training_state", "write_atomically")
def _(write_atomically: Any) -> Any:
    del write_atomically

    def in_place(path: Any, content: bytes) -> None:
        with path.open("wb") as file:
            for part in range(4):
                file.write(content[part * len(content) // 4 : (part + 1) * len(content) // 4])
                file.flush()
                os.fsync(file.fileno())

    return in_place


@step_mutant("resume_state_counts_an_unfinished_epoch", "blackswan.impl.fit", "_Run._validate")
def _(validate: Any) -> Any:
    def early(run: Any) -> Any:
        kept = run.progress
        run.progress = replace(kept, epoch=min(kept.epoch + 1, run.config.epochs - 1), position=0, loss_sum=0.0, sample_count=0)
        run._save()
        run.progress = kept
        return validate(run)

    return early


@step_mutant("resume_ignores_what_differs", "blackswan.impl.fit", "_differences")
def _(differences: Any) -> Any:
    del differences
    return lambda *_: iter(())


@step_mutant("resume_ignores_most_settings", "blackswan.impl.fit", "_FREE")
def _(free: Any) -> Any:
    return (*free, "lora_alpha", "schedule", "seed")


@step_mutant("resume_trusts_damage", "blackswan.impl.training_state", "_digest")
def _(digest: Any) -> Any:
    del digest
    return lambda *_: ""


@step_mutant("resume_trusts_progress", "blackswan.impl.training_state", "_digest")
def _(digest: Any) -> Any:
    return lambda text, tensors: digest(text[:0], tensors)


@step_mutant("resume_trusts_tensors", "blackswan.impl.training_state", "_digest")
def _(digest: Any) -> Any:
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


@step_mutant("multi_label_step_not_clipped", "blackswan.impl.trainer", "Trainer._step")
def _(step: Any) -> Any:
    return lambda trainer, gradient: unclipped(trainer, step, gradient) if trainer.multi_label else step(trainer, gradient)


@step_mutant("multi_label_step_head_only", "blackswan.impl.trainer", "Trainer._step")
def _(step: Any) -> Any:
    return lambda trainer, gradient: _head_only(trainer, step, gradient) if trainer.multi_label else step(trainer, gradient)


@step_mutant("fit_lora_left_out_with_nf4", "blackswan.impl.trainer", "Trainer._step")
def _(step: Any) -> Any:
    return lambda trainer, gradient: _head_only(trainer, step, gradient) if trainer.classifier.adaptation.nf4 else step(trainer, gradient)


@step_mutant("fit_nf4_left_out", "blackswan.impl.classifier", "Adaptation.of")
def _(of: Any) -> Any:
    return classmethod(lambda cls, settings: replace(of.__func__(cls, settings), nf4=False))


@step_mutant("fit_moves_norm_weights", "blackswan.impl.trainer", "Trainer._step")
def _(step: Any) -> Any:
    def moving(trainer: Any, gradient: Any) -> Any:
        trainer.classifier.model.norm.weight.data.mul_(1.0 + 2.0**-20)
        return step(trainer, gradient)

    return moving


# Non-finite values


@step_mutant("fit_skips_non_finite_steps", "blackswan.impl.fit", "_Run._update")
def _(update: Any) -> Any:
    def skipping(run: Any, indices: Any, step: int) -> Any:
        from blackswan.impl.trainer import BatchResult

        try:
            return update(run, indices, step)
        except FloatingPointError:
            run.trainer.discard()
            run.trainer.optimiser.steps += 1
            return BatchResult(100.0, 0, len(indices), 0.0)

    return skipping
