"""What stays between training steps, measured: of each engine, and where a step of `impl` is wrong."""

from dataclasses import replace

import pytest
import torch

from blackswan.falsifiers.mutants.registry import applied
from blackswan.falsifiers.subjects.doors import Usage, Workload
from blackswan.falsifiers.subjects.impl.memory import Memory
from blackswan.falsifiers.system.footprint import SMALL
from blackswan.falsifiers.system.resident import BITS, TABLES, stays
from blackswan.falsifiers.system.workloads import FAMILIES
from blackswan.impl.fused import model as model_module
from blackswan.impl.fused import packing
from blackswan.impl.fused import step as step_module

DEVICE = torch.device("cpu")
BEYOND, THAWED = f"bits of a projection's weight beyond {BITS}", "frozen tensors that require a gradient"


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every block of tokens."""
    for module in (packing, model_module, step_module):
        monkeypatch.setattr(module, "GRAIN", 16)


def run_of(engine: str, family: str = "llama") -> Workload:
    if engine == "fused" and (reason := step_module.why_not(torch.float32, DEVICE)):
        pytest.skip(reason)
    return replace(SMALL, layers=1, seq=5, dtype="float32", family=family, engine=engine)


def measured(work: Workload) -> Usage:
    return Memory(DEVICE, None).measure(work, steps=2)


def failed(work: Workload, usage: Usage) -> set[str]:
    return {found.tensor.split(": ")[1] for found in stays(work, usage, "cpu") if not found.held}


@pytest.mark.parametrize(("engine", "family"), [*(("torch", family) for family in FAMILIES), ("fused", "qwen2"), ("fused", "qwen3")])
def test_what_stays_is_known_to_the_byte(engine: str, family: str) -> None:
    work = run_of(engine, family)
    found = stays(work, measured(work), "cpu")
    assert {each.tensor.split(": ")[1]: each.held for each in found} == {BEYOND: True, THAWED: True}


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
    work = run_of(engine)
    with applied(mutant):
        assert failed(work, measured(work)) == expected


def test_what_is_less_than_known_shows() -> None:
    work = run_of("torch")
    usage = measured(work)
    assert failed(work, replace(usage, resident=usage.resident - TABLES - 1)) == {BEYOND}
