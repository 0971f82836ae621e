"""The content of every page: the overall result, verdicts by contract, and what needs a person's attention."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from blackswan import contracts
from blackswan.contracts import vocabulary
from blackswan.reports.records import STATES, Identity, Run, State, Verdict, identity
from blackswan.reports.words import worst

WORDS: Final[Mapping[State, str]] = {"HELD": "held", "FALSIFIED": "falsified", "NOT_RUN": "not run", "VACUOUS": "vacuous", "FLAKY": "flaky"}
_FAILURES: Final[tuple[State, ...]] = ("FALSIFIED", "FLAKY", "VACUOUS")
NOTHING_HELD: Final = 5
"""The exit status of a run in which nothing held, though nothing may have failed either."""
HIDDEN: Final = "These claims hold in a dtype whose rounding hides the bug, and so do not exclude it; in float32 they find it."
_OTHERS: Final[tuple[State, ...]] = ("HELD", "NOT_RUN")


@dataclass(frozen=True)
class Entry:
    """A verdict, and why it is stale if it is."""

    verdict: Verdict
    stale: str | None
    started: str

    @property
    def state(self) -> State:
        """The verdict's state."""
        return self.verdict["state"]

    @property
    def excused(self) -> bool:
        """Whether it is falsified as a known failure says, which had not expired when the run started."""
        known = self.verdict["known_failure"]
        return known is not None and self.state == "FALSIFIED" and known["expiry"] >= self.started[:10]

    @property
    def remark(self) -> str | None:
        """The remark that a known failure adds to the verdict."""
        known = self.verdict["known_failure"]
        if known is None:
            return None
        if self.state == "HELD":
            return f"listed as a known failure ({known['reason']}), and it held: remove the entry"
        expired = known["expiry"] < self.started[:10]
        return f"known failure {'that expired on' if expired else 'until'} {known['expiry']}: {known['reason']}"


@dataclass(frozen=True)
class Group:
    """The verdicts of one contract, sorted by claim."""

    contract: str
    version: str
    entries: tuple[Entry, ...]

    @cached_property
    def counts(self) -> dict[State, int]:
        """How many verdicts are in each state."""
        return _counts(self.entries)

    @property
    def worst(self) -> float | None:
        """The worst error / tolerance of the contract's verdicts."""
        return max((value for entry in self.entries if (value := worst(entry.verdict)) is not None), default=None)

    @property
    def seconds(self) -> float:
        """Seconds spent on the contract."""
        return sum(entry.verdict["seconds"]["total"] for entry in self.entries)


@dataclass(frozen=True)
class Summary:
    """A run, grouped by contract."""

    run: Run
    groups: tuple[Group, ...]

    @property
    def entries(self) -> list[Entry]:
        """All verdicts, by contract and claim."""
        return [entry for group in self.groups for entry in group.entries]

    @cached_property
    def counts(self) -> dict[State, int]:
        """How many verdicts are in each state."""
        return _counts(self.entries)

    @property
    def stale(self) -> int:
        """How many verdicts no longer speak about the tree."""
        return sum(entry.stale is not None for entry in self.entries)

    @property
    def falsified(self) -> list[Entry]:
        """The falsified verdicts, the most severe first."""
        found = [entry for entry in self.entries if entry.state == "FALSIFIED"]
        return sorted(found, key=lambda entry: (entry.excused, entry.verdict["severity"]))

    @property
    def attention(self) -> list[Entry]:
        """Verdicts that prove nothing, and known failures that held."""
        return [entry for entry in self.entries if entry.state in ("VACUOUS", "FLAKY") or (entry.state == "HELD" and entry.remark)]

    @property
    def not_run(self) -> list[tuple[str, int]]:
        """Reasons for not running, with how many verdicts have each; the most frequent first."""
        reasons = Counter(entry.verdict["reason"] or "" for entry in self.entries if entry.state == "NOT_RUN")
        return sorted(reasons.items(), key=lambda item: (-item[1], item[0]))

    @cached_property
    def hidden(self) -> list[tuple[str, str, str]]:
        """The bugs that a claim finds in float32 and that rounding hides in a dtype in which it holds: claim, dtype and bug."""
        known = vocabulary.load_mutants()
        due = {claim.id: claim.must_catch for contract in contracts.load() for claim in contract.claims}
        held = [(entry.verdict["claim"], entry.verdict["dtype"] or "") for entry in self.entries if entry.state == "HELD"]
        found = ((claim, dtype, known[name]) for claim, dtype in held for name in due.get(claim, ()) if name in known)
        return [(claim, dtype, mutant.doc) for claim, dtype, mutant in found if dtype in mutant.hidden_in]

    @property
    def result(self) -> str:
        """The run in one word or two. Neither NOT_RUN nor what is stale counts as held, and a run that broke off or failed otherwise has
        not held."""
        failing = [entry.state for entry in self.entries if entry.state in _FAILURES and not entry.excused]
        if failing:
            return next(state for state in _FAILURES if state in failing)
        if self.run.interrupted:
            return "INTERRUPTED"
        if self._status not in self._explained and (self.counts["HELD"] or self.falsified):
            return "FAILED"
        if self.falsified:
            return "KNOWN FAILURES ONLY"
        if any(entry.state == "HELD" and entry.stale for entry in self.entries):
            return "STALE"
        return "HELD" if self.counts["HELD"] else "NOTHING RAN"

    @property
    def _explained(self) -> tuple[int, ...]:
        """The exit statuses of a run in which nothing failed but what is known to."""
        return (0,) if self.counts["HELD"] else (0, NOTHING_HELD)

    @property
    def _status(self) -> int:
        """The run's exit status. It may be a failure though no verdict is one, such as after a claim that broke off."""
        return self.run.end["exit_status"] if self.run.end else 0

    @property
    def headline(self) -> str:
        """`FALSIFIED: 1 falsified, 20 held, 3 not run`."""
        counts = [f"{self.counts[state]} {WORDS[state]}" for state in (*_FAILURES, *_OTHERS) if self.counts[state]]
        if self.stale:
            counts.append(f"{self.stale} STALE")
        if self.run.interrupted and self.result != "INTERRUPTED":
            counts.append("interrupted")
        if self.result == "FAILED":
            counts.append(f"exit status {self._status}, which no verdict explains")
        return f"{self.result}: {', '.join(counts) or 'no verdicts'}"


def summarise(run: Run, stale: Mapping[Identity, str] | None = None) -> Summary:
    """The run's verdicts by contract, sorted; `stale` says why a verdict is stale, for those that are."""
    entries = sorted((Entry(verdict, (stale or {}).get(identity(verdict)), run.header["started"]) for verdict in run.verdicts), key=_order)
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.verdict["contract"], []).append(entry)
    return Summary(run, tuple(Group(name, _versions(members), tuple(members)) for name, members in groups.items()))


def environment(run: Run) -> list[tuple[str, str]]:
    """The circumstances of a run, as rows of name and value."""
    header = run.header
    device = header["device"] + (f" ({header['device_name']})" if header["device_name"] else "")
    rows = [("Subject", header["subject"]), ("Device", device), ("Element types", ", ".join(header["dtypes"]))]
    rows += [("Effort", header["effort"]), ("Seed", str(header["seed"])), ("Command", header["command"]), ("Started", header["started"])]
    rows += [("Finished", f"{run.end['finished']}, exit status {run.end['exit_status']}" if run.end else "did not finish")]
    if "sources" in header:
        rows += [("Subject's sources", _listed({name: value[:12] for name, value in header["sources"].items()}))]
    rows += [("Versions", _listed(header["versions"])), ("Machine", _listed(header["machine"]))]
    rows += [(name, _listed(value)) for name, value in (("Model", header.get("model")), ("Corpus", header.get("corpus"))) if value]
    rows += [("Digests", _listed({name: value and value[:12] for name, value in header["digests"].items()})), ("Run", header["run"])]
    return rows


def document(summary: Summary) -> dict[str, Any]:
    """The page for programs: the records as they are, grouped, with counts, result and staleness."""
    return {
        "result": summary.result,
        "headline": summary.headline,
        "interrupted": summary.run.interrupted,
        "notes": list(summary.run.notes),
        "run": summary.run.header,
        "end": summary.run.end,
        "totals": summary.counts,
        "stale": summary.stale,
        "not_run": [{"reason": reason, "count": count} for reason, count in summary.not_run],
        "hidden": [{"claim": claim, "dtype": dtype, "bug": bug} for claim, dtype, bug in summary.hidden],
        "contracts": [_group(group) for group in summary.groups],
    }


def _group(group: Group) -> dict[str, Any]:
    """JSON has no infinity: the worst headroom is written as the records write it."""
    worst_value: float | str | None = "inf" if group.worst == float("inf") else group.worst
    verdicts = [{**entry.verdict, "stale": entry.stale} for entry in group.entries]
    head = {"contract": group.contract, "version": group.version, "totals": group.counts}
    return {**head, "worst_headroom": worst_value, "seconds": group.seconds, "verdicts": verdicts}


def _counts(entries: tuple[Entry, ...] | list[Entry]) -> dict[State, int]:
    counted = Counter(entry.state for entry in entries)
    return {state: counted[state] for state in STATES}


def _order(entry: Entry) -> tuple[str, ...]:
    return identity(entry.verdict)


def _versions(entries: list[Entry]) -> str:
    return ", ".join(sorted({entry.verdict["contract_version"] for entry in entries}))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value if value is not None else '–'}" for name, value in values.items())
