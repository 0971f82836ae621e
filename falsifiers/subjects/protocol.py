"""The protocol of a subject: the implementation under test, with its operations and its doors to whole programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from blackswan import contracts
from blackswan.contracts.conventions import Declaration
from blackswan.contracts.model import Claim
from blackswan.reference.table import Array

COTANGENT = "cotangent "
"""The cotangent of an output is given beside inputs, under the output's name with this before it."""


@dataclass(frozen=True)
class TracedCall:
    """One operation that a subject ran inside a composition: what went in, what came out, and the local gradients where asked for.

    `gradients` are those of the call's own inputs, `cotangents` those that reached its outputs.
    """

    path: str
    operation: str
    inputs: Mapping[str, Array]
    scalars: Mapping[str, Any]
    outputs: Mapping[str, Array]
    gradients: Mapping[str, Array] = field(default_factory=dict)
    cotangents: Mapping[str, Array] = field(default_factory=dict)


class Lacks(Exception):  # noqa: N818  # a reason not to run, no error
    """The subject has no such door, or cannot do here what is asked; the text says why."""


class OutOfMemory(RuntimeError):  # noqa: N818  # as torch calls its own
    """A subject in another process needed more memory than its device has."""


class Session:
    """Base of an object that a door opens and whose methods are further questions: a pipeline, a ledger, a trainer on a device."""


class Interrupted(Exception):  # noqa: N818  # what was recorded is the news; the cause is the error
    """A composition raised while it was recorded; `calls` are those made before, the exception is the cause."""

    def __init__(self, calls: Sequence[TracedCall]) -> None:
        super().__init__(f"after {len(calls)} calls")
        self.calls = calls


def asked_by(claim: Claim, subject: "Subject") -> "Subject":
    """The subject on the backend that the claim speaks of."""
    return subject if claim.backend is None else subject.using(claim.backend)


class Subject(Protocol):
    """Implementations of operations, called with NumPy arrays. A class of one's own inherits from this one and writes the first three.

    Inputs are float64 values that the dtype can hold, int64, bool or uint8; outputs come back in the dtype under test, under the names of
    the signature. Where the subject cannot do what a case needs it raises Lacks with the reason, and is not asked that case.
    """

    name: str
    device: str
    names_errors: bool = False
    """Whether it refuses bad input by the errors that contracts name; for another one any exception is a refusal."""
    emulator: str = ""
    """What emulates its device here, so slowly that a claim gets few cases; empty where it runs on the device itself."""

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Why the operation cannot run in that dtype here; None when it can."""

    def run(self, operation: str, inputs: Mapping[str, Array], scalars: Mapping[str, Any], dtype: str) -> dict[str, Array]:
        """The operation's outputs."""

    def differentiate(
        self,
        operation: str,
        inputs: Mapping[str, Array],
        scalars: Mapping[str, Any],
        cotangents: Mapping[str, Array],
        wrt: Sequence[str],
        dtype: str,
    ) -> dict[str, Array]:
        """The vector-Jacobian products with respect to the inputs in `wrt`."""

    def at_rows(
        self,
        operation: str,
        inputs: Mapping[str, Array],
        scalars: Mapping[str, Any],
        dtype: str,
        count: int,
        rows: Sequence[int],
        cotangents: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Some rows of its outputs, or with cotangents of its gradients, for inputs whose rows are repeated to `count` in all.

        The inputs may hold more elements than 32 bits count, so that a subject with a device makes them there. This one makes them on the
        host. Lacks on another device.
        """
        if self.device != "cpu":
            raise Lacks(f"{self.name} has no at_rows that makes {count:,} rows on {self.device}; the host makes none for it")
        signature = contracts.load_operations()[operation]
        names, ends = signature.by_row(signature.inputs), signature.by_row(signature.outputs)
        given = {name: _repeated(value, count) if name in names else value for name, value in inputs.items()}
        if cotangents is None:
            found = self.run(operation, given, scalars, dtype)
            return {name: found[name][list(rows)] for name in ends}
        upstream = {name: _repeated(value, count) if name in ends else value for name, value in cotangents.items()}
        wrt = [name for name in signature.gradients if name in names and name in inputs]
        gradients = self.differentiate(operation, given, scalars, upstream, wrt, dtype)
        return {name: value[list(rows)] for name, value in gradients.items()}

    def sources(self) -> Mapping[str, str]:
        """What its answers depend on beside the folders of this project: digests of files and versions of packages, by name."""
        return {}

    def declares(self, operation: str) -> Declaration:
        """The conventions of operations.yaml by which it computes the operation, where they are not the defaults."""
        del operation
        return {}

    def using(self, backend: str) -> "Subject":
        """This subject with its operations computed by that backend, where it has several; unsupported() says where it cannot."""
        del backend
        return self

    def record(
        self,
        operation: str,
        inputs: Mapping[str, Array],
        scalars: Mapping[str, Any],
        dtype: str,
        cotangents: Mapping[str, Array] | None = None,
    ) -> list[TracedCall]:
        """The calls that a composition makes, in order, with local gradients when cotangents are given. Interrupted where it raises."""
        del operation, inputs, scalars, dtype, cotangents
        return []

    def door(self, name: str) -> object:
        """Opens the door of that name for system claims, see `subjects.doors`. Raises Lacks where the subject has none."""
        raise Lacks(f"{self.name} has no {name}")

    def default_configurations(self, model_params: float) -> list[dict[str, Any]]:
        """The settings that the subject gives a user who asked for none, by the field names of the hyperparameter rules; may be empty."""
        del model_params
        return []


def _repeated(value: Array, count: int) -> Array:
    return np.tile(value, (count // len(value), *[1] * (value.ndim - 1)))


class WholeSubject(Subject):
    """A subject that is a whole model: it may declare conventions of operations, and is not asked them one by one."""

    def __init__(self, name: str, device: str, declared: Mapping[str, Declaration]) -> None:
        self.name, self.device, self._declared = name, device, declared

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Every operation, by itself."""
        return f"{self.name} is a whole model; {operation} in {dtype} is not asked of it by itself"

    def run(self, operation: str, inputs: Mapping[str, Array], scalars: Mapping[str, Any], dtype: str) -> dict[str, Array]:
        """Lacks."""
        del inputs, scalars
        raise Lacks(str(self.unsupported(operation, dtype)))

    def differentiate(
        self,
        operation: str,
        inputs: Mapping[str, Array],
        scalars: Mapping[str, Any],
        cotangents: Mapping[str, Array],
        wrt: Sequence[str],
        dtype: str,
    ) -> dict[str, Array]:
        """Lacks."""
        del cotangents, wrt
        return self.run(operation, inputs, scalars, dtype)

    def declares(self, operation: str) -> Declaration:
        """What is declared of an operation."""
        return self._declared.get(operation, {})
