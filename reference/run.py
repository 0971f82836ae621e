"""Running an operation of the vocabulary: its outputs, its trace, its gradients."""

import difflib
from collections.abc import Collection, Iterable, Mapping

import numpy as np

import blackswan.reference.classifier as classifier
import blackswan.reference.decoder as decoder
from blackswan.reference.operations import TABLE
from blackswan.reference.pretraining import PRETRAIN_STEPS
from blackswan.reference.table import Array, Arrays, Composition, Operation, Scalars, Table
from blackswan.reference.tape import Tape
from blackswan.reference.training import TRAIN_STEPS

COMPOSITIONS: dict[str, Composition] = {
    "decoder_forward": decoder.DECODER_FORWARD,
    "language_model_loss": decoder.LANGUAGE_MODEL_LOSS,
    "classifier_forward": classifier.CLASSIFIER_FORWARD,
    "classifier_loss": classifier.CLASSIFIER_LOSS,
    "train_steps": TRAIN_STEPS,
    "multi_label_steps": TRAIN_STEPS,
    "pretrain_steps": PRETRAIN_STEPS,
}
PARAMETERS = "parameters/"


def record(operation: str, inputs: Mapping[str, Array | None], scalars: Scalars, table: Table = TABLE) -> Tape:
    """Runs an operation and returns its tape: `values` by name, `calls` in order, `outputs`, `backward`.

    Inputs are flat, `parameters/<name>` for a model's parameters, which the tape names plainly. An absent optional
    input is None or left out.
    """
    entry = _entry(operation, table)
    present = {name.removeprefix(PARAMETERS): np.asarray(value) for name, value in inputs.items() if value is not None}
    tape = Tape(table, present)
    if isinstance(entry, Composition):
        entry.build(tape, scalars)
        return tape
    absent = {name: None for name, value in inputs.items() if value is None}
    tape.call(operation, operation, **{name: name for name in present}, **absent, **scalars)
    tape.outputs = dict(tape.calls[0].results)
    return tape


def evaluate(operation: str, inputs: Mapping[str, Array | None], scalars: Scalars, table: Table = TABLE) -> dict[str, Array]:
    """The operation's outputs by name; see `record`."""
    return record(operation, inputs, scalars, table).result()


def differentiate(
    operation: str,
    inputs: Mapping[str, Array | None],
    scalars: Scalars,
    cotangents: Arrays,
    wrt: Iterable[str],
    table: Table = TABLE,
) -> dict[str, Array]:
    """Gradients of Σ cotangent · output by input name, for the inputs in `wrt`.

    A group stands for its members: `parameters` for every parameter, `trainable` for the trainable ones of a classifier; both are named
    `parameters/<name>`. An output without a cotangent counts as zero. ValueError for an operation that has no gradient.
    """
    entry = _entry(operation, table)
    differentiable = entry.differentiable if isinstance(entry, Composition) else entry.backward is not None
    if not differentiable:
        raise ValueError(f"{operation} has no gradient")
    tape = record(operation, inputs, scalars, table)
    names = _members(wrt, inputs, scalars)
    gradients = tape.backward(cotangents, wrt=[name.removeprefix(PARAMETERS) for name in names])
    return {name: gradients[name.removeprefix(PARAMETERS)] for name in names}


def _members(wrt: Iterable[str], inputs: Collection[str], scalars: Scalars) -> list[str]:
    names: list[str] = []
    for name in wrt:
        if name == "parameters":
            names += [key for key in inputs if key.startswith(PARAMETERS)]
        elif name == "trainable":
            names += [PARAMETERS + key for key in classifier.trainable_names(scalars)]
        else:
            names.append(name)
    return names


def _entry(operation: str, table: Table) -> Operation | Composition:
    if operation in table:
        return table[operation]
    if operation in COMPOSITIONS:
        return COMPOSITIONS[operation]
    near = difflib.get_close_matches(operation, [*table, *COMPOSITIONS], n=1)
    raise KeyError(f"no operation is named {operation!r}" + (f"; the nearest name is {near[0]!r}" if near else ""))
