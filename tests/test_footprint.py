"""What stays between training steps, measured: of each backend, and where a step of `impl` is wrong."""

from dataclasses import replace

import pytest
import torch

from blackswan.falsifiers.mutants.registry import applied
from blackswan.falsifiers.subjects.doors.devices import Growth, Usage, Workload
from blackswan.falsifiers.subjects.impl.memory import Memory
from blackswan.falsifiers.system.footprint import SMALL
from blackswan.falsifiers.system.resident import TABLES, stays
from blackswan.falsifiers.system.workloads import FAMILIES
from blackswan.impl.fused import step as step_module

pytestmark = pytest.mark.usefixtures("few_tokens")
DEVICE = torch.device("cpu")
BEYOND, THAWED = "bits of a projection's weight beyond its codes and scales", "frozen tensors that require a gradient"


def run_of(backend: str, family: str = "llama") -> Workload:
    if backend == "fused" and (reason := step_module.why_not(torch.float32, DEVICE)):
        pytest.skip(reason)
    return replace(SMALL, layers=1, batch=1, seq=3, dtype="float32", family=family, backend=backend)


def measured(work: Workload) -> Usage:
    return Memory(DEVICE).measure(work, steps=1)


def failed(work: Workload, usage: Usage) -> set[str]:
    return {found.tensor.split(": ")[1] for found in stays(work, usage, "cpu") if not found.held}


@pytest.mark.parametrize(("backend", "family"), [*(("torch", family) for family in FAMILIES), ("fused", "qwen3")])
def test_what_stays_is_known_to_the_byte(backend: str, family: str) -> None:
    work = run_of(backend, family)
    found = stays(work, measured(work), "cpu")
    assert {each.tensor.split(": ")[1]: each.held for each in found} == {BEYOND: True, THAWED: True}


@pytest.mark.parametrize(
    ("mutant", "backend", "expected"),
    [
        ("fused_stores_codes_twice", "fused", {BEYOND}),
        ("fused_keeps_what_it_dequantised", "fused", {BEYOND}),
        ("nf4_keeps_what_it_dequantised", "torch", {BEYOND}),
        ("embedding_not_frozen", "torch", {BEYOND, THAWED}),
        ("embedding_not_frozen", "fused", {THAWED}),
    ],
)
def test_what_stays_beside_shows(mutant: str, backend: str, expected: set[str]) -> None:
    work = run_of(backend)
    with applied(mutant):
        assert failed(work, measured(work)) == expected


def test_what_is_less_than_known_shows() -> None:
    work = run_of("torch")
    usage = measured(work)
    assert failed(work, replace(usage, resident=usage.resident - TABLES - 1)) == {BEYOND}


def test_steps_by_every_backend_leave_nothing() -> None:
    """The claim asks all of them on a GPU; here a step of each runs under Triton's interpreter."""
    memory = Memory(DEVICE)
    assert step_module.why_not(torch.float32, DEVICE) is None
    for backend in ("triton", "fused"):
        work = replace(run_of("torch"), backend=backend)
        assert memory.grown(work, [work.seq], 1, 1) == Growth(2, {"bytes": 0, "tensors": 0, "peak": 0}), backend
