"""Wrong records of the command `train`: what it counts, writes and shows, and what a continuation makes of the lines that are there."""

import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from blackswan.falsifiers.mutants.registry import wrong_step
from blackswan.impl.commands import BadInput


@wrong_step("impl.metrics:MetricsFile.step")
def metrics_count_samples_by_batch_size(step: Any, file: Any, record: Any) -> None:
    """Every step has the samples of a full one."""
    file.__dict__["_most"] = max(record.samples, file.__dict__.get("_most", 0))
    step(file, replace(record, samples=file.__dict__["_most"]))


@wrong_step("impl.metrics:MetricsFile.epoch")
def metrics_call_every_epoch_the_best(epoch: Any, file: Any, record: Any) -> None:
    """Every epoch is the best so far."""
    epoch(file, replace(record, best=record.validation_loss is not None))


wrong_step("impl.fit:StepRecord", name="steps_say_accuracy_for_loss", doc="A step's record has its accuracy for its loss.")(
    lambda record, *given: record(*given[:2], given[3], *given[3:])
)


@wrong_step("impl.fit:_Run._step")
def epoch_loss_of_means(step: Any, run: Any, indices: Any) -> None:
    """The training loss of an epoch is the mean over its steps, not over its samples."""
    before = run.progress
    step(run, indices)
    loss = (run.progress.loss_sum - before.loss_sum) / (run.progress.sample_count - before.sample_count)
    run.progress = replace(run.progress, loss_sum=before.loss_sum + loss, sample_count=before.sample_count + 1)


wrong_step(
    "impl.commands.train:_conclusion", name="conclusion_of_the_last_loss", doc="The best loss that is told is that of the last epoch."
)(lambda conclusion, output, result: conclusion(output, replace(result, best_validation_loss=result.epochs[-1].validation_loss)))


@wrong_step("impl.commands.train:_samples")
def patience_by_the_fraction_alone(samples: Any, options: Any, config: Any, group: Any) -> Any:
    """Patience needs a validation_fraction above 0, also where there is a validation corpus."""
    if config.early_stop_patience is not None and not config.validation_fraction:
        raise BadInput("early_stop_patience needs a validation_fraction above 0")
    return samples(options, config, group)


@wrong_step("impl.__main__:_run")
def summary_of_the_base_that_is_named(run: Any, command: Any, options: Any, name: str) -> int:
    """`summary` of an adapter on a base that is named is that of the base, with the usual settings."""
    if options.command == "summary" and options.model:
        options.adapter = None
    return int(run(command, options, name))


@wrong_step("impl.commands.train:_write_for_rules")
def statistics_after_truncation_written(write: Any, output: Any, config: Any, parameters: int, train: Any) -> None:
    """statistics.yaml has the lengths that the model reads."""
    write(output, config, parameters, replace(train, text_lengths=None))


@wrong_step("impl.commands.train:_write_for_rules")
def statistics_say_infinity_otherwise(write: Any, output: Any, *given: Any) -> None:
    """Infinity in statistics.yaml is a word to a reader of YAML, and no number."""
    write(output, *given)
    file = output / "statistics.yaml"
    file.write_text(file.read_text().replace(".inf", "inf"))


@wrong_step("impl.commands.train:_write_for_rules")
def statistics_say_two_digits(write: Any, output: Any, *given: Any) -> None:
    """The ratio of classes in statistics.yaml is rounded, as if it were for people: a rule takes one that it would refuse."""
    write(output, *given)
    file = output / "statistics.yaml"
    file.write_text(re.sub(r"(imbalance_ratio: \d+\.\d\d)\d*", r"\1", file.read_text()))


@wrong_step("impl.apr_write:export_apr")
def export_folder_named_apr(_: Any, checkpoint: Any, source: Any, path: Any, *_dtype: Any) -> None:
    """A folder takes the name of the .apr file that was asked for."""
    from blackswan.impl.checkpoint import TOKENIZER, belonging, save_checkpoint

    save_checkpoint(path, checkpoint.config, checkpoint.tensors, belonging(source, TOKENIZER))


@wrong_step("impl.progress:Progress.step")
def progress_one_step_late(step: Any, progress: Any, record: Any) -> None:
    """Every log_interval-th step but one is shown."""
    step(progress, replace(record, step=record.step + 1 if record.step < progress.total_steps else record.step))


def _by_sums(forgotten: Callable[[list[Any]], Any]) -> Callable[..., None]:
    """Samples and seconds of the last steps are kept as two sums, of which `forgotten` leaves one step out where there are twenty."""

    def step(shown: Any, progress: Any, record: Any) -> None:
        recent, sums = vars(progress).setdefault("_last", []), vars(progress).setdefault("_sums", np.zeros(2))
        recent.append((record.samples, record.seconds))
        sums += recent[-1]
        if len(recent) > 20:
            sums -= forgotten(recent)
            del recent[0]
        before = [tuple(sums - recent[-1]), *[(0, 0.0)] * (len(recent) - 2)][: len(recent) - 1]
        with mock.patch.object(progress, "_recent", deque(before)):
            shown(progress, record)

    return step


wrong_step(
    "impl.progress:Progress.step",
    name="progress_forgets_no_step",
    doc="The sums by which the speed is told keep the steps that have left their window.",
)(_by_sums(lambda _: (0, 0.0)))
wrong_step(
    "impl.progress:Progress.step",
    name="progress_forgets_the_next_step",
    doc="The sums by which the speed is told lose a step more than the window.",
)(_by_sums(lambda recent: np.add(recent[0], recent[1]) if len(recent) == 21 else recent[0]))


# Kills


@wrong_step("impl.metrics:_before")
def metrics_repeat_a_step(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The line of the step that a continuation makes again stays, and a second one follows."""
    return bool(before(line, epoch, None if step is None else step + 1, where))


@wrong_step("impl.metrics:_before")
def metrics_repeat_an_epoch(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The line of the epoch that a continuation ends again stays, and a second one follows."""
    return bool(before(line, epoch, step, where) or before(line, epoch + 1, 0, where))


@wrong_step("impl.metrics:_before")
def metrics_keep_the_epoch_of_steps(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The line of an epoch stays, though a continuation begins with a step inside it."""
    return bool(before(line, epoch, step, where) or (step is not None and before(line, epoch + 1, 0, where)))


@wrong_step("impl.metrics:MetricsFile._append")
def metrics_opened_before_they_are_cut(_: Any, self: Any, epoch: int, step: int | None, values: dict[str, Any]) -> None:
    """The file stays open, and is opened before another one takes its place that lacks the lines which are made again."""
    from blackswan.impl import metrics

    if not hasattr(self, "kept"):
        self.kept = self.path.open("a", encoding="utf-8", buffering=1)
        metrics.cut_back(self.path, epoch, step)
    self.kept.write(json.dumps(values) + "\n")


wrong_step("impl.metrics:write_atomically", name="metrics_cut_in_place", doc="Metrics are emptied to be cut, and then written again.")(
    lambda _, path, content: path.write_bytes(content)
)


@wrong_step("impl.metrics:cut_back")
def metrics_of_text_alone(cut: Any, path: Path, *given: Any) -> None:
    """Bytes behind the last line of the metrics that are no text end each run that goes on."""
    if path.exists():
        path.read_text(encoding="utf-8")
    cut(path, *given)


wrong_step("impl.metrics:cut_back", name="metrics_never_cut_back", doc="A continuation appends to all lines, torn ones too.")(
    lambda *_: None
)


@wrong_step("impl.metrics:cut_back")
def metrics_cut_back_near_their_end(cut_back: Any, path: Path, *given: Any) -> None:
    """A continuation looks at the last thousand lines of the metrics only, so that steps made again are in a long file twice."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if len(lines) > 1000:
        path.write_bytes(b"".join(lines[-1000:]))
    cut_back(path, *given)
    if len(lines) > 1000:
        path.write_bytes(b"".join(lines[:-1000]) + path.read_bytes())


@wrong_step("impl.metrics:cut_back")
def metrics_end_at_the_first_later_line(cut_back: Any, path: Path, epoch: int, step: int | None) -> None:
    """What stands behind the first step that is made again is dropped, whatever it is."""
    if step is not None and path.exists():
        before = path.read_bytes().partition(f'"step": {step},'.encode())[0]
        path.write_bytes(before[: before.rfind(b"\n") + 1])
    cut_back(path, epoch, step)


@wrong_step("impl.metrics:_before")
def metrics_lose_a_step(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The line before that of the step that a continuation begins with is lost."""
    return bool(before(line, epoch, None if step is None else step - 1, where))


@wrong_step("impl.metrics:_before")
def metrics_lose_an_epochs_steps(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The lines of an epoch's steps are lost where a continuation begins with the epoch's own."""
    return bool(before(line, epoch - (step is None and '"kind": "step"' in line), step, where))


wrong_step("impl.pipeline:fit", name="state_every_other_time", doc="The state is written half as often as was asked for.")(
    lambda fit, *given, save_every=None, **named: fit(*given, save_every=None if save_every is None else 2 * save_every, **named)
)
