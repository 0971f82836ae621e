"""Values that a live run computed, held to a claim: the recorded answer stands for a subject's, and everything else is a replay."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan import contracts
from blackswan.contracts.conventions import Declaration, alternatives, shown
from blackswan.contracts.model import Claim
from blackswan.contracts.vocabulary import FOLDER
from blackswan.falsifiers.numeric.answers import NOT_FINITE
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.numeric.precision import is_narrow, is_real, signatures
from blackswan.falsifiers.runner.engine import replay
from blackswan.falsifiers.runner.terminal import worst_element
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.reference.table import Array, Arrays

DTYPES = {getattr(torch, dtype.storage): name for name, dtype in contracts.DTYPES.items() if name != "tf32"}
"""Torch's dtypes that a claim may be asked in."""

CONTRACTS = ("decoder-operations", "loss", "lora", "optimizer", "training")


@cache
def claims() -> Mapping[str, Claim]:
    """The claims of the contracts that a live run is held to, by id, read once."""
    files = [path for name in CONTRACTS for path in sorted(FOLDER.glob(f"{name}-v*.yaml"))]
    return {claim.id: claim for contract in contracts.load(files) for claim in contract.claims}


class Recorded(Subject):
    """A subject that answers with what was recorded, whatever it is asked."""

    name, device = "the live run", "cpu"

    def __init__(self, answer: Arrays) -> None:
        self._answer = answer

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Nothing: what was recorded was computed."""
        del operation, dtype
        return None

    def run(self, operation: str, inputs: Arrays, scalars: Mapping[str, Any], dtype: str) -> dict[str, Array]:
        """The recorded outputs."""
        del operation, inputs, scalars, dtype
        return dict(self._answer)

    def differentiate(
        self, operation: str, inputs: Arrays, scalars: Mapping[str, Any], cotangents: Arrays, wrt: Sequence[str], dtype: str
    ) -> dict[str, Array]:
        """The recorded gradients."""
        del operation, inputs, scalars, cotangents, wrt, dtype
        return dict(self._answer)


@dataclass(frozen=True)
class Failure:
    """A claim that is false of a live run: where, by which numbers, and the file that replays its case where it has one."""

    step: int
    claim: Claim
    culprit: str
    comparison: Comparison
    why: str = ""
    replay: Path | None = None

    def __str__(self) -> str:
        """The story of it, in a few lines."""
        lines = [f"step {self.step}: {self.claim.id} is false of {self.culprit}", f"  claim      {self.claim.statement}"]
        lines += worst_element(self.comparison)
        if self.why:
            lines.append(f"  means      {self.why}")
        if self.replay:
            lines.append(f"  case       {self.replay} has the recorded inputs and answer")
        return "\n".join(lines)


class GuardError(AssertionError):
    """A live run left a claim; `failures` are all that the checked step found."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("\n".join(["a claim is false of this run", *map(str, failures)]))
        self.failures = tuple(failures)


@dataclass
class Ledger:
    """What the checks of a run came to: how often each claim held, what failed at this step, and what was not checked, and why.

    `conventions` are those by which an operation was found to hold; a claim is asked by them from then on.
    """

    folder: Path
    step: int = 0
    held: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    conventions: dict[str, Declaration] = field(default_factory=dict)
    spent: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the seconds inside to those that checking has taken."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - start

    def skip(self, claim: str, why: str) -> None:
        """Notes that a claim is not checked of something."""
        self.unchecked.setdefault(f"{claim}: {why}", "")

    def note(self, claim: str, culprit: str, comparison: Comparison, why: str = "", replay: Path | None = None) -> bool:
        """Enters a comparison; whether it held. One that proves nothing is entered as not checked."""
        if comparison.rejected:
            self.skip(claim, f"the values of {culprit} are lost in rounding noise at some steps")
        elif comparison.held:
            self.held[claim] = self.held.get(claim, 0) + 1
        else:
            self.failures.append(Failure(self.step, claims()[claim], culprit, comparison, why, replay))
        return comparison.held

    def hold(self, name: str, case: Case, answer: Arrays, culprit: str, why: str = "") -> bool:
        """Holds the recorded answer to a claim on its case; whether it held. A convention by which it holds is kept, and said."""
        claim = claims()[name]
        if case.dtype not in claim.domain.dtype:
            self.skip(name, f"the claim says nothing of {case.dtype}, and {culprit} is in it")
            return False
        if (found := _not_finite({**case.inputs, **case.cotangents, **answer})) is not None:
            return self.note("TRN-NON-FINITE", culprit, found)
        assert claim.operation is not None
        known = self.conventions.get(claim.operation, {})
        verdict = replay(claim, case, Recorded(answer), {claim.operation: known})
        if verdict.state is State.FALSIFIED:
            for other in alternatives(signatures()[claim.operation], is_narrow(case.dtype)):
                if replay(claim, case, Recorded(answer), {claim.operation: other}).state is State.HELD:
                    self.conventions[claim.operation] = other
                    self.held[name] = self.held.get(name, 0) + 1
                    return True
        if verdict.comparison is not None:
            return self.note(name, culprit, verdict.comparison, why, self._saved(name, case, answer))
        if verdict.state is State.HELD:
            self.held[name] = self.held.get(name, 0) + 1
            return True
        self.skip(name, f"{culprit}: {verdict.reason}")
        return False

    def _saved(self, claim: str, case: Case, answer: Arrays) -> Path | None:
        """The file of a case; none, and said, where it cannot be written."""
        path = self.folder / f"step{self.step}-{claim}-{case.dtype}-{case.digest}.npz"
        try:
            case.save(path, claim, answer)
        except OSError as error:
            self.skip(claim, f"its case could not be written to {path}: {error.strerror}")
            return None
        return path

    def name(self, index: int, culprit: str) -> None:
        """Gives a failure another culprit, which is known only once the worst element is."""
        self.failures[index] = replace(self.failures[index], culprit=culprit)

    def report(self) -> str:
        """In lines: what held how often, by which conventions, and what was not checked."""
        lines = [f"{name} held {count} times" for name, count in sorted(self.held.items())]
        lines += [f"{operation} holds with {shown(found)}" for operation, found in self.conventions.items()]
        return "\n".join([*lines, *(f"not checked: {why}" for why in self.unchecked)])


def _not_finite(arrays: Arrays) -> Comparison | None:
    for name, value in arrays.items():
        if is_real(value) and not (finite := np.isfinite(value)).all():
            index = tuple(int(i) for i in np.argwhere(~finite)[0])
            return broken(name, NOT_FINITE, "a finite number", float(value[index]), index)
    return None


def case_of(
    operation: str, dtype: str, inputs: Arrays, scalars: Mapping[str, Any], sizes: Mapping[str, int], cotangents: Arrays | None = None
) -> Case:
    """The case of recorded inputs, which become float64."""
    wide = {name: np.asarray(value, np.float64) if is_real(value) else value for name, value in inputs.items()}
    return Case(operation, dtype, dict(sizes), dict(scalars), 0, "recorded", wide, dict(cotangents or {}))


def sample(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Up to `count` evenly spaced elements of a tensor, or rows where it has two axes; a view."""
    return tensor[:: max(1, -(-tensor.shape[0] // count))]


def host(tensor: torch.Tensor, dtype: str | None = None) -> Array:
    """The tensor as an array, rounded to a dtype where one is given."""
    return to_numpy(tensor if dtype is None else tensor.to(getattr(torch, contracts.DTYPES[dtype].storage)))
