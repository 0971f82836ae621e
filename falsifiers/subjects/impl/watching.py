"""Notes what a run of `impl` says and does while it goes on; the notes of a killed process reach up to the kill."""

import builtins
import contextlib
import itertools
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.subjects.doors.training import Epoch, Plan, Read, State, Step
from blackswan.falsifiers.subjects.impl.kill_points import Event
from blackswan.falsifiers.subjects.patching import standing_in
from blackswan.impl import dispatch, warm_up
from blackswan.impl.corpus import Sample
from blackswan.impl.fit import EpochRecord, StepRecord
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.trainer import Trainer
from blackswan.reference.table import Array

GRADIENT = "gradient of "
ERRORS = vars(builtins) | {"OutOfMemoryError": torch.OutOfMemoryError}
"""Errors by the names of their classes."""
Note = Read | Step | Epoch
SLOW = 1000.0
"""Seconds by which the clock goes ahead."""


class Stopped(BaseException):
    """Breaks a run off, as a plan asks."""


class Watch:
    """Notes samples, steps and epochs of a run, in a file where there is one, and does to the run what its plan says."""

    def __init__(self, pipeline: ClassifyPipeline, plan: Plan, event: Event, journal: Path | None) -> None:
        self.pipeline, self.plan, self.event, self.journal = pipeline, plan, event, journal
        self.notes: list[Note] = []
        self.state: State = {}
        self.steps = 0
        self.ahead = 0.0
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Inside the block the clocks go ahead whenever samples are read: however fast the host is, that takes the most time."""

        def ahead(real: Callable[[], float]) -> float:
            return real() + self.ahead

        clocks: dict[str, Any] = {name: partial(ahead, getattr(time, name)) for name in ("perf_counter", "monotonic")}
        with mock.patch.multiple(time, **clocks):
            yield

    def note(self, note: Note) -> None:
        """Keeps a note."""
        self.notes.append(note)
        if self.journal is not None:
            with self.journal.open("ab") as file:
                pickle.dump(note, file)

    def read(self, samples: list[Read]) -> None:
        """A pass begins."""
        for sample in samples:
            self.note(sample)
        self.ahead += SLOW
        if any(sample.trained for sample in samples):
            self.event("read")

    def step(self, record: StepRecord) -> None:
        """A step was made."""
        self.state = state_of(self.pipeline.trainer)
        numbers = (record.step, record.epoch, record.loss, record.gradient_norm, record.learning_rate, record.samples)
        self.note(Step(*numbers, self.state))
        if self.plan.next_rate is not None:
            with contextlib.suppress(IndexError):  # after the last step there is no next one
                self.pipeline.learning_rate *= self.plan.next_rate
        if self.plan.looking:
            config = self.pipeline.config
            with contextlib.suppress(IndexError):
                self.pipeline.accumulate([Sample("a text", (0,) * config.num_classes if config.multi_label else 0)])
        self.event("step")
        if record.step == self.plan.poison_after:
            self.pipeline.classifier.score.bias.data[0] = float("nan")
        self.steps += 1
        self._interrupt(self.steps == 1 and not self.plan.late)
        if record.step == self.plan.stop_after:
            raise Stopped

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is over."""
        self.state, began, self.began = state_of(self.pipeline.trainer), self.began, time.perf_counter()
        timed = (record.seconds, self.began - began)
        self.note(Epoch(record.epoch, record.train_loss, record.validation_loss, record.best, self.state, *timed))
        self.event("epoch")
        self._interrupt(record.epoch == 1 and self.plan.late)

    def _interrupt(self, due: bool) -> None:
        for _ in range(self.plan.interrupts if due else 0):
            signal.raise_signal(signal.SIGINT)


def read_notes(journal: Path) -> Iterator[Note]:
    """The notes in a file. A kill comes between two notes."""
    if journal.exists():
        with journal.open("rb") as file, contextlib.suppress(EOFError):
            while True:
                yield pickle.load(file)  # noqa: S301  # written by this program


@contextlib.contextmanager
def reading(tell: Callable[[list[Read]], None]) -> Iterator[None]:
    """Inside the block every batch that a trainer is given is told, before anything is computed on it."""
    inside = False

    def around(method: Any, trained: bool) -> Any:
        def told(trainer: Trainer, batch: Any, *given: Any, **named: Any) -> Any:
            nonlocal inside
            if inside or batch.input_ids.is_meta:  # one backend's method calls the other's; an estimate of memory has no samples
                return method(trainer, batch, *given, **named)
            rows = [tuple(ids[real].tolist()) for ids, real in zip(batch.input_ids, batch.mask, strict=True)]
            labels = [tuple(map(int, label)) if isinstance(label, list) else label for label in batch.labels.tolist()]
            tell([Read(trainer.optimiser.steps + 1, trained, sample) for sample in zip(rows, labels, strict=True)])
            inside = True
            try:
                return method(trainer, batch, *given, **named)
            finally:
                inside = False

        return told

    def unnoticed(device: torch.device, rehearse: Callable[[], object], load: Callable[[], Any]) -> Any:
        def quietly() -> None:  # the small model of a warm-up reads no sample
            nonlocal inside
            inside = True
            try:
                rehearse()
            finally:
                inside = False

        return warmed(device, quietly, load)

    warmed = warm_up.warmed
    calls = {"train_batch": True, "accumulate": True, "forward_only": False}
    kept = [(owner, name, vars(owner)[name]) for owner in (Trainer, FusedTrainer) for name in calls if name in vars(owner)]
    for owner, name, method in kept:
        setattr(owner, name, around(method, calls[name]))
    try:
        with standing_in(warmed, unnoticed):
            yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


def state_of(trainer: Trainer) -> State:
    """The state that the trainer's next steps depend on."""
    return on_host(trainer.state())


def on_host(tensors: Any) -> dict[str, Array]:
    """Copies of tensors, bfloat16 as float32: NumPy has no bfloat16, whose values are all float32's."""
    wide = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in tensors.items()}
    return {name: value.detach().cpu().clone().numpy() for name, value in wide.items()}


@contextlib.contextmanager
def failing(operation: str, nth: int, error: type[BaseException]) -> Iterator[None]:
    """Inside the block an operation fails at its nth call (from 0), or as `gradient of OPERATION` the backward pass through that call."""
    name, calls = operation.removeprefix(GRADIENT), itertools.count()

    def fail(*_: object) -> None:
        raise error("broken off")

    def broken(**arguments: Any) -> Any:
        number = next(calls)
        if number == nth and name == operation:
            fail()
        result = OPERATIONS[name](**arguments)
        if number == nth:
            result.register_hook(fail)
        return result

    with dispatch.replaced({name: broken}):
        yield


def broken_off(call: Callable[[], object], operation: str, nth: int, error: str) -> str:
    """The name of the error that a call raises in which an operation fails, as `failing` says; "" where it ends well."""
    with failing(operation, nth, ERRORS[error]):
        try:
            call()
        except BaseException as raised:  # also the one that Ctrl-C makes
            return type(raised).__name__
    return ""
