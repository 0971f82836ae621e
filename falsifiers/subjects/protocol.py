"""What the falsifiers ask of a set of implementations under test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from blackswan.contracts.model import Claim
from blackswan.reference.table import Array


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


class Interrupted(Exception):  # noqa: N818  # what was recorded is the news; the cause is the error
    """A composition raised while it was recorded; `calls` are those made before, the exception is the cause."""

    def __init__(self, calls: Sequence[TracedCall]) -> None:
        super().__init__(f"after {len(calls)} calls")
        self.calls = calls


def asked_by(claim: Claim, subject: "Subject") -> "Subject":
    """The subject on the path that the claim speaks of."""
    return subject if claim.path is None else subject.using(claim.path)


class Subject(Protocol):
    """Implementations of operations, called with NumPy arrays.

    Inputs are float64 values that the dtype can hold, int64, bool or uint8; outputs come back in the dtype under test, under the names of
    the signature.
    """

    name: str
    device: str

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Why the operation cannot run in that dtype here; None when it can."""

    def using(self, path: str) -> "Subject":
        """This subject with its operations computed on that path, where it has several; unsupported() says where it cannot."""

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

    def record(
        self,
        operation: str,
        inputs: Mapping[str, Array],
        scalars: Mapping[str, Any],
        dtype: str,
        cotangents: Mapping[str, Array] | None = None,
    ) -> list[TracedCall]:
        """The calls that a composition makes, in order, with local gradients when cotangents are given. Interrupted where it raises."""

    def door(self, name: str) -> object:
        """What answers the system claims of a subject matter: see `doors`, which has a protocol of each name. Lacks where it has none."""

    def default_configurations(self, model_params: float) -> list[dict[str, Any]]:
        """The settings that the subject gives a user who asked for none, by the field names of the hyperparameter rules; may be empty."""
