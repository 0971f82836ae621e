"""A campaign: which claims are attacked in which dtypes and on what, in which order, and what a record says of each verdict."""

import datetime
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from blackswan.contracts.conventions import shown
from blackswan.contracts.model import Claim, Contract
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.precision import CUDA_ONLY, declaration, declared_by, signatures
from blackswan.falsifiers.runner.engine import Options, falsify, replay, would_hold_with
from blackswan.falsifiers.runner.known_failures import KnownFailure
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.verdict import Culprit, State, Verdict
from blackswan.falsifiers.subjects.protocol import Subject, asked_by
from blackswan.reports import places
from blackswan.reports.digests import claim_digest

Key = tuple[str, str, str]
"""Claim, dtype and kind of device: what a run has one verdict on."""


@dataclass(frozen=True)
class Selection:
    """The claim ids, operations and dtypes to attack; an empty list means all, but for contracts that are asked on request."""

    claims: Sequence[str] = ()
    operations: Sequence[str] = ()
    dtypes: Sequence[str] = ()

    def chooses(self, claim: Claim) -> bool:
        """Whether the claim is selected in any dtype."""
        return (not self.claims or claim.id in self.claims) and (not self.operations or claim.operation in self.operations)


FILLING = dict.fromkeys(("devices.last_rows_are_as_alone", "large_arrays_row_by_row", "gradients_of_large_arrays_row_by_row"), "qwen3-4b")
"""A check that takes most of a GPU's memory → the whole model whose process it shares, so that the two do not want it at once."""


@dataclass(frozen=True)
class Target:
    """One claim in one dtype, on the run's device or, for `device` cuda on a CPU run, not at all."""

    claim: Claim
    dtype: str
    device: str

    @property
    def group(self) -> str | None:
        """The group that shares a process on a GPU: claims on one whole model, which fills the memory, share its expected answers."""
        check = self.claim.check or ""
        if self.device != "cuda":
            return None
        return str(self.claim.arguments["model"]) if check.startswith("whole_models.") else FILLING.get(check)

    @property
    def key(self) -> Key:
        """Claim, dtype and device."""
        return self.claim.id, self.dtype, self.device

    def __str__(self) -> str:
        """The test's id, which reads as a statement."""
        where = f" on {self.device}" if self.claim.domain.device else ""
        return f"{self.claim.id}: {self.claim.operation or 'configuration'} {self.claim.kind} in {self.dtype}{where}"


def targets(contracts: Sequence[Contract], selection: Selection, here: str) -> list[Target]:
    """Every selected claim in each of its dtypes and on each device that it names; elementary operations first, whole programs last.

    `here` is the run's kind of device, cpu or cuda; a run on CUDA leaves out claims that are about the CPU alone.
    """
    named = bool(selection.claims or selection.operations or selection.dtypes)
    asked = [contract for contract in contracts if named or not contract.on_request]
    claims = [claim for contract in asked for claim in contract.claims if selection.chooses(claim)]
    found = []
    for claim in sorted(claims, key=_wholeness):
        own = claim.domain.device or (here,)
        devices = own if here != "cuda" else tuple({here} & set(own))
        for device, dtype in product(devices, claim.domain.dtype):
            elsewhere = dtype in CUDA_ONLY and device != "cuda" and "cuda" in devices
            if not elsewhere and (not selection.dtypes or dtype in selection.dtypes):
                found.append(Target(claim, dtype, device))
    return found


def _wholeness(claim: Claim) -> tuple[bool, bool, int, int]:
    """A key that puts claims in order: an operation that calls none and is called by many comes first.

    Among claims on compositions, those that run more operations come later; behind them claims on systems, which run whole programs.
    """
    if claim.operation is None:
        return claim.system, False, 0, 0
    callers = sum(claim.operation in signature.calls for signature in signatures().values())
    return False, claim.domain.input == "checkpoint", len(_called(claim.operation)), -callers


def _called(operation: str) -> set[str]:
    """The operations that an operation runs, directly or through others."""
    calls = signatures()[operation].calls
    return set(calls).union(*map(_called, calls))


@dataclass
class Campaign:
    """Attacks claims one by one, stores counterexamples and names culprits. It makes records of verdicts, and writes them nowhere."""

    subject: Subject
    contracts: Sequence[Contract]
    options: Options
    selection: Selection
    real_input: RealInput
    verdict_file: Path
    required: Sequence[str] = ()
    known_failures: Sequence[KnownFailure] = ()
    held: Collection[Key] = ()
    """The verdicts that held in the run that this one resumes; they are not attacked again."""
    command: str | None = None
    """The beginning of the line that replays a case; by default that of `pytest falsifiers`."""
    before_diagnosis: Callable[[], None] | None = None
    """Called when a claim is false and its culprit is looked for, which may take as long as the attack."""
    changed: Collection[str] = ()
    """Names of what is changed in `impl`; a culprit has those that ran."""

    def targets(self) -> Iterator[Target]:
        """The targets to attack, in order."""
        return (target for target in targets(self.contracts, self.selection, self._here) if target.key not in self.held)

    @property
    def _here(self) -> str:
        return self.subject.device.split(":")[0]

    def attack(self, target: Target) -> Verdict:
        """The verdict on a target."""
        if target.device != self._here or (target.dtype in CUDA_ONLY and self._here != "cuda"):
            reason = f"the claim is about {target.device}, and this run's device is {self.subject.device}"
            return self.conclude(self.without_attack(target, State.NOT_RUN, CUDA_ONLY.get(target.dtype, reason)))
        if left_out := self._left_out(target.claim):
            return self.conclude(self.without_attack(target, State.NOT_RUN, left_out))
        source = self.real_input.case if target.claim.domain.input == "checkpoint" else None
        verdict = falsify(target.claim, target.dtype, self.subject, self.options, source)
        if verdict.state is State.FALSIFIED and verdict.case is not None:
            try:
                found = would_hold_with(target.claim, verdict.case, asked_by(target.claim, self.subject), self.options, source)
                verdict = replace(verdict, reason=f"would hold with {shown(found)}") if found else verdict
            except Exception as error:  # as in _culprit
                verdict = _also(verdict, f"whether it would hold with another declaration cannot be told: {type(error).__name__}: {error}")
        return self.conclude(verdict)

    def _left_out(self, claim: Claim) -> str | None:
        """Why a quick run does not ask the claim, unless it was named; None where it does."""
        if self.options.effort != "quick" or self.selection.claims or not (claim.system or asked_by(claim, self.subject).emulator):
            return None
        return "--effort quick leaves out whole runs, files and devices, and kernels on a CPU; name the claim to ask it"

    def without_attack(self, target: Target, state: State, reason: str) -> Verdict:
        """The verdict on a target that was not attacked, or not to the end."""
        device = self.subject.device if target.device == self._here and state is not State.NOT_RUN else target.device
        return Verdict(target.claim, target.dtype, device, state, reason)

    def replay(self, claim: Claim, case: Case) -> Verdict:
        """The verdict on one stored case."""
        return self.conclude(replay(claim, case, self.subject))

    def conclude(self, verdict: Verdict) -> Verdict:
        """The verdict with its known failure and the declaration; of a falsified or flaky claim with its counterexample and culprit."""
        if verdict.state is not State.NOT_RUN:
            emulator, declared = asked_by(verdict.claim, self.subject).emulator, self._declared(verdict.claim)
            said = (f"declared {declared}" if declared else None, f"in {emulator}, which gets few cases" if emulator else None)
            reason = "; ".join(filter(None, (*said, verdict.reason)))
            verdict = replace(verdict, reason=reason or None)
        listed = self.listed(verdict.claim.id, verdict.dtype, verdict.device)
        verdict = replace(verdict, known_failure=listed.record() if listed else None)
        if verdict.case is not None:
            verdict = replace(self._stored(verdict, verdict.case), culprit=self._culprit(verdict, verdict.case))
        return verdict

    def _declared(self, claim: Claim) -> str:
        """The subject's declarations in words: of the claim's operation, or for a whole model or run of all that have some."""
        if claim.operation:
            return shown(declaration(self.subject, claim.operation))
        of_several = (claim.check or "").startswith(("whole_models.", "runs.", "non_finite."))
        return "; ".join(f"{name} {shown(own)}" for name, own in declared_by(self.subject).items() if own) if of_several else ""

    def record(self, verdict: Verdict) -> dict[str, Any]:
        """The verdict's record for the verdict file."""
        version = next(contract.version for contract in self.contracts if contract.name == verdict.claim.contract)
        return {**verdict.record(version), "digests": {"claim": claim_digest(verdict.claim)}}

    def _stored(self, verdict: Verdict, case: Case) -> Verdict:
        """The verdict with the line that replays its case, or with the reason why the case could not be stored: it stands without."""
        # Without arrays cases differ in their seeds alone, which the digest does not see.
        seed = "" if case.inputs else f"-{case.seed}"
        path = self.verdict_file.parent / "counterexamples" / f"{verdict.claim.id}-{verdict.dtype}-{case.digest}{seed}.npz"
        try:
            case.save(path, verdict.claim.id)
        except Exception as error:  # as in _culprit
            return _also(verdict, f"the counterexample could not be saved as {path}: {getattr(error, 'strerror', None) or error}")
        return replace(verdict, replay=f"{self.command or places.attack_command()} --replay {shlex.quote(places.shown(path))}")

    def _culprit(self, verdict: Verdict, case: Case) -> Culprit | None:
        """The culprit that a falsified claim is traced to."""
        if verdict.state is not State.FALSIFIED:
            return None
        try:
            if self.before_diagnosis is not None:
                self.before_diagnosis()
            from blackswan.falsifiers.diagnosis.blame import diagnose  # and the mutants, some of which import what `impl` may not have

            subject = asked_by(verdict.claim, self.subject)
            return diagnose(verdict.claim, case, verdict.comparison, subject, changed=self.changed)
        except (Exception, SystemExit) as error:  # the verdict stands whatever becomes of its diagnosis
            operation = verdict.claim.operation or verdict.claim.check or "a rule"
            return Culprit(operation, operation, f"the diagnosis itself broke: {type(error).__name__}: {error}")

    def listed(self, claim: str, dtype: str, device: str) -> KnownFailure | None:
        """The entry of the known failures that speaks of a claim in a dtype on a device."""
        return next((entry for entry in self.known_failures if entry.matches(claim, dtype, device)), None)

    def objection(self, claim: str, dtype: str, device: str, state: str) -> str | None:
        """Why a known failure excuses nothing here: its day has passed, or its claim holds. None where that is not so."""
        listed = self.listed(claim, dtype, device)
        return listed.objection(State(state), datetime.datetime.now(datetime.UTC).date()) if listed else None

    def fails(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of a verdict is no success of its run."""
        place = record["claim"], record["dtype"], record["device"]
        excused = {State.HELD: True, State.NOT_RUN: not self.required, State.FALSIFIED: self.listed(*place) is not None}
        return not excused.get(record["state"], False) or self.objection(*place, record["state"]) is not None


def _also(verdict: Verdict, reason: str) -> Verdict:
    """The verdict with one more reason."""
    return replace(verdict, reason=f"{verdict.reason}; {reason}" if verdict.reason else reason)
