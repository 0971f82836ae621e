"""A subject that answers as another one does: what wrong subjects are made from."""

import copy
from collections.abc import Sequence
from typing import Any

from blackswan.falsifiers.subjects.protocol import Subject, TracedCall
from blackswan.reference.table import Array, Arrays, Scalars

Outputs = dict[str, Array]


class Wrapped:
    """A subject that answers as another one does."""

    def __init__(self, inner: Subject) -> None:
        self.inner, self.name, self.device = inner, inner.name, inner.device

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Why the operation cannot run; None when it can."""
        return self.inner.unsupported(operation, dtype)

    def using(self, path: str) -> "Wrapped":
        """The subject that it answers as, on that path."""
        other = copy.copy(self)
        other.inner = self.inner.using(path)
        return other

    def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> Outputs:
        """The operation's outputs."""
        return self.inner.run(operation, inputs, scalars, dtype)

    def differentiate(
        self, operation: str, inputs: Arrays, scalars: Scalars, cotangents: Arrays, wrt: Sequence[str], dtype: str
    ) -> Outputs:
        """The vector-Jacobian products with respect to the inputs in `wrt`."""
        return self.inner.differentiate(operation, inputs, scalars, cotangents, wrt, dtype)

    def record(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str, cotangents: Arrays | None = None) -> list[TracedCall]:
        """The calls that the operation makes."""
        return self.inner.record(operation, inputs, scalars, dtype, cotangents)

    def door(self, name: str) -> object:
        """What answers the system claims of a subject matter."""
        return self.inner.door(name)

    def default_configurations(self, model_params: float) -> list[dict[str, Any]]:
        """The settings that the subject gives a user who asked for none."""
        return self.inner.default_configurations(model_params)
