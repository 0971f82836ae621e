"""The changes between two runs: states, and headroom by more than a factor."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from blackswan.reports import words
from blackswan.reports.records import Header, Identity, Run, Verdict, identity
from blackswan.reports.summary import WORDS, summarise

FACTOR: Final = 1.5
"""Headroom that moved by no more than this factor is taken as unchanged: another machine's rounding moves it as well."""

_COMPARED: Final = ("subject", "device", "device_name", "dtypes", "effort", "seed", "replay", "model", "corpus", "versions")
_CASES: Final = ("effort", "seed", "replay")
"""Settings that cases are drawn by. Cases of another seed have another largest error, which is neither better nor worse."""
_DATA: Final = ("model", "corpus")
_RANK: Final = ("HELD", "STALE", "KNOWN FAILURES ONLY", "NOTHING RAN", "INTERRUPTED", "FAILED", "VACUOUS", "FLAKY", "FALSIFIED")


@dataclass(frozen=True)
class Change:
    """One verdict that changed; `worse` is None where the change is neither better nor worse."""

    subject: Identity
    worse: bool | None
    text: str

    def __str__(self) -> str:
        """`worse  CLAIM bfloat16 cpu: held → falsified`."""
        word = {True: "worse", False: "better", None: "changed"}[self.worse]
        return f"{word:<8}{words.plain(' '.join(part for part in (self.subject[1], *self.subject[3:]) if part))}: {self.text}"


def compare(old: Run, new: Run) -> list[Change]:
    """The changes, worse ones first.

    A change of state is better only when it ends in HELD: a falsified claim that is no longer run, or that became flaky, was not repaired.
    A verdict that the new run lacks is worse unless the old one did not run either. Headroom and the number of cases that were compared are
    better or worse on the same cases of the same claim only.
    """
    before = {identity(verdict): verdict for verdict in old.verdicts}
    after = {identity(verdict): verdict for verdict in new.verdicts}
    left, right = dict(old.header), dict(new.header)
    same = all(left.get(name) == right.get(name) for name in _CASES) and all(
        _digest(left.get(name)) == _digest(right.get(name)) for name in _DATA
    )
    changes = [change for key in sorted({*before, *after}) for change in _changes(key, before.get(key), after.get(key), same)]
    return sorted(changes, key=lambda change: {True: 0, None: 1, False: 2}[change.worse])


def results(old: Run, new: Run) -> tuple[bool, str] | None:
    """Whether the new run's result is worse than the old one's, and both in words; None where they are the same."""
    before, after = summarise(old).result, summarise(new).result
    return (_RANK.index(after) > _RANK.index(before), f"result: {before} → {after}") if before != after else None


def differences(old: Header, new: Header) -> list[str]:
    """The settings that differ between two runs, so that verdicts may differ for that reason alone."""
    left, right = _flat(old), _flat(new)
    return [f"{name}: {left.get(name)} → {right.get(name)}" for name in dict.fromkeys((*left, *right)) if left.get(name) != right.get(name)]


def _flat(header: Header) -> dict[str, Any]:
    """The parts of a header that are compared. Each entry of a mapping is a part of its own, such as `versions.torch`."""
    found: dict[str, Any] = {}
    for name in _COMPARED:
        value = dict(header).get(name)
        found |= {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in found.items() if value is not None}


def _changes(key: Identity, old: Verdict | None, new: Verdict | None, same_cases: bool) -> Iterator[Change]:
    if new is None:
        if old is not None:
            yield Change(key, True if old["state"] != "NOT_RUN" else None, f"{WORDS[old['state']]} → missing")
    elif old is None:
        yield Change(key, True if new["state"] in ("FALSIFIED", "FLAKY", "VACUOUS") else None, f"new, {_state(new)}")
    elif old["state"] != new["state"]:
        yield Change(key, new["state"] != "HELD", f"{WORDS[old['state']]} → {_state(new)}")
    else:
        yield from _alike(key, old, new, same_cases and old["digests"].get("claim") == new["digests"].get("claim"))


def _alike(key: Identity, old: Verdict, new: Verdict, same: bool) -> Iterator[Change]:
    """Changes of verdicts in the same state, whose cases may be the same."""
    if old["severity"] != new["severity"]:
        yield Change(key, None, f"{WORDS[new['state']]}, severity {old['severity']} → {new['severity']}")
    if old["known_failure"] != new["known_failure"]:
        lost = new["known_failure"] is None and new["state"] != "HELD"
        yield Change(key, lost or None, f"{WORDS[new['state']]}, known failure {_known(old)} → {_known(new)}")
    before, after = old["cases"]["compared"], new["cases"]["compared"]
    if before > after * FACTOR:
        yield Change(key, same or None, f"{WORDS[new['state']]}, {before} cases compared → {after}" + _other(same))
    yield from _headroom(key, old, new, same)


def _headroom(key: Identity, old: Verdict, new: Verdict, same: bool) -> Iterator[Change]:
    before, after = words.worst(old), words.worst(new)
    text = f"{WORDS[new['state']]}, headroom {words.headroom(old)} → {words.headroom(new)}" + _other(same)
    if before is None or after is None:
        if before is not after:
            yield Change(key, None, text)
    elif _grew(before, after) or _grew(after, before):
        yield Change(key, after > before if same else None, text)


def _grew(small: float, large: float) -> bool:
    return large > small * FACTOR if math.isfinite(small) else False


def _state(verdict: Verdict) -> str:
    reason = f" ({words.plain(verdict['reason'])})" if verdict["reason"] else ""
    return WORDS[verdict["state"]] + reason


def _other(same: bool) -> str:
    return "" if same else ", of other cases or another claim"


def _digest(data: Any) -> Any:
    """The digest of a model or a corpus, which may lie elsewhere; None where there is none."""
    return data["digest"] if data else None


def _known(verdict: Verdict) -> str:
    known = verdict["known_failure"]
    return "none" if known is None else f"until {known['expiry']}"
