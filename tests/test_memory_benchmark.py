"""Estimates of device memory against what was measured on a GPU (benchmarks/memory.py)."""

import json
from dataclasses import fields
from typing import Any

import pytest
import torch
from terminal_processes import ROOT

from benchmarks.memory import BATCH, MODELS, SEQ, TOLERANCE, Setting, settings

pytest.importorskip("triton")  # the kernels that ran there are counted where Triton can be imported

MEASURED = json.loads((ROOT / "benchmarks" / "results" / "memory-h200.json").read_text())
ROWS = [{"backend": row["engine"], **row} for row in MEASURED["rows"]]
"""The kept file was recorded when a backend was called an engine."""
NEAR = 0.03
"""Of the peak; the benchmark itself asks for TOLERANCE."""
EXACT = 0.001
"""What autograd saves is counted tensor by tensor, but for rounding to the allocator's blocks."""


def setting_of(row: dict[str, Any]) -> Setting:
    return Setting(**{field.name: row[field.name] for field in fields(Setting)})


def name(row: dict[str, Any]) -> str:
    return "-".join(str(row[key]) for key in ("backend", "model", "nf4", "dtype", "targets", "accumulation"))


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_an_estimate_is_near_what_was_measured(row: dict[str, Any]) -> None:
    assert (MEASURED["batch"], MEASURED["seq"]) == (BATCH, SEQ)
    found = setting_of(row).estimate(torch.device("cuda"))
    assert found.total == pytest.approx(row["peak"], rel=NEAR)
    if "saved" in row:
        kept = found.parts["activations"] + found.parts.get("dequantised_weights", 0)
        assert kept == pytest.approx(row["saved"], rel=EXACT)


def test_every_setting_was_measured() -> None:
    measured = {setting_of(row) for row in ROWS}
    assert set(settings(list(MODELS), torch.device("cuda"))) == measured
    assert NEAR < TOLERANCE
