"""Verdicts: the closed set of states, and what a record of one says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison


class State(StrEnum):
    """The five outcomes of attacking a claim."""

    HELD = "HELD"
    FALSIFIED = "FALSIFIED"
    NOT_RUN = "NOT_RUN"
    VACUOUS = "VACUOUS"
    FLAKY = "FLAKY"


@dataclass(frozen=True)
class Culprit:
    """Which operation is to blame, where in the model, and why; with the mutant that gives the same wrong answer, and how close it is.

    `suspects` are functions of the subject, the most suspicious first: ranked, not proven. Beside them stand those that are `changed`
    since a commit and ran.
    """

    operation: str
    path: str
    explanation: str
    mutant: str | None = None
    distance: float | None = None
    suspects: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


@dataclass
class Tally:
    """Counts the cases of one attack, and keeps the worst. `lacking` were not asked, for the subject lacks what they need: `reason`."""

    run: int = 0
    compared: int = 0
    rejected: int = 0
    lacking: int = 0
    reason: str = ""
    worst: Comparison | None = None
    worst_case: Case | None = None

    def add(self, case: Case, comparisons: list[Comparison]) -> None:
        """Counts a case; it is rejected when none of its tensors was compared."""
        self.run += 1
        counted = [c for c in comparisons if not c.rejected]
        self.compared += bool(counted)
        self.rejected += not counted
        for comparison in counted:
            if self.worst is None or comparison.headroom > self.worst.headroom:
                self.worst, self.worst_case = comparison, case


@dataclass(frozen=True)
class Verdict:
    """The outcome of attacking one claim in one dtype."""

    claim: Claim
    dtype: str
    device: str
    state: State
    reason: str | None = None
    tally: Tally = field(default_factory=Tally)
    case: Case | None = None
    comparison: Comparison | None = None
    culprit: Culprit | None = None
    replay: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    known_failure: Mapping[str, str] | None = None

    def record(self, contract_version: str) -> dict[str, Any]:
        """The JSON record (reports/verdict.schema.json)."""
        claim, tally = self.claim, self.tally
        worst = tally.worst
        counterexample = self.case and self.comparison and {**self.case.describe(), **self.comparison.describe(), "replay": self.replay}
        record = {
            "record": "verdict",
            "claim": claim.id,
            "contract": claim.contract,
            "contract_version": contract_version,
            "severity": claim.severity,
            "kind": claim.kind,
            "operation": claim.operation,
            "statement": claim.statement,
            "dtype": self.dtype,
            "device": self.device,
            "state": self.state.value,
            "reason": self.reason,
            "cases": {"run": tally.run, "compared": tally.compared, "rejected": tally.rejected},
            "headroom": worst and {"worst": worst.headroom, "metric": worst.metric, "tensor": worst.tensor},
            "worst_case": tally.worst_case and tally.worst_case.describe(),
            "counterexample": counterexample,
            "culprit": self.culprit and vars(self.culprit),
            "known_failure": self.known_failure,
            "seconds": {name: round(value, 6) for name, value in {"total": 0.0, **self.seconds}.items()},
            "digests": {},
        }
        return {name: plain(value) for name, value in record.items()}


def plain(value: Any) -> Any:
    """Strict JSON, whatever a subject has said: NumPy numbers become Python's, non-finite ones the strings nan, inf and -inf, characters of
    a text that are no UTF-8 escapes, and anything else its words."""
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else ("inf" if value > 0 else "-inf")
    if value is None or isinstance(value, int | float):
        return value
    return str(value).encode(errors="backslashreplace").decode()
