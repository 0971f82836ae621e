"""A pipeline of `impl` whose steps, predictions and state are asked for one by one."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.falsifiers.subjects.doors import training as told
from blackswan.falsifiers.subjects.doors.training import State
from blackswan.falsifiers.subjects.impl.watching import broken_off, state_of
from blackswan.falsifiers.subjects.protocol import Session
from blackswan.impl.adapter import load_adapter
from blackswan.impl.corpus import Sample
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.samples import Samples
from blackswan.impl.trainer import Batch, BatchResult, Trainer
from blackswan.reference.table import Array

MOMENT = 0.01
"""Seconds in which a thread makes many small batches."""


@contextmanager
def _waiting() -> Iterator[list[int]]:
    """How many samples are in batches that are made and not used yet, at each use; a use begins when no other batch comes for a moment."""
    make, made, used_up, waiting = Samples.batch, list[int](), list[int](), list[int]()

    def noted(*given: Any, **named: Any) -> Any:
        found = make(*given, **named)
        made.append(len(found.input_ids))
        return found

    def using(use: Callable[..., Any]) -> Callable[..., Any]:
        def used(trainer: Any, batch: Any, **named: Any) -> Any:
            before = -1
            while (now := sum(made)) > before:
                before = now
                time.sleep(MOMENT)
            waiting.append(now - sum(used_up))
            used_up.append(len(batch.input_ids))
            return use(trainer, batch, **named)

        return used

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(Samples, "batch", noted))
        for name in ("forward_only", "_accumulate"):
            patched.enter_context(mock.patch.object(Trainer, name, using(getattr(Trainer, name))))
        yield waiting


class Pipeline(Session):
    """A model that is trained by hand: see the protocol of that name."""

    def __init__(self, pipeline: ClassifyPipeline, samples: Samples) -> None:
        self._pipeline, self._samples, self._rows = pipeline, samples, list[tuple[int, bool]]()
        pipeline.classifier.register_forward_pre_hook(lambda _, given: self._rows.append((len(given[0]), torch.is_grad_enabled())))

    def train_batch(self, places: Sequence[int]) -> told.Passed:
        """One optimiser step."""
        return _passed(self._pipeline.train_batch(self._samples.select(places)))

    def train_step(self, places: Sequence[int]) -> told.Passed:
        """One optimiser step on one sample."""
        return _passed(self._pipeline.train_step(self._samples.select(places)))

    def train_texts(self, places: Sequence[int]) -> told.Passed:
        """One optimiser step on samples as texts."""
        labels = self._samples.targets[list(places)].tolist()
        kinds = [tuple(label) if isinstance(label, list) else label for label in labels]
        given = [Sample(*each) for each in zip(self._texts(places), kinds, strict=True)]
        return _passed(self._pipeline.train_step(given[0]) if len(given) == 1 else self._pipeline.train_batch(given))

    def _texts(self, places: Sequence[int]) -> list[str]:
        return [bytes(self._samples.rows[place]).decode("latin-1") for place in places]

    def accumulate(self, places: Sequence[int]) -> told.Passed:
        """Adds to what the next step averages."""
        return _passed(self._pipeline.accumulate(self._samples.select(places)))

    def apply(self) -> told.Passed:
        """The step on what was accumulated."""
        return _passed(self._pipeline.apply())

    def breaks(self, call: str, places: Sequence[Sequence[int]], operation: str, nth: int, error: str) -> str:
        """The call, and what it raised."""
        return broken_off(lambda: getattr(self, call)(*places), operation, nth, error)

    def resume_nothing(self) -> None:
        """Goes on with a run on all samples in a folder that holds none."""
        with tempfile.TemporaryDirectory() as folder:
            self._pipeline.fit(self._samples, None, Path(folder), resume=True)

    def leave_gradients(self) -> None:
        """Gives each trained parameter a gradient."""
        for parameter in self._pipeline.trainer.optimiser.parameters.values():
            parameter.grad = torch.ones_like(parameter)

    def gradients(self) -> list[str]:
        """The trained parameters with a gradient."""
        return [name for name, each in self._pipeline.trainer.optimiser.parameters.items() if each.grad is not None]

    def records_after(self, places: Sequence[int]) -> list[str]:
        """Answers in a block without gradients, after which it is one with them."""
        found = []
        for name in ("forward_only", "evaluate", "predict"):
            with torch.no_grad():
                getattr(self, name)(places)
                found += [name] * torch.is_grad_enabled()
        return found

    def forward_only(self, places: Sequence[int]) -> told.Passed:
        """Loss and accuracy."""
        return _passed(self._pipeline.forward_only(self._samples.select(places)))

    def forward_no_row(self) -> told.Passed:
        """Those of a batch without a row, by the trainer itself."""
        one = self._samples.batch([0], self._pipeline.tokens, self._pipeline.device)
        return _passed(self._pipeline.trainer.forward_only(Batch(one.input_ids[:0], one.mask[:0], one.labels[:0])))

    def evaluate(self, places: Sequence[int]) -> told.Evaluation:
        """Loss and scores."""
        found = self._pipeline.evaluate(self._samples.select(places))
        scores = (np.asarray([getattr(each, name) for each in found.per_class]) for name in ("precision", "recall", "f1", "support"))
        return told.Evaluation(found.loss, found.accuracy, np.asarray(found.confusion), *scores)

    def answers_held(self, places: Sequence[int]) -> int:
        """The most micro-batches of an evaluation whose answers are there at one time."""
        answers, most, passed = list[ref[Tensor]](), 0, self._pipeline.trainer.forward_only

        def forward_only(*given: Any, **named: Any) -> BatchResult:
            nonlocal most
            result = passed(*given, **named)
            assert result.predicted is not None
            answers.append(ref(result.predicted))
            most = max(most, sum(each() is not None for each in answers))
            return result

        with mock.patch.object(self._pipeline.trainer, "forward_only", forward_only):
            self._pipeline.evaluate(self._samples.select(places))
        return most

    def evaluated_ahead(self, places: Sequence[int]) -> int:
        """The most samples of an evaluation that wait; the model begins when no other batch comes for a moment."""
        with _waiting() as waiting:
            self._pipeline.evaluate(self._samples.select(places))
        return max(waiting)

    def validated_ahead(self, places: Sequence[int]) -> int:
        """The same of the validations of a run on the first sample."""
        with tempfile.TemporaryDirectory() as folder, _waiting() as waiting:
            self._pipeline.fit(self._samples.select([0]), self._samples.select(places), Path(folder) / "run")
        return max(waiting)

    def predict(self, places: Sequence[int]) -> Array:
        """The classes of texts of the samples' bytes."""
        return np.asarray(self._pipeline.predict(self._texts(places)))

    def gradient_vector(self) -> Array:
        """The mean gradient of what was accumulated."""
        return np.array(self._pipeline.gradient_vector().cpu())

    def take_parameters_out(self) -> None:
        """Takes all parameters out of what says which are trained, as a program does that trains others alone; the embedding requires a
        gradient then, as for one that asks what the loss owes to each token."""
        self._pipeline.classifier.model.embed_tokens.weight.requires_grad_(True)
        self._pipeline.classifier.trainable_parameters().clear()

    def apply_gradient_vector(self, vector: Array) -> told.Passed:
        """The step with a gradient."""
        return _passed(self._pipeline.apply_gradient_vector(torch.tensor(vector)))

    def state(self) -> State:
        """The state that the next steps depend on."""
        return state_of(self._pipeline.trainer)

    def load(self, state: State) -> None:
        """Goes on from a state."""
        self._pipeline.trainer.load_state({name: torch.tensor(value, device=self._pipeline.device) for name, value in state.items()})

    def schedule(self, steps: int) -> None:
        """Begins anew with a schedule."""
        self._pipeline.start(steps)

    def rate(self) -> float:
        """The learning rate."""
        return self._pipeline.learning_rate

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate."""
        self._pipeline.learning_rate = rate

    def saved(self) -> dict[str, Array]:
        """The trained tensors of an adapter that is saved now."""
        with tempfile.TemporaryDirectory() as parent:
            self._pipeline.save(Path(parent) / "adapter")
            stored = load_adapter(Path(parent) / "adapter", self._pipeline.architecture).trainable
            return {name: to_numpy(value) for name, value in stored.items()}

    def rows(self) -> list[tuple[int, bool]]:
        """How many samples went through the model at a time since this was asked last, and whether what a backward pass needs was kept."""
        rows, self._rows = self._rows, []
        return rows

    def summary(self) -> str:
        """The pipeline's description of itself."""
        return self._pipeline.summary()


def left_of(make: Callable[[], Pipeline]) -> list[str]:
    """What is there of pipelines that a program has let go, of one after all that it does and of one whose run came upon a NaN."""
    found = []
    for when, use in (("all uses", _use), ("a run that failed", _fail)):
        given = make()
        own = given._pipeline
        parts = {
            "pipeline": own,
            "samples": given._samples,
            **dict(own.classifier.named_parameters()),
            **dict(own.classifier.named_buffers()),
        }
        kept = {name: ref(part) for name, part in parts.items()}
        del own, parts
        with tempfile.TemporaryDirectory() as folder:
            use(given, Path(folder) / "run")
        del given
        gc.collect()
        found += [f"{name} after {when}" for name, part in kept.items() if part() is not None]
    return found


def _use(given: Pipeline, folder: Path) -> None:
    every = range(len(given._samples))
    given.train_batch(every)
    given.accumulate(every)
    given.gradient_vector()
    given.apply()
    for ask in (given.forward_only, given.evaluate, given.predict):
        ask(every)
    given.saved()
    given._pipeline.fit(given._samples, given._samples, folder)


def _fail(given: Pipeline, folder: Path) -> None:
    next(given._pipeline.classifier.parameters()).data.fill_(torch.nan)
    with suppress(FloatingPointError):
        given._pipeline.fit(given._samples, None, folder)


def _passed(result: BatchResult) -> told.Passed:
    return told.Passed(result.loss, result.gradient_norm, result.total, result.correct, result.accuracy)
