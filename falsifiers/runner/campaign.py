"""A run: which claims are attacked in which dtypes and on what, the verdicts reached so far, and the file that they are written to."""

import datetime
import shlex
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blackswan.contracts.model import Claim, Contract
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.precision import CUDA_ONLY
from blackswan.falsifiers.runner import environment
from blackswan.falsifiers.runner.engine import Options, Source, falsify, replay
from blackswan.falsifiers.runner.known_failures import KnownFailure
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.resume import former
from blackswan.falsifiers.runner.verdict import Culprit, State, Verdict, plain
from blackswan.falsifiers.runner.verdict_file import VerdictFile
from blackswan.falsifiers.runner.watchdog import Watchdog
from blackswan.falsifiers.subjects.protocol import Subject, asked_by
from blackswan.reports.digests import claim_digest
from blackswan.reports.records import SCHEMA_VERSION

GENERATED = environment.ROOT / "reports" / "generated"


@dataclass(frozen=True)
class Selection:
    """What to attack: claim ids, operations and dtypes; empty means all."""

    claims: Sequence[str] = ()
    operations: Sequence[str] = ()
    dtypes: Sequence[str] = ()


@dataclass(frozen=True)
class Target:
    """One claim in one dtype, on the run's device or, for `device` cuda on a CPU run, not at all."""

    claim: Claim
    dtype: str
    device: str

    def __str__(self) -> str:
        """The test's id, which reads as a statement."""
        where = f" on {self.device}" if self.claim.domain.device else ""
        return f"{self.claim.id}: {self.claim.operation or 'configuration'} {self.claim.kind} in {self.dtype}{where}"


@dataclass
class Campaign:
    """Attacks claims one by one, writes each verdict as it is reached, and keeps them for the summary."""

    subject: Subject
    contracts: Sequence[Contract]
    options: Options
    selection: Selection
    real_input: RealInput
    verdict_file: Path
    required: Sequence[str] = ()
    limit: float | None = None
    known_failures: Sequence[KnownFailure] = ()
    replayed: Path | None = None
    kept: list[tuple[Verdict, dict[str, Any]]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    _before: list[tuple[Verdict, dict[str, Any]]] = field(default_factory=list)
    _watchdog: Watchdog | None = None

    def __post_init__(self) -> None:
        """Nothing is written before `open`."""
        self._file = VerdictFile(self.verdict_file)

    def targets(self) -> Iterator[Target]:
        """Every selected claim, once for each dtype and each device that it names."""
        here = self.subject.device.split(":")[0]
        chosen = self.selection
        done = {(verdict.claim.id, verdict.dtype) for verdict, _ in self.kept if verdict.state is State.HELD}
        for contract in self.contracts:
            for claim in contract.claims:
                if (chosen.claims and claim.id not in chosen.claims) or (chosen.operations and claim.operation not in chosen.operations):
                    continue
                named = [here] if here == "cuda" else (claim.domain.device or (here,))
                for device in named:
                    for dtype in claim.domain.dtype:
                        if dtype in CUDA_ONLY and device != "cuda" and "cuda" in named:
                            continue
                        there = device == here and (claim.id, dtype) in done
                        if not there and (not chosen.dtypes or dtype in chosen.dtypes):
                            yield Target(claim, dtype, device)

    def attack(self, target: Target) -> Verdict:
        """The verdict on a target, written and kept."""
        claim = target.claim
        here = self.subject.device.split(":")[0]
        if target.device != here or (target.dtype in CUDA_ONLY and here != "cuda"):
            reason = f"the claim is about {target.device}, and this run's device is {self.subject.device}"
            reason = CUDA_ONLY.get(target.dtype, reason)
            verdict = Verdict(claim, target.dtype, target.device, State.NOT_RUN, reason)
        else:
            source = self.real_input.case if claim.domain.input == "checkpoint" else None
            verdict = self._falsify(claim, target.dtype, source)
        return self.conclude(verdict)

    def _falsify(self, claim: Claim, dtype: str, source: Source | None) -> Verdict:
        if self.limit is None:
            return falsify(claim, dtype, self.subject, self.options, source)
        if self._watchdog is None:
            self._watchdog = Watchdog(self.subject, self.options, self.limit)
        return self._watchdog.falsify(claim, dtype, source)

    def replay(self, claim: Claim, case: Case) -> Verdict:
        """The verdict on one stored case."""
        return self.conclude(replay(claim, case, self.subject))

    def conclude(self, verdict: Verdict) -> Verdict:
        """Stores the counterexample of a falsified or flaky claim, names the culprit and a known failure, writes the record."""
        listed = self.listed(verdict)
        verdict = replace(verdict, known_failure=listed.record() if listed else None)
        if verdict.case is not None:
            verdict = replace(self._stored(verdict, verdict.case), culprit=self._culprit(verdict, verdict.case))
        self.verdicts.append(verdict)
        self._file.write({**verdict.record(self._version(verdict.claim)), "digests": {"claim": claim_digest(verdict.claim)}})
        return verdict

    def _stored(self, verdict: Verdict, case: Case) -> Verdict:
        """The verdict with the line that replays its case, or with the reason why the case could not be stored: it stands without."""
        # Without arrays cases differ in their seeds alone, which the digest does not see.
        seed = "" if case.inputs else f"-{case.seed}"
        path = self.verdict_file.parent / "counterexamples" / f"{verdict.claim.id}-{verdict.dtype}-{case.digest}{seed}.npz"
        try:
            case.save(path, verdict.claim.id)
        except OSError as error:
            unsaved = f"the counterexample could not be saved as {path}: {error.strerror or error}"
            return replace(verdict, reason=f"{verdict.reason}; {unsaved}" if verdict.reason else unsaved)
        return replace(verdict, replay=f"pytest falsifiers --replay {shlex.quote(environment.display_path(path))}")

    def _culprit(self, verdict: Verdict, case: Case) -> Culprit | None:
        """What a falsified claim is traced to."""
        from blackswan.falsifiers.diagnosis.blame import diagnose

        if verdict.state is not State.FALSIFIED:
            return None
        try:
            return diagnose(verdict.claim, case, verdict.comparison, asked_by(verdict.claim, self.subject))
        except Exception as error:  # the verdict stands whatever becomes of its diagnosis
            explanation = f"the diagnosis itself broke: {type(error).__name__}: {error}"
            return Culprit(verdict.claim.operation or "", verdict.claim.operation or "", explanation)

    def listed(self, verdict: Verdict) -> KnownFailure | None:
        """The entry of the known failures that speaks of the verdict's claim, dtype and device."""
        return next((entry for entry in self.known_failures if entry.matches(verdict)), None)

    @property
    def is_open(self) -> bool:
        """Whether the verdict file is being written."""
        return self._file.is_open

    def reserve(self) -> None:
        """Keeps other runs from the verdict file. ValueError where one has it."""
        self._file.reserve()

    def release(self) -> None:
        """Leaves the verdict file to other runs, whatever became of this one."""
        self._file.close()

    def resume(self) -> None:
        """Takes over what held in the verdict file of an interrupted run. ValueError where that was another run."""
        claims = [claim for contract in self.contracts for claim in contract.claims]
        for verdict, record in former(self.verdict_file, self.header(), claims):
            if verdict.state is State.HELD:
                self._keep(verdict, record)
            else:
                self._before.append((verdict, record))

    def keep_except(self, attacked: Iterable[Target | Verdict]) -> None:
        """Takes over what did not hold in the file that is resumed, but for what is attacked again: that is replaced."""
        again = {_place(one) for one in attacked}
        for verdict, record in [pair for pair in self._before if _place(pair[0]) not in again]:
            self._before.remove((verdict, record))
            self._keep(verdict, record)
            if self.is_open:
                self._file.write(record)

    def _keep(self, verdict: Verdict, record: dict[str, Any]) -> None:
        self.verdicts.append(verdict)
        self.kept.append((verdict, record))

    @property
    def kept_failures(self) -> list[Verdict]:
        """What was taken over without another attack and fails a run."""
        return [verdict for verdict, _ in self.kept if self._fails(verdict)]

    def _fails(self, verdict: Verdict) -> bool:
        listed = self.listed(verdict)
        if listed and listed.objection(verdict, datetime.datetime.now(datetime.UTC).date()):
            return True
        excused = (State.HELD, *((State.FALSIFIED,) if listed else ()), *(() if self.required else (State.NOT_RUN,)))
        return verdict.state not in excused

    def open(self) -> None:
        """Starts the verdict file with the run's record, and what was taken over."""
        header = self.header()
        self._file.start()
        for record in (header, *(record for _, record in self.kept)):
            self._file.write(record)

    def header(self) -> dict[str, Any]:
        """The run's record."""
        dtypes = {target.dtype for target in self.targets()} | {verdict.dtype for verdict, _ in self.kept}
        record: dict[str, Any] = plain(
            {
                "record": "run",
                "schema": SCHEMA_VERSION,
                "run": str(uuid.uuid4()),
                "subject": self.subject.name,
                "device": self.subject.device,
                "device_name": environment.device_name(self.subject.device),
                "dtypes": sorted(dtypes),
                "effort": self.options.effort,
                "seed": self.options.seed,
                "started": _now(),
                "command": environment.command(),
                **({"replay": environment.display_path(self.replayed)} if self.replayed else {}),
                "versions": environment.versions(self.subject.device),
                "machine": environment.machine(),
                "model": _described(self.real_input.model),
                "corpus": _described(self.real_input.corpus),
                "digests": environment.digests(),
            }
        )
        return record

    def close(self, exit_status: int, interrupted: bool) -> None:
        """Ends the verdict file with the totals."""
        if self._watchdog is not None:
            self._watchdog.close()
        if not self.is_open:
            return
        self.keep_except(self.verdicts)
        totals = Counter(verdict.state.value for verdict in self.verdicts)
        self._file.write(
            {
                "record": "end",
                "finished": _now(),
                "interrupted": interrupted,
                "exit_status": int(exit_status),
                "totals": {state.value: totals[state.value] for state in State},
            }
        )
        self._file.close()

    def _version(self, claim: Claim) -> str:
        return next(contract.version for contract in self.contracts if contract.name == claim.contract)


def _place(one: Target | Verdict) -> tuple[str, str, str]:
    return one.claim.id, one.dtype, one.device.split(":")[0]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _described(path: Path) -> dict[str, str]:
    return {"path": environment.display_path(path), "digest": environment.file_digest(path)}
