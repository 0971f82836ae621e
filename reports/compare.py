"""What changed between two runs: states, and headroom by more than a factor."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from reports import words
from reports.records import Header, Identity, Run, Verdict, identity
from reports.summary import WORDS

FACTOR: Final = 1.5
"""Headroom that moved by no more than this factor is taken as unchanged: another machine's rounding moves it as well."""

_COMPARED: Final = ("subject", "device", "device_name", "dtypes", "effort", "seed")
_CASES: Final = ("effort", "seed")
"""What the cases are drawn by: those of another seed have another largest error, which is neither better nor worse."""


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
    A verdict that the new run lacks is worse unless the old one did not run either. Headroom is better or worse on the same cases only.
    """
    before = {identity(verdict): verdict for verdict in old.verdicts}
    after = {identity(verdict): verdict for verdict in new.verdicts}
    left, right = dict(old.header), dict(new.header)
    same = all(left[name] == right[name] for name in _CASES)
    changes = [change for key in sorted({*before, *after}) for change in _changes(key, before.get(key), after.get(key), same)]
    return sorted(changes, key=lambda change: {True: 0, None: 1, False: 2}[change.worse])


def differences(old: Header, new: Header) -> list[str]:
    """What was run differently, so that verdicts may differ for that reason alone."""
    left, right = dict(old), dict(new)
    return [f"{name}: {left[name]} → {right[name]}" for name in _COMPARED if left[name] != right[name]]


def _changes(key: Identity, old: Verdict | None, new: Verdict | None, same_cases: bool) -> Iterator[Change]:
    if new is None:
        if old is not None:
            yield Change(key, True if old["state"] != "NOT_RUN" else None, f"{WORDS[old['state']]} → missing")
    elif old is None:
        yield Change(key, True if new["state"] in ("FALSIFIED", "FLAKY", "VACUOUS") else None, f"new, {_state(new)}")
    elif old["state"] != new["state"]:
        yield Change(key, new["state"] != "HELD", f"{WORDS[old['state']]} → {_state(new)}")
    else:
        yield from _headroom(key, old, new, same_cases)


def _headroom(key: Identity, old: Verdict, new: Verdict, same_cases: bool) -> Iterator[Change]:
    before, after = words.worst(old), words.worst(new)
    text = f"{WORDS[new['state']]}, headroom {words.headroom(old)} → {words.headroom(new)}"
    if before is None or after is None:
        if before is not after:
            yield Change(key, None, text)
    elif _grew(before, after) or _grew(after, before):
        yield Change(key, after > before if same_cases else None, text)


def _grew(small: float, large: float) -> bool:
    return large > small * FACTOR if math.isfinite(small) else False


def _state(verdict: Verdict) -> str:
    reason = f" ({words.plain(verdict['reason'])})" if verdict["reason"] else ""
    return WORDS[verdict["state"]] + reason
