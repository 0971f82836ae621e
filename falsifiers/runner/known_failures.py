"""Known failures: claims that are attacked all the same, and whose falsification is excused until a day that is named."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blackswan.contracts.document import Document, read
from blackswan.contracts.model import Claim, Location
from blackswan.contracts.problems import ContractError, KeyPath, Problem, unknown
from blackswan.falsifiers.runner.verdict import State

FILE = Path(__file__).parent / "known-failures.yaml"
REQUIRED = ("claim", "dtype", "reason", "expiry")
KEYS = (*REQUIRED, "device")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class KnownFailure:
    """An entry of the file; `device` None is any."""

    claim: str
    dtype: str
    reason: str
    expiry: datetime.date
    device: str | None
    location: Location

    def matches(self, claim: str, dtype: str, device: str) -> bool:
        """Whether the entry speaks of a claim in a dtype on a device."""
        here = self.device is None or device.split(":")[0] == self.device
        return (self.claim, self.dtype) == (claim, dtype) and here

    def record(self) -> dict[str, str]:
        """What a verdict record says of it."""
        return {"reason": self.reason, "expiry": self.expiry.isoformat()}

    def objection(self, state: State, today: datetime.date) -> str | None:
        """Why the entry excuses nothing here: it is out of date, or its claim holds. None where nothing is wrong with it."""
        where = f"{self.location.file}:{self.location.line}"
        if today > self.expiry:
            return f"{where}: the known failure expired on {self.expiry}; mend what is wrong, or say why it still is and until when"
        if state is State.HELD:
            return f"{where}: {self.claim} in {self.dtype} holds; remove it from the known failures"
        return None


def load(claims: Iterable[Claim], path: Path | None = None) -> list[KnownFailure]:
    """The entries of the file. ContractError where it is malformed, or an entry matches no claim, dtype and device of the contracts."""
    document = read(path or FILE)
    known = {claim.id: claim for claim in claims}
    listed = document.data.get("failures")
    problems = [document.problem((key,), f"unknown key {key!r}; expected failures") for key in document.data if key != "failures"]
    if not isinstance(listed, list):
        problems.append(document.problem(("failures",), "expected a list of entries, which may be empty"))
        raise ContractError(problems)
    for index, raw in enumerate(listed):
        problems += [document.problem(("failures", index, *key), message) for key, message in _faults(raw, known)]
    problems += _twice(document, listed)
    if problems:
        raise ContractError(problems)
    return [_entry(document, index, raw) for index, raw in enumerate(listed)]


def _faults(raw: Any, known: Mapping[str, Claim]) -> Iterable[tuple[KeyPath, str]]:
    if not isinstance(raw, dict):
        yield (), f"expected a mapping with {', '.join(REQUIRED)}"
        return
    for key in raw:
        if key not in KEYS:
            yield (key,), unknown("key", key, KEYS)
    for key in KEYS:
        if key in raw and not (isinstance(raw[key], str) and raw[key].strip()):
            yield (key,), f"is {raw[key]!r}; expected text"
        elif key in REQUIRED and key not in raw:
            yield (), f"missing key {key!r}"
    yield from _target_faults(raw, known)
    if isinstance(raw.get("expiry"), str) and _date(raw["expiry"]) is None:
        yield ("expiry",), f"is {raw['expiry']!r}; expected a day as YYYY-MM-DD"


def _target_faults(raw: Mapping[str, Any], known: Mapping[str, Claim]) -> Iterable[tuple[KeyPath, str]]:
    name, dtype, device = raw.get("claim"), raw.get("dtype"), raw.get("device")
    if isinstance(device, str) and device not in DEVICES:
        yield ("device",), unknown("device", device, DEVICES)
    if not isinstance(name, str):
        return
    if name not in known:
        yield ("claim",), unknown("claim", name, known)
        return
    domain = known[name].domain
    if isinstance(dtype, str) and dtype not in domain.dtype:
        yield ("dtype",), f"{name} is not claimed in {dtype}; expected {' or '.join(domain.dtype)}"
    if device in DEVICES and domain.device and device not in domain.device:
        yield ("device",), f"{name} is not claimed on {device}; expected {' or '.join(domain.device)}"


def _twice(document: Document, listed: Sequence[Any]) -> list[Problem]:
    seen: dict[tuple[Any, ...], int] = {}
    problems = []
    for index, raw in enumerate(listed):
        key = tuple(raw.get(name) for name in ("claim", "dtype", "device")) if isinstance(raw, dict) else (index,)
        if seen.setdefault(key, index) != index:
            problems.append(document.problem(("failures", index), f"is listed twice; first as failures[{seen[key]}]"))
    return problems


def _date(text: str) -> datetime.date | None:
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        return None


def _entry(document: Document, index: int, raw: Mapping[str, str]) -> KnownFailure:
    expiry = _date(raw["expiry"])
    assert expiry is not None
    location = Location(document.file, document.line(("failures", index)))
    return KnownFailure(raw["claim"], raw["dtype"], raw["reason"], expiry, raw.get("device"), location)
