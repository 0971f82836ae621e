"""Optimiser steps on a classifier: micro-batches, their mean, clipping by the global norm, AdamW at the schedule's rate.

The trainable parameters and their moments are float32 masters in mixed precision: nothing here rounds them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from blackswan.reference.classifier import CLASSIFIER_LOSS, frozen_names, trainable_names
from blackswan.reference.table import Array, Arrays, Composition, Scalars
from blackswan.reference.tape import Tape


def flatten(arrays: Sequence[Array]) -> Array:
    """One vector of all elements, in order."""
    return np.concatenate([array.ravel() for array in arrays])


def split(vector: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The inverse of flatten."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    if ends[-1] != len(vector):
        raise ValueError(f"a vector of {len(vector)} for tensors of {ends[-1]} elements")
    starts = [0, *ends[:-1]]
    return [vector[start:end].reshape(shape) for start, end, shape in zip(starts, ends, shapes, strict=True)]


def to_rows(vector: Array, shapes: Sequence[tuple[int, ...]]) -> Array:
    """One row a tensor, padded with zeros, which change no norm: [count] → [tensors, longest]."""
    parts = split(vector, shapes)
    rows = np.zeros_like(vector, shape=(len(parts), max(part.size for part in parts)))
    for row, part in zip(rows, parts, strict=True):
        row[: part.size] = part.ravel()
    return rows


def from_rows(rows: Array, shapes: Sequence[tuple[int, ...]]) -> Array:
    """The inverse of to_rows."""
    return flatten([row[: math.prod(shape)] for row, shape in zip(rows, shapes, strict=True)])


def _micro_batch(tape: Tape, scalars: Scalars, inputs: Arrays, names: Sequence[str], samples: slice) -> tuple[Array, Array]:
    """The mean loss [] of some samples, and its gradient as one vector [count]."""
    batched = {name: inputs[name][samples] for name in ("input_ids", "mask", "labels")}
    micro = Tape(tape.table, {**inputs, **batched})
    micro.compose("classifier_loss", CLASSIFIER_LOSS, scalars)
    loss = micro.result()["loss"]
    gradients = micro.backward({"loss": np.ones_like(loss)}, wrt=names)
    return loss, flatten([gradients[name] for name in names])


def _mean_over_samples(tape: Tape, path: str, means: Sequence[Array], counts: str) -> str:
    stacked = tape.put(f"{path}.micro_batches", np.stack([mean.ravel() for mean in means]))
    return tape.call(path, "average_gradients", gradients=stacked, counts=counts)


def _batch(tape: Tape, path: str, scalars: Scalars, inputs: Arrays, names: Sequence[str], first: int) -> tuple[str, str]:
    """The names of the batch's mean loss [1] and mean gradient [count]; the batch starts at sample `first`."""
    micro, end = scalars["micro"], first + scalars["batch"]
    slices = [slice(start, min(start + micro, end)) for start in range(first, end, micro)]
    parts = [_micro_batch(tape, scalars, inputs, names, samples) for samples in slices]
    counts = tape.put(f"{path}.counts", np.array([samples.stop - samples.start for samples in slices]))
    loss = _mean_over_samples(tape, f"{path}.loss", [loss for loss, _ in parts], counts)
    return loss, _mean_over_samples(tape, f"{path}.gradient", [gradient for _, gradient in parts], counts)


def _clip(tape: Tape, path: str, gradient: str, shapes: Sequence[tuple[int, ...]], max_norm: float) -> tuple[str, str]:
    """The names of the clipped gradient [count] and of the norm before []."""
    rows = tape.put(f"{path}.rows", to_rows(tape.values[gradient], shapes))
    tape.call(path, "clip_by_global_norm", gradients=rows, max_norm=max_norm)
    return tape.put(f"{path}.gradient", from_rows(tape.values[f"{path}.gradients"], shapes)), f"{path}.norm"


def rates(tape: Tape, scalars: Scalars) -> Array:
    """The rate of each step [steps], as the schedule has it."""
    schedule = tape.call(
        "learning_rate_schedule",
        "learning_rate_schedule",
        total_steps=scalars["steps"],
        peak=scalars["learning_rate"],
        warmup_fraction=scalars.get("warmup_fraction", 0.0),
        kind=scalars.get("schedule", "constant"),
    )
    return tape.values[schedule]


def _train_steps(tape: Tape, scalars: Scalars, biases_decay: bool = True) -> None:
    inputs = dict(tape.values)
    steps, batch = scalars["steps"], scalars["batch"]
    if inputs["input_ids"].shape[0] != steps * batch:
        raise ValueError(f"input_ids hold {inputs['input_ids'].shape[0]} samples; expected steps · batch = {steps} · {batch}")
    names = trainable_names(scalars)
    shapes = [inputs[name].shape for name in names]
    state = {"parameter": tape.put("initial", flatten([inputs[name] for name in names]))}
    zeros = np.zeros_like(tape.values["initial"])
    state |= {moment: tape.put(f"initial.{moment}", zeros) for moment in ("exp_avg", "exp_avg_sq")}
    weight_decay = scalars.get("weight_decay", 0.01)
    if not biases_decay:
        weight_decay *= flatten([np.full(shape, float(not name.endswith("bias"))) for name, shape in zip(names, shapes, strict=True)])
    losses, norms = [], []
    for step, rate in enumerate(rates(tape, scalars)):
        path = f"steps.{step}"
        loss, gradient = _batch(tape, path, scalars, inputs, names, step * batch)
        clipped, norm = _clip(tape, f"{path}.clip", gradient, shapes, scalars.get("max_norm", 1.0))
        update = {"learning_rate": float(rate), "weight_decay": weight_decay}
        tape.call(f"{path}.adamw", "adamw_step", **state, gradient=clipped, step=step + 1, **update)
        state = {name: f"{path}.adamw.{name}" for name in state}
        inputs |= dict(zip(names, split(tape.values[state["parameter"]], shapes), strict=True))
        losses.append(tape.values[loss][0])
        norms.append(tape.values[norm])
    frozen = {name: inputs[name] for name in frozen_names(scalars)}
    _publish(tape, names, shapes, state, {"losses": np.stack(losses), "norms": np.stack(norms)}, frozen)


def _publish(
    tape: Tape, names: Sequence[str], shapes: Sequence[tuple[int, ...]], state: Mapping[str, str], curves: Arrays, frozen: Arrays
) -> None:
    """Names the outputs: losses and norms [steps], the final trainable parameters and moments by name, and the frozen parameters."""
    outputs = dict(curves)
    for group, vector in zip(("trainable", "exp_avg", "exp_avg_sq"), state.values(), strict=True):
        parts = split(tape.values[vector], shapes)
        outputs |= {f"{group}/{name}": part for name, part in zip(names, parts, strict=True)}
    outputs |= {f"frozen/{name}": frozen[name] for name in sorted(frozen)}
    tape.outputs = {name: tape.put(name, value) for name, value in outputs.items()}


TRAIN_STEPS = Composition(_train_steps, differentiable=False)
WEIGHTS_DECAY = Composition(partial(_train_steps, biases_decay=False), differentiable=False)
"""The same with biases that do not decay."""
