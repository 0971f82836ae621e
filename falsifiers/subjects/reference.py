"""The reference under the rounding of a dtype, as a subject; with a wrong operation in its table it is a mutant."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.precision import compute_dtype, gradient_dtypes, is_real, output_dtypes, rounded_table, signatures
from blackswan.falsifiers.subjects.protocol import Subject, TracedCall
from blackswan.reference.table import Array, Arrays, Table
from blackswan.reference.tape import Call, Tape

Scalars = Mapping[str, Any]


class ReferenceSubject(Subject):
    """Runs a table of the reference's operations; `table` may hold wrong ones, compositions among them."""

    device = "cpu"
    names_errors = True

    def __init__(self, table: Table = reference.TABLE, name: str = "reference") -> None:
        self.table, self.name = table, name
        self._rounded: dict[str, Table] = {}

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Why the operation cannot run; None when it can."""
        del operation, dtype
        return None

    def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> dict[str, Array]:
        """The operation's outputs."""
        outputs = reference.evaluate(operation, _entering(inputs, dtype), scalars, self._table(dtype))
        return _held(outputs, output_dtypes(signatures()[operation], outputs, dtype))

    def differentiate(
        self, operation: str, inputs: Arrays, scalars: Scalars, cotangents: Arrays, wrt: Sequence[str], dtype: str
    ) -> dict[str, Array]:
        """The vector-Jacobian products with respect to the inputs in `wrt`."""
        table, upstream = self._table(dtype), _entering(cotangents, dtype)
        gradients = reference.differentiate(operation, _entering(inputs, dtype), scalars, upstream, wrt, table)
        return _held(gradients, gradient_dtypes(signatures()[operation], scalars, gradients, dtype))

    def record(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str, cotangents: Arrays | None = None) -> list[TracedCall]:
        """The calls that the operation makes, in order, with local gradients when cotangents are given."""
        tape = reference.record(operation, _entering(inputs, dtype), scalars, self._table(dtype))
        arrived = {} if cotangents is None else tape.backward(_entering(cotangents, dtype))
        return [_traced(tape, call, arrived, dtype) for call in tape.calls]

    def _table(self, dtype: str) -> Table:
        if dtype not in self._rounded:
            self._rounded[dtype] = rounded_table(self.table, dtype)
        return self._rounded[dtype]


def _entering(arrays: Arrays, dtype: str) -> dict[str, Array]:
    compute = compute_dtype(dtype)
    return {name: value.astype(compute) if value is not None and is_real(value) else value for name, value in arrays.items()}


def _held(arrays: Arrays, dtypes: Mapping[str, "np.dtype[Any]"]) -> dict[str, Array]:
    return {name: np.asarray(value, dtypes[name]) for name, value in arrays.items()}


def _traced(tape: Tape, call: Call, arrived: Arrays, dtype: str) -> TracedCall:
    """One call of the tape; `arrived` are the gradients that reached the tape's values."""
    signature = signatures()[call.operation]
    inputs = {name: tape.values[value] for name, value in call.inputs.items()}
    outputs = {name: tape.values[value] for name, value in call.results.items()}
    cotangents = {name: arrived[value] for name, value in call.results.items() if value in arrived}
    gradients: dict[str, Array] = {}
    if cotangents:
        upstream = [cotangents.get(name, np.zeros_like(value)) for name, value in outputs.items()]
        gradients = tape.operation(call.operation).gradients(upstream, {**inputs, **call.scalars}, signature.gradients)
    held = output_dtypes(signature, outputs, dtype)
    return TracedCall(
        call.path,
        call.operation,
        inputs,
        call.scalars,
        _held(outputs, held),
        _held(gradients, gradient_dtypes(signature, call.scalars, gradients, dtype)),
        _held(cotangents, held),
    )
