"""What stays between training steps, measured: of each engine, and where a step of `impl` is wrong."""

from typing import Any

import pytest
import torch
from blackswan.falsifiers.subjects.procedures.footprint import bound

from blackswan.falsifiers.mutants.registry import applied
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.subjects.procedures import footprint
from blackswan.falsifiers.system.footprint import FAMILIES, SMALL
from blackswan.falsifiers.system.resident import BITS, TABLES, stays
from blackswan.impl.fused import model as model_module
from blackswan.impl.fused import packing
from blackswan.impl.fused import step as step_module
from blackswan.reference.table import Array

DEVICE = torch.device("cpu")
BEYOND, THAWED = f"bits of a projection's weight beyond {BITS}", "frozen tensors that require a gradient"
REQUEST = {"layers": 1, "seq": 5, "dtype": "float32", "measured_on": "cpu", "seed": 0}


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every block of tokens."""
    for module in (packing, model_module, step_module):
        monkeypatch.setattr(module, "GRAIN", 16)
    monkeypatch.setattr(footprint, "STEPS", 2)


def run_of(engine: str, family: str = "llama") -> dict[str, Any]:
    if engine == "fused" and (reason := step_module.why_not(torch.float32, DEVICE)):
        pytest.skip(reason)
    return {**SMALL, "family": family, **REQUEST, "engine": engine}


def failed(run: dict[str, Any], answer: dict[str, Array]) -> set[str]:
    return {name_of(found) for found in stays(run, answer) if not found.held}


def name_of(found: Comparison) -> str:
    return found.tensor.split(": ")[1]


@pytest.mark.parametrize(("engine", "family"), [*(("torch", family) for family in FAMILIES), ("fused", "qwen2"), ("fused", "qwen3")])
def test_what_stays_is_known_to_the_byte(engine: str, family: str) -> None:
    run = run_of(engine, family)
    answer = bound(run, DEVICE)
    assert failed(run, answer) == set()
    assert {name_of(found) for found in stays(run, answer)} == {BEYOND, THAWED}


@pytest.mark.parametrize(
    ("mutant", "engine", "expected"),
    [
        ("fused_stores_codes_twice", "fused", {BEYOND}),
        ("fused_keeps_what_it_dequantised", "fused", {BEYOND}),
        ("nf4_keeps_what_it_dequantised", "torch", {BEYOND}),
        ("embedding_not_frozen", "torch", {BEYOND, THAWED}),
        ("embedding_not_frozen", "fused", {THAWED}),
    ],
)
def test_what_stays_beside_shows(mutant: str, engine: str, expected: set[str]) -> None:
    run = run_of(engine)
    with applied(mutant):
        assert failed(run, bound(run, DEVICE)) == expected


def test_what_is_less_than_known_shows() -> None:
    run = run_of("torch")
    answer = bound(run, DEVICE)
    fewer = {**answer, "resident": answer["resident"] - TABLES - 1}
    assert failed(run, fewer) == {BEYOND}
