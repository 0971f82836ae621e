"""Verdict files: JSON Lines, one run record, its verdicts, one end record; see verdict.schema.json."""

import datetime
import difflib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, TypedDict, cast

from blackswan.contracts.validation import compiler
from blackswan.reports.digests import lines_digest, record_digest

SCHEMA: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("verdict.schema.json").read_text(encoding="utf-8"))
SCHEMA_VERSION: Final = 4

State = Literal["HELD", "FALSIFIED", "NOT_RUN", "VACUOUS", "FLAKY"]
STATES: Final[tuple[State, ...]] = ("HELD", "FALSIFIED", "NOT_RUN", "VACUOUS", "FLAKY")

Real = float | str
"""A number, or one of "nan", "inf" and "-inf", which strict JSON has no numbers for."""

Identity = tuple[str, str, str, str, str]


class Case(TypedDict):
    """A replayable case: sizes and scalars by name, the seed and the flavour that fill its arrays, and the digest of the arrays."""

    sizes: dict[str, Any]
    scalars: dict[str, Any]
    seed: int | None
    flavour: str | None
    digest: str | None


class Counterexample(Case):
    """A case on which the claim is false, with the worst element; `error` and `limit` are in the unit of `metric`.

    `replay` is the command that runs the case again, from the root of the checkout.
    """

    tensor: str | None
    index: list[int] | None
    expected: Any
    actual: Any
    error: Any
    limit: Real | None
    metric: str | None
    ulp: NotRequired[Real | None]
    cosine: NotRequired[Real | None]
    replay: str | None


class Headroom(TypedDict):
    """The worst error / tolerance over the compared cases; above 1 the claim is false."""

    worst: Real
    metric: str
    tensor: str | None


class Culprit(TypedDict):
    """The call that a falsified claim was traced to; `distance` is how far the named mutant's answer is from the subject's.

    `suspects` are functions of the subject, at most seven, the most suspicious first, and `changed` those that differ from a commit and
    ran; records of earlier versions have none.
    """

    operation: str | None
    path: str | None
    explanation: str
    mutant: str | None
    distance: Real | None
    suspects: NotRequired[list[str]]
    changed: NotRequired[list[str]]


class KnownFailure(TypedDict):
    """Why a claim may be false until `expiry`, an ISO date."""

    reason: str
    expiry: str


class Verdict(TypedDict):
    """The result of one claim in one dtype on one device. `seconds` has one entry a phase, and their total."""

    record: Literal["verdict"]
    claim: str
    contract: str
    contract_version: str
    severity: str
    kind: str
    operation: str | None
    statement: str
    dtype: str | None
    device: str | None
    state: State
    reason: str | None
    cases: dict[str, int]
    headroom: Headroom | None
    worst_case: Case | None
    counterexample: Counterexample | None
    culprit: Culprit | None
    known_failure: KnownFailure | None
    seconds: dict[str, float]
    digests: dict[str, str | None]
    digest: str


class Header(TypedDict):
    """The circumstances of a run: subject, device, versions, machine, and the digests of the folders that the verdicts depend on.

    `replay` is the stored case of a run that attacked nothing else; `sources` are the files and packages of a subject that is not impl.
    """

    record: Literal["run"]
    schema: int
    run: str
    subject: str
    device: str
    device_name: str | None
    dtypes: list[str]
    effort: str
    seed: int
    started: str
    command: str
    replay: NotRequired[str]
    sources: NotRequired[dict[str, str]]
    versions: dict[str, Any]
    machine: dict[str, Any]
    model: NotRequired[dict[str, Any] | None]
    corpus: NotRequired[dict[str, Any] | None]
    digests: dict[str, str | None]
    digest: str


class End(TypedDict):
    """The end of a run. `totals` counts the verdicts by state; a state that is absent has none.

    `lines` is a digest over all records before it.
    """

    record: Literal["end"]
    finished: str
    interrupted: bool
    exit_status: int
    totals: dict[str, int]
    lines: str
    digest: str


class RecordError(ValueError):
    """A verdict file that cannot be read; the message gives file, line and what was expected."""


@dataclass(frozen=True)
class Run:
    """One verdict file. `notes` say what is incomplete about it: no end record, an interruption, a truncated last line."""

    path: Path
    header: Header
    verdicts: tuple[Verdict, ...]
    end: End | None
    notes: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether verdicts may be missing."""
        return self.end is None or self.end["interrupted"]


def identity(verdict: Verdict) -> Identity:
    """The subject matter of a verdict, unique within a run: contract, claim, operation, dtype, device."""
    return (verdict["contract"], verdict["claim"], verdict["operation"] or "", verdict["dtype"] or "", verdict["device"] or "")


def number(value: Real) -> float:
    """The number that a record's number or its string "nan", "inf" or "-inf" stands for."""
    return float(value)


def problem(record: object) -> str | None:
    """The reason, in words, why a record does not match the schema; None where it does."""
    if not isinstance(record, dict):
        return f"a record is a JSON object, this is {_shown(record)}"
    if record.get("record") == "run" and record.get("schema") != SCHEMA_VERSION:
        version = _shown(record.get("schema"))
        return f"schema version {version}; this reader knows version {SCHEMA_VERSION}. Use the matching checkout, or run again"
    if not _fits(record):
        return _explain(record)
    counts = record.get("cases", {"run": 0, "compared": 0, "rejected": 0})
    if counts["compared"] + counts["rejected"] > counts["run"]:
        return f"cases: {counts['compared']} compared and {counts['rejected']} rejected are more than the {counts['run']} that were run"
    return None


def _fits(record: Mapping[str, Any]) -> bool:
    return record.get("record") in ("run", "verdict", "end") and _part(f"verdict#/$defs/{record['record']}")(record)


_part: Final = compiler({"verdict": SCHEMA})


def read(path: Path | str) -> Run:
    """The run in a verdict file.

    A truncated last line (a writer that was killed) and a missing end record leave the rest usable and are noted.

    Raises:
        RecordError: the file is missing, empty or not UTF-8 JSON Lines, or a record has an unknown state, kind or schema version,
            stands in the wrong place, repeats another one or contradicts the totals.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    if not content.strip():
        raise RecordError(f"{path}: is empty; a verdict file starts with a run record")
    records, notes = _records(path, content)
    return _assemble(path, records, notes)


def _records(path: Path, content: bytes) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """The valid records with their line numbers, and a note on a truncated last line."""
    lines = content.split(b"\n")
    records: list[tuple[int, dict[str, Any]]] = []
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _strict(line)
        except (ValueError, RecursionError) as error:
            cut_off = isinstance(error, json.JSONDecodeError | UnicodeDecodeError) and line_number == len(lines)
            if cut_off and records:
                return records, [f"line {line_number} is truncated and was left out"]
            raise RecordError(f"{path}:{line_number}: not strict JSON in UTF-8: {error}") from error
        complaint = problem(record) or _edited(cast(dict[str, Any], record))
        if complaint:
            raise RecordError(f"{path}:{line_number}: {complaint}")
        records.append((line_number, cast(dict[str, Any], record)))
    return records, []


def _edited(record: Mapping[str, Any]) -> str | None:
    """The complaint about a record whose digest was taken of other content; None where it was not."""
    if record["digest"] == record_digest(record):
        return None
    return "the record was edited after the run: its digest is of other content. A verdict is never edited; run again"


def _assemble(path: Path, records: list[tuple[int, dict[str, Any]]], notes: list[str]) -> Run:
    header: Header | None = None
    end: End | None = None
    verdicts: dict[Identity, tuple[int, Verdict]] = {}
    for line, record in records:
        kind = record["record"]
        if header is None and kind != "run":
            raise RecordError(f"{path}:{line}: a {kind} record before the run record, which is the first one")
        if header is not None and kind == "run":
            raise RecordError(f"{path}:{line}: a second run record; a verdict file holds one run")
        if end is not None:
            raise RecordError(f"{path}:{line}: a {kind} record after the end record, which is the last one")
        if kind == "run":
            header = cast(Header, record)
        elif kind == "end":
            end = cast(End, record)
            if end["lines"] != lines_digest([earlier["digest"] for number, earlier in records if number < line]):
                raise RecordError(f"{path}:{line}: the end record's digest is of other lines; a record was replaced, moved, lost or added")
            _check_totals(path, line, end, (verdict for _, verdict in verdicts.values()))
        else:
            verdict = cast(Verdict, record)
            first, _ = verdicts.setdefault(identity(verdict), (line, verdict))
            if first != line:
                about = " ".join(part for part in identity(verdict) if part)
                raise RecordError(f"{path}:{line}: a second verdict on {about}; the first is on line {first}")
    assert header is not None  # the file is not empty, and its first record was checked to be the run
    if end is None:
        notes.append("the run was interrupted: the file has no end record")
    elif end["interrupted"]:
        notes.append("the run was interrupted: its end record says so")
    return Run(path, header, tuple(verdict for _, verdict in verdicts.values()), end, tuple(notes))


def _check_totals(path: Path, line: int, end: End, verdicts: Iterable[Verdict]) -> None:
    counted = Counter(verdict["state"] for verdict in verdicts)
    for state in STATES:
        said = end["totals"].get(state, 0)
        if counted[state] != said:
            text = f"the end record counts {said} {state}, the file holds {counted[state]}; verdicts were lost or added"
            raise RecordError(f"{path}:{line}: {text}")


def _strict(line: bytes) -> object:
    """JSON without NaN, Infinity, overflowing numbers, repeated keys and lone surrogates."""
    text = line.decode("utf-8")
    value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_unique)
    if "\\u" in text:  # only an escape can say half a character
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f'{name} is not JSON; non-finite numbers are the strings "nan", "inf" and "-inf"')


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f'{text} overflows; non-finite numbers are the strings "nan", "inf" and "-inf"')
    return value


def _whole(text: str) -> int:
    """An integer that a float can hold: what a record counts or measures is computed with."""
    value = int(text)
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"{text[:20]}… overflows: {len(text)} characters, expected a number that a float can hold") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {key!r} appears {count} times in one object")
    return found


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator, FormatChecker

    formats = FormatChecker(formats=())
    formats.checks("date-time", raises=ValueError)(lambda text: _is(datetime.datetime, text))
    formats.checks("date", raises=ValueError)(lambda text: _is(datetime.date, text))
    return Draft202012Validator(SCHEMA, format_checker=formats)


def _is(kind: type[datetime.date], text: object) -> bool:
    """True for text that is such a moment or day; ValueError for other text. Other values are left to the schema's types."""
    return not isinstance(text, str) or bool(kind.fromisoformat(text))


def _explain(record: Mapping[str, Any]) -> str:
    from jsonschema.exceptions import best_match  # it takes longer to import than the compiled schema takes to check a file

    error = best_match(_validator().iter_errors(record))
    where = ".".join(str(part) for part in error.absolute_path) or "the record"
    schema: Mapping[str, Any] = error.schema if isinstance(error.schema, dict) else {}
    text = error.message
    if error.validator == "enum":
        text = f"{_shown(error.instance)} is unknown; expected one of {', '.join(map(str, schema['enum']))}"
        text += _nearest(error.instance, schema["enum"])
    elif error.validator == "additionalProperties" and "properties" in schema and isinstance(error.instance, dict):
        known = list(schema["properties"])
        unknown = next(key for key in error.instance if key not in known)
        text = f"unknown key {unknown!r}; known here: {', '.join(known)}" + _nearest(unknown, known)
    elif error.validator == "required":
        text = f"{error.message}; required here: {', '.join(schema['required'])}"
    return f"{where}: {text}" + (f" ({schema['description']})" if "description" in schema else "")


def _nearest(value: object, names: list[Any]) -> str:
    close = difflib.get_close_matches(str(value).upper(), [str(name).upper() for name in names], n=1)
    match = next((name for name in names if close and str(name).upper() == close[0]), None)
    return f"; did you mean {match}?" if match is not None else ""


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
