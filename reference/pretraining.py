"""Optimiser steps on every parameter of a language model, and the held-out loss afterwards.

A mean is over the tokens that are predicted, whatever micro-batch they are in. Weight decay reaches matrices only.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from blackswan.reference.decoder import LANGUAGE_MODEL_LOSS, parameter_shapes
from blackswan.reference.table import Array, Arrays, Composition, Scalars
from blackswan.reference.tape import Tape
from blackswan.reference.training import flatten, rates, split

Shapes = Mapping[str, tuple[int, ...]]
MOMENTS = ("exp_avg", "exp_avg_sq")


def predicted(mask: Array) -> int:
    """Number of tokens that have a real token before them in their row; mask [batch, seq]."""
    return int((mask[:, :-1] & mask[:, 1:]).sum())


def _micro_batches(inputs: Arrays, micro: int, first: int, end: int) -> list[slice]:
    """The micro-batches of the rows first … end − 1 that have a token to predict."""
    slices = [slice(start, min(start + micro, end)) for start in range(first, end, micro)]
    return [rows for rows in slices if predicted(inputs["mask"][rows])]


def _loss(tape: Tape, scalars: Scalars, inputs: Arrays, rows: slice) -> Tape:
    """The tape of the mean loss of some rows."""
    inner = Tape(tape.table, {**inputs, **{name: inputs[name][rows] for name in ("input_ids", "mask")}})
    inner.compose("language_model_loss", LANGUAGE_MODEL_LOSS, scalars)
    return inner


def _average(tape: Tape, path: str, means: Sequence[Array], inputs: Arrays, slices: Sequence[slice]) -> str:
    """The mean over tokens from the means of micro-batches."""
    stacked = tape.put(f"{path}.micro_batches", np.stack([mean.ravel() for mean in means]))
    counts = tape.put(f"{path}.counts", np.array([predicted(inputs["mask"][rows]) for rows in slices]))
    return tape.call(path, "average_gradients", gradients=stacked, counts=counts)


def _batch(tape: Tape, path: str, scalars: Scalars, inputs: Arrays, names: Sequence[str], first: int) -> tuple[str, str]:
    """The names of the batch's mean loss [1] and mean gradient [count]; the batch starts at row `first`."""
    slices = _micro_batches(inputs, scalars["micro"], first, first + scalars["batch"])
    losses, gradients = [], []
    for rows in slices:
        inner = _loss(tape, scalars, inputs, rows)
        losses.append(inner.result()["loss"])
        found = inner.backward({"loss": np.ones_like(losses[-1])}, wrt=names)
        gradients.append(flatten([found[name] for name in names]))
    return _average(tape, f"{path}.loss", losses, inputs, slices), _average(tape, f"{path}.gradient", gradients, inputs, slices)


def _initial(tape: Tape, name: str) -> dict[str, str]:
    """The names of a parameter as a vector and of its moments, before the first step."""
    vector = tape.values[name].ravel()
    values = {"parameter": vector, **dict.fromkeys(MOMENTS, np.zeros_like(vector))}
    return {held: tape.put(f"initial.{name}.{held}", value) for held, value in values.items()}


def _clip(tape: Tape, path: str, gradient: str, max_norm: float, shapes: Shapes) -> dict[str, str]:
    """The names of each parameter's clipped gradient."""
    row = tape.put(f"{path}.row", tape.values[gradient][None])
    tape.call(path, "clip_by_global_norm", gradients=row, max_norm=max_norm)
    parts = split(tape.values[f"{path}.gradients"][0], list(shapes.values()))
    return {name: tape.put(f"{path}.{name}", part.ravel()) for name, part in zip(shapes, parts, strict=True)}


def _update(tape: Tape, path: str, state: dict[str, str], gradient: str, **update: float) -> dict[str, str]:
    """One step of a parameter; the names of what it is and of its moments afterwards."""
    tape.call(path, "adamw_step", **state, gradient=gradient, **update)
    return {held: f"{path}.{held}" for held in state}


def _validation(tape: Tape, scalars: Scalars, inputs: Arrays) -> str:
    slices = _micro_batches(inputs, scalars["micro"], 0, len(inputs["mask"]))
    losses = [_loss(tape, scalars, inputs, rows).result()["loss"] for rows in slices]
    return _average(tape, "validation_loss", losses, inputs, slices)


def _pretrain_steps(tape: Tape, scalars: Scalars) -> None:
    inputs = dict(tape.values)
    steps, batch = scalars["steps"], scalars["batch"]
    if inputs["input_ids"].shape[0] != steps * batch:
        raise ValueError(f"input_ids hold {inputs['input_ids'].shape[0]} rows; expected steps · batch = {steps} · {batch}")
    shapes = parameter_shapes(scalars)
    states = {name: _initial(tape, name) for name in shapes}
    losses, norms = [], []
    for step, rate in enumerate(rates(tape, scalars)):
        path = f"steps.{step}"
        loss, gradient = _batch(tape, path, scalars, inputs, list(shapes), step * batch)
        clipped = _clip(tape, f"{path}.clip", gradient, scalars.get("max_norm", 1.0), shapes)
        for name, shape in shapes.items():
            decay = scalars.get("weight_decay", 0.1) if len(shape) > 1 else 0.0
            update = {"step": step + 1, "learning_rate": float(rate), "weight_decay": decay}
            states[name] = _update(tape, f"{path}.adamw.{name}", states[name], clipped[name], **update)
            inputs[name] = tape.values[states[name]["parameter"]].reshape(shape)
        losses.append(tape.values[loss][0])
        norms.append(tape.values[f"{path}.clip.norm"])
    validation = tape.values[_validation(tape, scalars, inputs)][0]
    outputs = {"losses": np.stack(losses), "norms": np.stack(norms), "validation": np.asarray(validation)}
    for group, held in zip(("trainable", *MOMENTS), ("parameter", *MOMENTS), strict=True):
        outputs |= {f"{group}/{name}": tape.values[states[name][held]].reshape(shape) for name, shape in shapes.items()}
    tape.outputs = {name: tape.put(name, value) for name, value in outputs.items()}


PRETRAIN_STEPS = Composition(_pretrain_steps, differentiable=False)
