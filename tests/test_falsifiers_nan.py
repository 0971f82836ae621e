"""No check mistakes NaN for a number, on whichever side of a comparison the subject's answer stands."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
from falsifiers_claims import CLAIMS

from blackswan.contracts.model import Claim
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric.answers import NOT_FINITE
from blackswan.falsifiers.numeric.precision import checks, is_real
from blackswan.falsifiers.runner.engine import Options, falsify
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference.table import Array, Arrays

OF_OTHERS = ("adamw_8bit_step",)
"""Operations that only subjects of other libraries have."""
MINUTES = {"DEV-NO-LEAK", "DEV-MEMORY-BOUND"}


class Spoiling(Implementation):
    """The implementation, with NaN for the last element of all that is real in its answers; the reference where it has no operation."""

    def __init__(self, claim: Claim) -> None:
        super().__init__("cpu")
        self.may = checks()[claim.check].non_finite if claim.check else ()
        self.spoilt: list[str] = []

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """As of the implementation, for its operations."""
        return None if operation in OF_OTHERS else super().unsupported(operation, dtype)

    def run(self, operation: str, inputs: Arrays, scalars: Any, dtype: str) -> dict[str, Array]:
        """As the implementation, spoilt."""
        ask = ReferenceSubject().run if operation in OF_OTHERS else super().run
        return self._spoil(ask(operation, inputs, scalars, dtype))

    def differentiate(
        self, operation: str, inputs: Arrays, scalars: Any, cotangents: Arrays, wrt: Sequence[str], dtype: str
    ) -> dict[str, Array]:
        """As the implementation, spoilt."""
        return self._spoil(super().differentiate(operation, inputs, scalars, cotangents, wrt, dtype))

    def _spoil(self, answer: Mapping[str, Array]) -> dict[str, Array]:
        spoilt = {name: value.copy() for name, value in answer.items()}
        for name, value in spoilt.items():
            if is_real(value) and value.size and not any(fnmatchcase(name, pattern) for pattern in self.may):
                value.reshape(-1)[-1] = np.nan
                self.spoilt.append(name)
        return spoilt


def attacked() -> list[Claim]:
    """Those that run on the CPU in seconds."""
    here = [claim for claim in CLAIMS.values() if claim.operation is not None]
    here = [claim for claim in here if not claim.domain.device or "cpu" in claim.domain.device]
    return [claim for claim in here if claim.id not in MINUTES]


def one_of_each_check() -> list[Claim]:
    """The first claim of each check on arrays, and of each kind that compares without one; a system's check is given no arrays to spoil."""
    on_arrays = [claim for claim in attacked() if not claim.check or claim.check in checks()]
    return list({claim.check or claim.kind: claim for claim in reversed(on_arrays)}.values())


class SpoilingZeros(Spoiling):
    """Another value in the gradients of query and key where they are zero, those of a query that sees one key: noise, and not compared."""

    value = np.nan

    def _spoil(self, answer: Mapping[str, Array]) -> dict[str, Array]:
        if {"q", "k"} <= answer.keys() and not np.any(answer["k"]):
            self.spoilt.append("k")
            return {**answer, **{name: np.full_like(answer[name], self.value) for name in ("q", "k")}}
        return dict(answer)


@pytest.mark.parametrize(("value", "why"), [(np.nan, "non-finite"), (np.inf, "non-finite"), (1.0, None), (1e-4, None)])
def test_noise_excuses_noise_alone(value: float, why: str | None) -> None:
    claim = CLAIMS["OP-ATTENTION-GRADIENT"]
    subject = SpoilingZeros(claim)
    subject.value = value
    found = falsify(claim, "float32", subject, Options(shrink=False))
    assert subject.spoilt
    assert found.state is State.FALSIFIED
    assert found.comparison.reason == why


class SpoilingDoor(Implementation):
    """The implementation, with a door whose one method answers with NaN."""

    def __init__(self, name: str, method: str, answer: Any) -> None:
        super().__init__("cpu")
        self.spoilt, self.method, self.answer = name, method, answer

    def door(self, name: str) -> object:
        """The door, spoilt."""
        opened = super().door(name)
        if name == self.spoilt:
            setattr(opened, self.method, lambda *_: self.answer)
        return opened


@pytest.mark.parametrize(
    ("name", "door", "method", "answer"),
    [
        ("DATA-CLASS-WEIGHTS", "corpora", "balanced_weights", [1.0, np.nan]),
        ("CKPT-MERGE-LOGITS", "files", "merged_logits", np.full((2, 5), np.nan, np.float32)),
        ("CLS-CHECKPOINT-EXACT", "files", "load_decoder", {"model.norm.weight": np.full(3, np.inf)}),
    ],
)
def test_a_door_that_answers_with_nan_leaves_the_claim(name: str, door: str, method: str, answer: Any) -> None:
    found = falsify(CLAIMS[name], "float32", SpoilingDoor(door, method, answer), Options(examples=1, shrink=False))
    assert found.state is State.FALSIFIED
    assert found.comparison.reason == NOT_FINITE


@pytest.mark.parametrize("claim", one_of_each_check(), ids=lambda claim: claim.id)
def test_an_answer_with_nan_leaves_the_claim(claim: Claim) -> None:
    subject = Spoiling(claim)
    options = Options(effort="quick", examples=1, shrink=False)
    source = RealInput(CHECKPOINT, CORPUS_HELDOUT).case if claim.domain.input == "checkpoint" else None
    found = falsify(claim, claim.domain.dtype[0], subject, options, source)
    assert found.state is (State.FALSIFIED if subject.spoilt else State.HELD), found.reason
