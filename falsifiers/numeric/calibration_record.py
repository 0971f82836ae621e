"""The record of calibrations, by claim, dtype and machine, and the factors in contracts/calibration.json that follow from it."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from blackswan.contracts.model import Claim
from blackswan.contracts.problems import unknown
from blackswan.contracts.vocabulary import CALIBRATION
from blackswan.falsifiers.numeric.comparison import METRICS
from blackswan.impl.strict_json import loads

RECORD = Path(__file__).parent / "calibration_record.json"
MARGIN = 1.5
"""A factor is the largest ratio that was measured on any machine, times this, rounded up to two figures; and at least one.

The largest of a sample is exceeded in a longer one. What a factor may be at most is held from the other side, by the power of each claim.
"""

_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number", "minimum": 0, "maximum": sys.float_info.max}
_CLOSED = {"type": "object", "additionalProperties": False}
_RATIOS = {**_CLOSED, "properties": dict.fromkeys(METRICS, _NUMBER), "required": list(METRICS)}
_PROPERTIES: dict[str, Any] = {
    **dict.fromkeys(("claim", "dtype", "device", "machine", "torch"), _TEXT),
    **dict.fromkeys(("seed", "cases", "tensors"), _COUNT),
    **dict.fromkeys(("largest", "median"), _RATIOS),
}
KEYS = tuple(_PROPERTIES)
"""The keys of a calibration, as `calibrate` gives it."""
_VALIDATOR = Draft202012Validator({**_CLOSED, "properties": _PROPERTIES, "required": list(KEYS)})

Record = dict[str, dict[str, dict[str, Any]]]


def read(path: Path = RECORD) -> Record:
    """Claim → dtype → machine → calibration; empty where nothing is recorded yet."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def add(entries: Iterable[Mapping[str, Any]], path: Path = RECORD) -> Record:
    """Adds calibrations (as `calibrate` gives them) to those of the same claim, dtype and machine.

    Another torch on that machine has an entry of its own. The same seed alone is measured anew; among others it is refused, with a
    ValueError and nothing written: its cases would count twice. To calibrate anew, delete the entry.
    """
    record = read(path)
    for entry in entries:
        where = record.setdefault(entry["claim"], {}).setdefault(entry["dtype"], {})
        new = {name: value for name, value in entry.items() if name not in ("claim", "dtype", "machine", "seed")}
        new["seeds"] = [entry["seed"]]
        machine = entry["machine"]
        if machine in where and where[machine]["torch"] != new["torch"]:
            machine = f"{machine}, torch {new['torch']}"
        old = where.get(machine)
        again = old is not None and entry["seed"] in old["seeds"]
        if old is not None and again and len(old["seeds"]) > 1:
            raise ValueError(
                f"{path}: {entry['claim']} in {entry['dtype']} on {machine} holds seed {entry['seed']} already, beside others: nothing was "
                "merged; expected cases of another seed, or delete that entry to calibrate anew"
            )
        where[machine] = new if old is None or again else _joined(old, new)
    path.write_text(_text(record), encoding="utf-8")
    return record


def _text(record: Record) -> str:
    """The record as JSON, with a line for each machine."""
    claims = []
    for claim, by_dtype in sorted(record.items()):
        dtypes = []
        for dtype, by_machine in by_dtype.items():
            machines = (f"   {_json(machine)}: {_json(entry)}" for machine, entry in by_machine.items())
            dtypes.append(f"  {_json(dtype)}: {{\n" + ",\n".join(machines) + "\n  }")
        claims.append(f" {_json(claim)}: {{\n" + ",\n".join(dtypes) + "\n }")
    return "{\n" + ",\n".join(claims) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def merged(path: Path, claims: Mapping[str, Claim]) -> list[dict[str, Any]]:
    """The calibrations in a file of `calibrate --lines`.

    Raises a ValueError, with file, line and key, where one is none of a claim and dtype that have factors.
    """
    lines = path.read_bytes().splitlines()
    if not lines:
        raise ValueError(f"{path}: is empty; expected a calibration a line, as calibrate --lines writes them")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_checked(loads(line), claims))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {str(error)[:400]}; expected a calibration, as calibrate --lines writes them") from None
    return found


def _checked(entry: Any, claims: Mapping[str, Claim]) -> dict[str, Any]:
    """The entry, where it has the keys and values that `calibrate` gives."""
    if (fault := best_match(_VALIDATOR.iter_errors(entry))) is not None:
        raise ValueError(f"{fault.json_path.removeprefix('$').removeprefix('.') or 'the line'}: {fault.message}")
    if entry["claim"] not in claims:
        raise ValueError(unknown("claim", entry["claim"], claims))
    if entry["dtype"] not in (dtypes := claims[entry["claim"]].domain.dtype):
        raise ValueError(unknown("dtype", entry["dtype"], dtypes))
    return dict(entry)


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Two samples as one: cases add up, the larger of the largest ratios stays, and of the medians that of the longer sample."""
    largest = {metric: max(old["largest"][metric], new["largest"][metric]) for metric in METRICS}
    counts = {name: old[name] + new[name] for name in ("cases", "tensors")}
    median = max(old, new, key=lambda sample: sample["cases"])["median"]
    return {**new, **counts, "largest": largest, "median": median, "seeds": sorted({*old["seeds"], *new["seeds"]})}


def factors(record: Record, claim: str, dtype: str) -> dict[str, float]:
    """The largest factors that calibration.json may hold for a claim in a dtype, none looser."""
    entries = record[claim][dtype].values()
    return {metric: max(1, rounded_up(MARGIN * max(entry["largest"][metric] for entry in entries))) for metric in METRICS}


def rounded_up(value: float) -> float:
    """Up to two significant figures."""
    if value <= 0 or not math.isfinite(value):
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    found = float(f"{math.ceil(value / step - 1e-9) * step:.2g}")
    return int(found) if found.is_integer() else found


def write_factors(new: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path = CALIBRATION) -> None:
    """Puts factors by claim and dtype into the file that contracts read; those of other claims and dtypes stay."""
    known = json.loads(path.read_text(encoding="utf-8"))
    for claim, by_dtype in new.items():
        known[claim] = {**known.get(claim, {}), **by_dtype}
    lines = (f" {_json(claim)}: {_json(by_dtype)}" for claim, by_dtype in sorted(known.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
