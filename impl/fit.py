"""A whole training run: epochs, validation, best checkpoint, early stop; and its continuation after a kill at any moment.

The output folder holds

    run.json   what the run is: settings, steps, digests of model and data; a continuation must agree with it
    state/     where it stands (impl.training_state)
    last/      the adapter after the last finished epoch
    best/      the adapter after the epoch with the lowest validation loss

Order and split of samples are functions of the seed and the epoch, nothing else is random: a continued run makes the same steps, bit for
bit, as one that was never interrupted. Whatever an epoch shows is written before the state that says it is done.
"""

import dataclasses
import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from blackswan.impl import strict_json
from blackswan.impl.agreement import fingerprint, require_equal, require_same, together
from blackswan.impl.classifier import Classifier
from blackswan.impl.config import ClassifyConfig, DecoderConfig, require_count, target_modules, targets_named
from blackswan.impl.evaluation import Evaluation, evaluate
from blackswan.impl.folder import PARTIAL, remove_left_over, sole_writer
from blackswan.impl.group import Group, shard
from blackswan.impl.nonfinite import origin
from blackswan.impl.optimiser import require_a_rate
from blackswan.impl.samples import Indices, Samples, balanced_weights, effective_batches, epoch_order
from blackswan.impl.tokens import Tokens
from blackswan.impl.trainer import Batch, BatchResult, Trainer
from blackswan.impl.training_state import Progress, load_state, save_state, write_atomically

RUN, STATE, BEST, LAST = "run.json", "state", "best", "last"
MOST_STEPS = 10_000_000
_FREE = ("log_interval",)
"""Settings that a continuation may change."""


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step, counted from 1: mean loss and accuracy over its samples, the gradient's norm before clipping, rate, time."""

    step: int
    epoch: int
    loss: float
    accuracy: float
    gradient_norm: float
    learning_rate: float
    samples: int
    seconds: float


@dataclass(frozen=True)
class EpochRecord:
    """One epoch, counted from 1: mean losses over samples, those of validation None without it; `best` where it is the lowest so far."""

    epoch: int
    train_loss: float
    validation_loss: float | None
    validation_accuracy: float | None
    best: bool
    seconds: float


@dataclass(frozen=True)
class FitResult:
    """Optimiser steps and epochs of the whole run, the parts before an interruption among them."""

    steps: int
    epochs: tuple[EpochRecord, ...]
    best_epoch: int | None
    best_validation_loss: float | None
    stopped_early: bool


OnStep = Callable[[StepRecord], None]
OnEpoch = Callable[[EpochRecord], None]


class Fittable(Protocol):
    """What a run trains: a model with its tokens and settings."""

    architecture: DecoderConfig
    class_weights: tuple[float, ...] | None
    classifier: Classifier
    config: ClassifyConfig
    device: torch.device
    group: Group
    source: Path | None
    tokens: Tokens

    def start(self, total_steps: int | None, class_weights: Sequence[float] | None = None) -> Trainer:
        """A trainer at the settings' first rate."""

    def save(self, folder: Path) -> None:
        """Writes the adapter and what is needed to load it."""


def fit(
    pipeline: Fittable,
    train: Samples,
    validation: Samples | None,
    output: Path,
    *,
    resume: bool = False,
    save_every: int | None = None,
    on_step: OnStep | None = None,
    on_epoch: OnEpoch | None = None,
) -> FitResult:
    """Trains with the pipeline's settings; the pipeline holds the weights of the last step afterwards.

    The state is written at the start, after every epoch and, where `save_every` is given, after that many steps; `resume` continues from
    it. Callbacks are called before the state is written that counts what they were told. The first SIGINT ends the run after the current
    step, with the state written; the second one at once.

    No validation samples are as good as None: epochs have no validation loss then. In a group every worker calls this with the same
    arguments, rank 0 writes and all read.

    Raises an InUseError where another process writes `output`, a FileExistsError where it holds a run and `resume` is not given, and a
    FileNotFoundError where it holds none, or has lost its state, and `resume` is given. Raises a ValueError for samples that do not fit the
    settings, for a run whose every rate is 0, for another model, data or settings than those of the run to continue, naming what differs,
    for workers that were given or that hold different ones, and for a damaged state. Raises a FloatingPointError that names the origin of a
    NaN or infinity, with nothing changed by that step, and KeyboardInterrupt, from which the run can be continued.
    """
    output = output.absolute()  # a callback may leave the folder that its name begins in
    with together(pipeline.group):  # what one worker was given may be refused
        run = _Run(pipeline, train, validation if validation is not None and len(validation) else None, output)
        if save_every is not None:
            require_count("save_every", save_every)
    run.save_every, run.on_step, run.on_epoch = save_every, on_step, on_epoch
    with ExitStack() as stack:
        with together(pipeline.group):
            if pipeline.group.rank == 0:
                stack.enter_context(sole_writer(output))
        run.open(resume)
        run.interrupted = stack.enter_context(_interruptible(pipeline.group.size))
        return run.train()


def total_steps(config: ClassifyConfig, samples: int) -> int:
    """Optimiser steps of a run on that many training samples; an epoch's last step may take fewer of them.

    Raises a ValueError for more than MOST_STEPS: the rate of every step is kept.
    """
    steps = config.epochs * math.ceil(samples / (config.batch_size * config.accumulation_steps))
    if steps > MOST_STEPS:
        raise ValueError(
            f"epochs is {config.epochs}, which makes {steps:,} steps of {samples:,} samples; at most {MOST_STEPS:,} can be made"
        )
    return steps


class _Run:
    """A run between its first and its last step."""

    save_every: int | None = None
    on_step: OnStep | None = None
    on_epoch: OnEpoch | None = None
    interrupted: Callable[[], bool]

    def __init__(self, pipeline: Fittable, train: Samples, validation: Samples | None, output: Path) -> None:
        self.pipeline, self.train_samples, self.validation, self.output = pipeline, train, validation, output
        self.config, self.group = pipeline.config, pipeline.group
        self._require_fitting_samples()
        kind = self.config.class_weights
        self._balanced = balanced_weights(train, kind) if isinstance(kind, str) else None
        self.trainer = pipeline.start(total_steps(self.config, len(train)), self._balanced)
        require_a_rate(self.trainer.learning_rates)
        self.identity = self._identity()
        self.progress = Progress(run=_key(self.identity))

    def open(self, resume: bool) -> None:
        """Starts in an empty place, or goes on from where the run stands."""
        require_same(self.group, "model, corpus or settings", self.progress.run)
        with together(self.group):
            if self.group.rank == 0:
                self._begin_or_compare(resume)
        with together(self.group):  # every rank reads, after rank 0 has compared
            found = load_state(self.output / STATE) if resume else None
            if found is not None:
                self._continue_from(*found)
            elif resume and (self.output / LAST).exists():
                raise FileNotFoundError(
                    f"{self.output / STATE}: no state of a run that has finished an epoch; restore it from a copy, or choose another folder"
                )
        require_same(self.group, f"progress in {self.output / STATE}", json.dumps(dataclasses.asdict(self.progress)))
        require_equal(self.group, self.trainer.state())
        with together(self.group):
            if self.group.rank == 0 and (self.output / STATE).is_dir():
                remove_left_over(self.output / STATE, PARTIAL)
        if self._balanced is not None:  # a run that was refused before has left those of an earlier one
            self.pipeline.class_weights = self._balanced

    def train(self) -> FitResult:
        """Epoch by epoch to the end."""
        if self.progress.step == 0:
            self._save()
        while not self.progress.finished:
            if self.interrupted():
                raise KeyboardInterrupt
            self._epoch()
        records = tuple(EpochRecord(**record) for record in self.progress.records)
        stopped = len(records) < self.config.epochs
        return FitResult(self.progress.step, records, self.progress.best_epoch, self.progress.best_loss, stopped)

    def _require_fitting_samples(self) -> None:
        for name, samples in (("training", self.train_samples), ("validation", self.validation)):
            if samples is None:
                continue
            if not len(samples):
                raise ValueError("the training corpus is empty: there is nothing to train on")
            samples.require_read_with(self.config, f"{name} ")
            most = 1 if samples.multi_label else samples.num_classes - 1
            wrong = (samples.targets < 0) | (samples.targets > most)
            if wrong.any():
                at = tuple(int(place[0]) for place in wrong.nonzero())
                raise ValueError(f"the {name} sample {at[0] + 1} has the label {samples.targets[at]}; expected 0 to {most}")
        if self.config.early_stop_patience is not None and self.validation is None:
            raise ValueError("early_stop_patience waits for a better validation loss, and there are no validation samples")

    def _identity(self) -> dict[str, Any]:
        """What makes the run this one and no other."""
        corpora = {"training": self.train_samples, "validation": self.validation}
        settings = {name: value for name, value in dataclasses.asdict(self.config).items() if name not in _FREE}
        return {
            "settings": settings | {"lora_targets": targets_named(target_modules(self.config.lora_targets))},  # in whatever order
            "architecture": dataclasses.asdict(self.pipeline.architecture),
            "base_weights": _weights_digest(self.pipeline.classifier),
            "data": {name: {"samples": len(each), "digest": each.digest()} for name, each in corpora.items() if each is not None},
        }

    def _begin_or_compare(self, resume: bool) -> None:
        path = self.output / RUN
        if not resume:
            if path.exists() or (self.output / STATE).exists():
                raise FileExistsError(f"{self.output} holds a run already: continue it with --resume, or choose another folder")
            self.output.mkdir(parents=True, exist_ok=True)
            source = None if self.pipeline.source is None else str(self.pipeline.source)
            about = {"source_model": source, "tokens": self.pipeline.tokens.description, "total_steps": len(self.trainer.learning_rates)}
            write_atomically(path, (json.dumps(about | self.identity, indent=2) + "\n").encode())
            return
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, so there is no run to continue; start it without --resume")
        try:
            stored = strict_json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None
        own = json.loads(json.dumps(self.identity))
        differences = list(_differences(own, {name: stored[name] for name in own if name in stored} if isinstance(stored, dict) else {}))
        if differences:
            raise ValueError(f"{path}: not the run to continue: {'; '.join(differences)}")

    def _continue_from(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        stored = strict_json.loads((self.output / RUN).read_bytes())  # equal to this run's, where it may have 4.0 for a 4
        if progress.run != _key({name: stored[name] for name in self.identity}):
            raise ValueError(f"{self.output / STATE}: the state of another run than that of {RUN}; which one is meant?")
        self.trainer.load_state(tensors)
        self.progress = progress

    def _epoch(self) -> None:
        progress = self.progress
        order = epoch_order(len(self.train_samples), self.config.seed, progress.epoch)
        batches = effective_batches(order, self.config.batch_size * self.config.accumulation_steps)
        for indices in islice(batches, progress.position, None):
            self._step(indices)
            if self.interrupted():
                self._save()
                raise KeyboardInterrupt
            if self.save_every is not None and self.progress.step % self.save_every == 0:
                self._save()
        self._finish_epoch()

    def _step(self, indices: Indices) -> None:
        start, rate, step = time.perf_counter(), self.trainer.learning_rate, self.progress.step + 1
        result = self._update(indices, step)
        seconds = time.perf_counter() - start
        progress = self.progress
        self.progress = replace(
            progress,
            step=step,
            position=progress.position + 1,
            loss_sum=progress.loss_sum + result.loss * result.total,
            sample_count=progress.sample_count + result.total,
            epoch_seconds=progress.epoch_seconds + seconds,
        )
        if self.on_step is not None:
            assert result.gradient_norm is not None
            epoch, total = progress.epoch + 1, result.total
            self.on_step(StepRecord(step, epoch, result.loss, result.accuracy, result.gradient_norm, rate, total, seconds))

    def _update(self, indices: Indices, step: int) -> BatchResult:
        """Zero, accumulate this worker's share, then average, clip and step together; in one piece where there is nothing to gather."""
        own, size = shard(indices, self.group.rank, self.group.size), self.config.batch_size
        parts = effective_batches(own, size)
        with together(self.group):
            batches = [self.train_samples.batch(part, self.pipeline.tokens, self.pipeline.device) for part in parts]
        self.trainer.discard()
        if self.group.size == 1 and len(batches) == 1:
            with self._explained(f"step {step}", batches):
                return self.trainer.train_batch(batches[0])
        with together(self.group):
            for batch in batches:
                with self._explained(f"step {step}", [batch]):
                    self.trainer.accumulate(batch)
        with self._explained(f"step {step}", batches):
            return self.trainer.apply()

    @contextmanager
    def _explained(self, when: str, batches: Iterable[Batch]) -> Iterator[None]:
        """Says where a value that is not finite came from."""
        try:
            yield
        except FloatingPointError as error:
            found = (origin(self.pipeline.classifier, batch, self.trainer.class_weights) for batch in batches)
            where = next((text for text in found if text is not None), "every value of the model's own passes is finite")
            raise FloatingPointError(f"{when}: {error}; origin: {where}") from error

    def _finish_epoch(self) -> None:
        start, progress = time.perf_counter(), self.progress
        found = self._validate()
        best = found is not None and (progress.best_loss is None or found.loss < progress.best_loss)
        self._export(LAST)
        if best:
            self._export(BEST)
        record = EpochRecord(
            epoch=progress.epoch + 1,
            train_loss=progress.loss_sum / progress.sample_count,
            validation_loss=None if found is None else found.loss,
            validation_accuracy=None if found is None else found.accuracy,
            best=best,
            seconds=progress.epoch_seconds + time.perf_counter() - start,
        )
        if self.on_epoch is not None:
            self.on_epoch(record)
        self.progress = self._after(record)
        self._save()

    def _after(self, record: EpochRecord) -> Progress:
        """The progress at the start of the next epoch, or at the end."""
        stale = 0 if record.best or record.validation_loss is None else self.progress.stale_epochs + 1
        progress = replace(
            self.progress,
            epoch=record.epoch,
            position=0,
            loss_sum=0.0,
            sample_count=0,
            epoch_seconds=0.0,
            stale_epochs=stale,
            finished=record.epoch == self.config.epochs or stale == self.config.early_stop_patience,
            records=(*self.progress.records, dataclasses.asdict(record)),
        )
        return replace(progress, best_loss=record.validation_loss, best_epoch=record.epoch) if record.best else progress

    def _validate(self) -> Evaluation | None:
        samples = self.validation
        if samples is None:
            return None
        parts = effective_batches(range(len(samples)), self.config.batch_size)
        batches = (samples.batch(part, self.pipeline.tokens, self.pipeline.device) for part in parts)
        with self._explained(f"validation after epoch {self.progress.epoch + 1}", batches):
            return evaluate(self.trainer, samples, self.pipeline.tokens, self.pipeline.device)

    def _export(self, name: str) -> None:
        with together(self.group):
            if self.group.rank == 0:
                self.pipeline.save(self.output / name)

    def _save(self) -> None:
        with together(self.group):
            if self.group.rank == 0:
                save_state(self.output / STATE, self.progress, self.trainer.state())


@contextmanager
def _interruptible(workers: int) -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT into an answer of yes, so that no step is torn; the second one is raised as usual.

    Among several workers nothing is turned: they would stop after different steps. Nor outside the main thread, which gets no signals.
    """
    usual = signal.getsignal(signal.SIGINT)
    if workers > 1 or threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield lambda: False
        return
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        seen.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, usual)


def _key(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _weights_digest(classifier: torch.nn.Module) -> str:
    """Of every frozen parameter and buffer, as it is in memory."""
    frozen = {name: value for name, value in classifier.named_parameters() if not value.requires_grad}
    every = {**frozen, **dict(classifier.named_buffers())}
    text = "\n".join(f"{name} {value.dtype} {list(value.shape)} {int(fingerprint(value))}" for name, value in sorted(every.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _differences(own: Any, stored: Any, name: str = "") -> Iterator[str]:
    """What is not as in the file, by its name there."""
    if isinstance(own, dict) and isinstance(stored, dict):
        for key in sorted(own.keys() | stored.keys()):
            where = f"{name}.{key}" if name else key
            if key in own and key in stored:
                yield from _differences(own[key], stored[key], where)
            else:
                yield f"{where} is in {'this run, and not in the file' if key in own else 'the file, and not in this run'}"
    elif own != stored:
        yield f"{name} was {stored!r} and is {own!r}"
