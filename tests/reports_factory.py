"""Verdict records for the tests of `reports`, valid unless a test changes them."""

import json
from pathlib import Path
from typing import Any

from blackswan.reports.digests import sealed

SOURCE = '''"""Module."""

import math


def norm(x: float, eps: float = 1e-6) -> float:
    """Doc."""
    return x / math.sqrt(x * x + eps)
'''

DIGESTS = {"contracts": "c" * 64, "reference": "r" * 64, "impl": "i" * 64, "falsifiers": "f" * 64}

CASE = {"sizes": {"rows": 2, "hidden": 64}, "scalars": {"eps": 1e-6}, "seed": 7, "flavour": "outliers", "digest": "d" * 64}

COUNTEREXAMPLE = {
    **CASE,
    "tensor": "y",
    "index": [1, 3],
    "expected": 1.25,
    "actual": 1.5,
    "error": 0.25,
    "limit": 0.01,
    "metric": "rms",
    "ulp": 32.0,
    "cosine": 0.98,
    "replay": "pytest falsifiers --replay 'reports/generated/counterexamples/FWD RMSNORM.npz'",
}

CULPRIT = {
    "operation": "rms_norm",
    "path": "model.layers.0.input_layernorm",
    "explanation": "equals the reference with epsilon 1e-5",
    "mutant": "rms_norm_eps_hard_coded",
    "distance": 3e-7,
}


def run_record(**changes: Any) -> dict[str, Any]:
    return {
        "record": "run",
        "schema": 4,
        "run": "0b4e8a52-1f0e-4f0e-9b1d-000000000001",
        "subject": "impl",
        "device": "cpu",
        "device_name": None,
        "dtypes": ["float32", "bfloat16"],
        "effort": "default",
        "seed": 0,
        "started": "2025-03-01T10:00:00Z",
        "command": "pytest falsifiers",
        "versions": {"python": "3.11.7", "numpy": "2.4.0", "torch": "2.13.0", "bitsandbytes": "0.50.2", "driver": None},
        "machine": {"processor": "x86_64", "cores": 2, "system": "Linux"},
        "model": {"path": "checkpoints/tiny", "digest": "m" * 64},
        "corpus": None,
        "digests": DIGESTS,
        **changes,
    }


def verdict(claim: str = "FWD-RMSNORM", state: str = "HELD", **changes: Any) -> dict[str, Any]:
    ran = state not in ("NOT_RUN", "VACUOUS")
    return {
        "record": "verdict",
        "claim": claim,
        "contract": "cuda-forward-parity",
        "contract_version": "1.0.0",
        "severity": "P0",
        "kind": "parity",
        "operation": "rms_norm",
        "statement": "RMSNorm equals the float64 reference within the rounding noise of its dtype.",
        "dtype": "bfloat16",
        "device": "cpu",
        "state": state,
        "reason": None if state in ("HELD", "FALSIFIED") else "no CUDA device",
        "cases": {"run": 20 if ran else 0, "compared": 20 if ran else 0, "rejected": 0},
        "headroom": {"worst": 25.0 if state == "FALSIFIED" else 0.71, "metric": "rms", "tensor": "y"} if ran else None,
        "worst_case": CASE if ran else None,
        "counterexample": COUNTEREXAMPLE if state == "FALSIFIED" else None,
        "culprit": CULPRIT if state == "FALSIFIED" else None,
        "known_failure": None,
        "seconds": {"drawing": 0.1, "reference": 0.2, "noise": 0.1, "subject": 0.3, "comparison": 0.05, "total": 0.75},
        "digests": {"claim": "a" * 64},
        **changes,
    }


def end_record(*verdicts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    totals: dict[str, int] = {}
    for entry in verdicts:
        totals[entry["state"]] = totals.get(entry["state"], 0) + 1
    return {"record": "end", "finished": "2025-03-01T10:05:00Z", "interrupted": False, "exit_status": 0, "totals": totals, **changes}


def write(path: Path, *verdicts: dict[str, Any], header: dict[str, Any] | None = None, end: bool = True) -> Path:
    records = [header or run_record(), *verdicts, *([end_record(*verdicts)] if end else [])]
    return write_records(path, *records)


def write_records(path: Path, *records: object) -> Path:
    """Writes records as a run does: each with its digest, unless it has one already."""
    before: list[str] = []
    lines = [sealed(record, before) if isinstance(record, dict) and "digest" not in record else record for record in records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def reseal(path: Path) -> None:
    """Gives every record of an edited file the digest of what it now says, as if a run had written it so."""
    before: list[str] = []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(sealed(record, before)) + "\n" for record in records), encoding="utf-8")
