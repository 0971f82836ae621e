"""The recorded calls of training: micro-batches on tapes of their own, between them the loop's averages, clipping and steps."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.diagnosis.local import Local, Suspicion
from blackswan.falsifiers.diagnosis.trace_check import Derived, Section, Trace, same
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.falsifiers.numeric.precision import STORAGE
from blackswan.reference.classifier import frozen_names, trainable_names
from blackswan.reference.table import Array, Arrays
from blackswan.reference.tape import Call
from blackswan.reference.training import flatten, from_rows, split, to_rows

STATE = {"trainable": "parameter", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
PUBLISHED_BY = {
    "losses": ("average_gradients", "steps.{}.loss"),
    "norms": ("clip_by_global_norm", "steps.{}.clip"),
    **dict.fromkeys(STATE, ("adamw_step", "steps.{}.adamw")),
}
"""The operation whose results an output of training is, and its path in the last step."""


class Training:
    """The sections of `train_steps`, each fed what the subject's own calls before it gave."""

    def __init__(self, case: Case, trace: Trace, local: Local) -> None:
        self.case, self.trace, self.local = case, trace, local
        self.names = trainable_names(case.scalars)
        self.shapes = [case.inputs[f"parameters/{name}"].shape for name in self.names]
        self.size = sum(map(math.prod, self.shapes))
        self.tape = reference.record(case.operation, case.inputs, case.scalars)
        self._micro: dict[int, list[Section]] = {}

    def forward(self) -> Iterator[Suspicion]:
        """The wrong calls, in the order of the computation; a step's micro-batches come first, forward and backward."""
        given = self.trace.at("steps.0.adamw")
        if given is not None and (size := given.inputs["parameter"].size) != self.size:
            yield Suspicion("adamw_step", given.path, f"is called with {size} elements; the trainable parameters have {self.size}")
        loop = {step: self._loop(step) for step in range(-1, self.case.scalars["steps"])}
        yield from loop.pop(-1).forward()
        for step, section in loop.items():
            yield from self._moved(step)
            for micro in self.micro_batches(step):
                yield from micro.forward()
                yield from micro.backward({"loss": np.ones(())}, self.names)
            yield from section.forward()

    def _moved(self, step: int) -> Iterator[Suspicion]:
        """The parameters that a step's first micro-batch reads and the step before did not give."""
        first = next(iter(self.micro_batches(step)), None)
        if step == 0 or first is None:
            return
        for call in first.calls:
            for name, value in call.inputs.items():
                traced = first.traced(call)
                if value in self.names and traced is not None and name in traced.inputs:
                    given = first.value(value)
                    if given is not None and not same(given, traced.inputs[name]):
                        yield Suspicion("adamw_step", f"steps.{step - 1}.adamw", f"{value} is not what the step gave afterwards")

    def answers(self, actual: Arrays, floors: Mapping[str, Errors]) -> Iterator[Suspicion]:
        """The parts of the answer that the calls did not give; the call that should have given them is named."""
        last = self.case.scalars["steps"] - 1
        for found in Section(self.tape, self.trace, self.local, derived=self._derived()).answers(actual, floors):
            group = found.path.partition("/")[0]
            operation, path = PUBLISHED_BY.get(group, (found.operation, found.path))
            path = path.format(last)
            yield Suspicion(operation, path, f"{found.path} in the end is not what it gave" if group in PUBLISHED_BY else found.explanation)

    def _loop(self, step: int) -> Section:
        """The calls of one step outside its micro-batches; those before the first step for −1."""

        def belongs(call: Call) -> bool:
            return call.path.startswith(f"steps.{step}.") if step >= 0 else not call.path.startswith("steps.")

        return Section(self.tape, self.trace, self.local, derived=self._derived(), only=belongs)

    def micro_batches(self, step: int) -> list[Section]:
        """The sections of a step's micro-batches, at the parameters that the subject's step before gave; none where it records none."""
        if step not in self._micro:
            scalars = self.case.scalars
            first, end, size = step * scalars["batch"], (step + 1) * scalars["batch"], scalars["micro"]
            starts = range(first, end, size)
            self._micro[step] = [
                self._section(step, index, slice(start, min(start + size, end)))
                for index, start in enumerate(starts)
                if any(call.path.startswith(f"steps.{step}.micro.{index}.") for call in self.trace.calls)
            ]
        return self._micro[step]

    def _section(self, step: int, index: int, samples: slice) -> Section:
        inputs = dict(self.case.inputs)
        inputs |= {name: inputs[name][samples] for name in ("input_ids", "mask", "labels")}
        moved = self._parts(step - 1, "parameter") if step else {}
        inputs |= {f"parameters/{name}": value for name, value in moved.items()}
        tape = reference.record("classifier_loss", inputs, self.case.scalars)
        return Section(tape, self.trace, self.local, f"steps.{step}.micro.{index}.")

    def _derived(self) -> Derived:
        """The values that the loop computes between calls, from the recorded calls."""
        derived: dict[str, Callable[[], Array | None]] = {}
        for step in range(self.case.scalars["steps"]):
            path = f"steps.{step}"
            derived[f"{path}.loss.micro_batches"] = partial(self._stacked, step, self._loss)
            derived[f"{path}.gradient.micro_batches"] = partial(self._stacked, step, self._gradient)
            derived[f"{path}.clip.rows"] = partial(self._through, f"{path}.gradient", "gradient", to_rows)
            derived[f"{path}.clip.gradient"] = partial(self._through, f"{path}.clip", "gradients", from_rows)
        return derived | self._published()

    def _stacked(self, step: int, part: Callable[[Section], Array | None]) -> Array | None:
        parts = [part(section) for section in self.micro_batches(step)]
        found = [value for value in parts if value is not None]
        return np.stack(found) if found and len(found) == len(parts) else None

    def _loss(self, section: Section) -> Array | None:
        loss = self.trace.result("loss", "loss", section.prefix)
        return None if loss is None else loss.reshape(-1)

    def _gradient(self, section: Section) -> Array | None:
        """The flat gradient of a micro-batch: each trainable parameter is read by one call."""
        shares = {}
        for call in section.calls:
            traced = section.traced(call)
            for name, value in call.inputs.items():
                if value in self.names and traced is not None and name in traced.gradients:
                    shares[value] = traced.gradients[name]
        return flatten([shares[name] for name in self.names]) if len(shares) == len(self.names) else None

    def _through(self, path: str, output: str, change: Callable[[Array, Any], Array]) -> Array | None:
        value = self.trace.result(path, output)
        with suppress(ValueError):  # it is of another length where the optimiser lacks a parameter
            return None if value is None else change(value, self.shapes)
        return None

    def _parts(self, step: int, output: str) -> dict[str, Array]:
        """A result of a step of AdamW by parameter; empty where there is none, or one of another length."""
        vector = self.trace.result(f"steps.{step}.adamw", output)
        return dict(zip(self.names, split(vector, self.shapes), strict=True)) if vector is not None and vector.size == self.size else {}

    def _published(self) -> dict[str, Callable[[], Array | None]]:
        """The composition's own outputs."""
        steps = self.case.scalars["steps"]
        published: dict[str, Callable[[], Array | None]] = {
            "losses": partial(self._curve, [f"steps.{step}.loss" for step in range(steps)], "gradient"),
            "norms": partial(self._curve, [f"steps.{step}.clip" for step in range(steps)], "norm"),
        }
        for group, output in STATE.items():
            parts = self._parts(steps - 1, output)
            published |= {f"{group}/{name}": partial(parts.get, name) for name in self.names}
        for name in frozen_names(self.case.scalars):
            published[f"frozen/{name}"] = partial(self.case.inputs[f"parameters/{name}"].astype, STORAGE[self.case.dtype])
        return published

    def _curve(self, paths: list[str], output: str) -> Array | None:
        values = [self.trace.result(path, output) for path in paths]
        found = [value.reshape(()) for value in values if value is not None]
        return np.stack(found) if len(found) == len(paths) else None
