"""Claims for tests: those of the contracts, loaded once, and some made by hand, valid unless a test changes them."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from blackswan import contracts
from blackswan.contracts.model import Boundary, Claim, Domain, Examples, Factors, Location, Range, Tolerance
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference.table import Array

LOADED = contracts.load()
CLAIMS = {claim.id: claim for contract in LOADED for claim in contract.claims}
DTYPES = ("float64", "float32", "bfloat16", "float16")
ROUNDING = Tolerance("rounding", {dtype: Factors(4.0, 8.0, 8.0) for dtype in DTYPES})
EXACT = Tolerance("exact")
Answer = Callable[[Mapping[str, Array], dict[str, Array]], Any]
RMS_NORM: dict[str, Any] = {"sizes": {"rows": Range(1, 4), "hidden": Range(1, 32)}, "scalars": {"eps": (1e-6,)}}


def claim(
    operation: str = "rms_norm", kind: str = "parity", *, name: str = "TEST-CLAIM", check: str | None = None, **changes: Any
) -> Claim:
    """A claim on rms_norm, or on what `operation` and `domain` say."""
    domain = changes.pop("domain", None) or Domain(**{**RMS_NORM, "dtype": ("float32",), **changes.pop("domain_changes", {})})
    fields: dict[str, Any] = {
        "id": name,
        "contract": "test",
        "severity": "P0",
        "kind": kind,
        "operation": operation,
        "statement": "The subject computes what the reference computes.",
        "formula": None,
        "domain": domain,
        "cases": None,
        "check": check,
        "arguments": {},
        "tolerance": ROUNDING,
        "must_catch": (),
        "sources": {},
        "origin": (),
        "correction": None,
        "rule": None,
        "examples": Examples(),
        "location": Location("contracts/test-v1.yaml", 1),
        "content": {},
    }
    return Claim(**{**fields, **changes})


def boundary(hidden: int, flavour: str = "normal") -> Boundary:
    """A boundary case of rms_norm."""
    return Boundary({"rows": 1, "hidden": hidden}, {"eps": 1e-6}, {}, flavour)


class Fake(Subject):
    """The reference as a subject, with a chance for a test to step between question and answer."""

    name, device, names_errors = "fake", "cpu", True

    def __init__(self) -> None:
        self.inner, self.asked = ReferenceSubject(), 0

    def answer(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> Any:
        """What a test overrides; the honest answer here."""
        del inputs
        return outputs

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """As the reference."""
        return self.inner.unsupported(operation, dtype)

    def run(self, operation: str, inputs: Mapping[str, Array], scalars: Mapping[str, Any], dtype: str) -> Any:
        """The reference's outputs, through `answer`."""
        self.asked += 1
        return self.answer(inputs, self.inner.run(operation, inputs, scalars, dtype))

    def differentiate(self, operation: str, inputs: Mapping[str, Array], scalars: Mapping[str, Any], *rest: Any) -> Any:
        """The reference's gradients, through `answer`."""
        self.asked += 1
        return self.answer(inputs, self.inner.differentiate(operation, inputs, scalars, *rest))


def off(value: Array, by: float = 1.0) -> Array:
    """The array with its last element moved, in its own dtype."""
    wrong = np.array(value)
    wrong[(-1,) * wrong.ndim] += np.asarray(by, wrong.dtype)
    return wrong


class Wrong(Fake):
    """Answers what a function makes of question and honest answer."""

    def __init__(self, change: Answer) -> None:
        super().__init__()
        self.change = change

    def answer(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> Any:
        """What the function makes of them."""
        return self.change(inputs, outputs)


class Fickle(Fake):
    """Wrong the first time a question is asked, right from the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bytes] = set()

    def answer(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> dict[str, Array]:
        """Off where the inputs were not seen before."""
        first = inputs["x"].tobytes() not in self.seen
        self.seen.add(inputs["x"].tobytes())
        return {"y": off(outputs["y"])} if first else outputs


def y_off(_: Mapping[str, Array], outputs: dict[str, Array]) -> dict[str, Array]:
    """The honest answer's `y` with its last element moved."""
    return {"y": off(outputs["y"])}


class Hanging(Fake):
    """Answers cases of hidden below `hangs_from`, sleeps for ever on others; or kills its own process."""

    def __init__(self, hangs_from: int, kill: bool = False) -> None:
        super().__init__()
        self.hangs_from, self.kill = hangs_from, kill

    def answer(self, inputs: Mapping[str, Array], outputs: dict[str, Array]) -> Any:
        """Late, or never."""
        if inputs["x"].shape[-1] >= self.hangs_from:
            if self.kill:
                os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(3600)
        return outputs
