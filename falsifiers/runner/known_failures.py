"""Known failures: claims that are attacked all the same, and whose falsification is excused until a day that is named."""

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blackswan.contracts.document import Document, read
from blackswan.contracts.model import Claim, Location
from blackswan.contracts.problems import ContractError, KeyPath, unknown
from blackswan.contracts.schema import violations
from blackswan.falsifiers.runner.verdict import State

FILE = Path(__file__).parent / "known-failures.yaml"


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
        """The entry as a verdict's record has it."""
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
    document, known = read(path or FILE), {claim.id: claim for claim in claims}
    faults = list(violations(document, "vocabulary.schema.json#/$defs/known_failures"))
    if not faults:
        faults = [
            (("failures", index, *key), text) for index, raw in enumerate(document.data["failures"]) for key, text in _faults(raw, known)
        ]
        faults += _twice(document.data["failures"])
    if faults:
        raise ContractError(document.problem(key, message) for key, message in faults)
    return [_entry(document, index, raw) for index, raw in enumerate(document.data["failures"])]


def _faults(raw: Mapping[str, str], known: Mapping[str, Claim]) -> Iterator[tuple[KeyPath, str]]:
    """The names and the day of an entry that the contracts and the calendar do not have."""
    name, dtype, device = raw["claim"], raw["dtype"], raw.get("device")
    try:
        datetime.date.fromisoformat(raw["expiry"])
    except ValueError as error:
        yield ("expiry",), f"is {raw['expiry']!r}: {error}; expected a day as YYYY-MM-DD"
    if name not in known:
        yield ("claim",), unknown("claim", name, known)
        return
    domain = known[name].domain
    if dtype not in domain.dtype:
        yield ("dtype",), f"{name} is not claimed in {dtype}; expected {' or '.join(domain.dtype)}"
    if device and domain.device and device not in domain.device:
        yield ("device",), f"{name} is not claimed on {device}; expected {' or '.join(domain.device)}"


def _twice(listed: Sequence[Mapping[str, str]]) -> Iterator[tuple[KeyPath, str]]:
    places = [(raw["claim"], raw["dtype"], raw.get("device")) for raw in listed]
    for index, place in enumerate(places):
        if (first := places.index(place)) < index:
            yield ("failures", index), f"is listed twice; first as failures[{first}]"


def _entry(document: Document, index: int, raw: Mapping[str, str]) -> KnownFailure:
    location, expiry = Location(document.file, document.line(("failures", index))), datetime.date.fromisoformat(raw["expiry"])
    return KnownFailure(raw["claim"], raw["dtype"], raw["reason"], expiry, raw.get("device"), location)
