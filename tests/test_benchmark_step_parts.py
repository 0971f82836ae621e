"""How a step's time is shared out among its parts: on made-up traces, since what runs on a GPU is measured there."""

import argparse
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import step_parts
from benchmarks.step_timeline import (
    ATTENTION,
    DEQUANTISE,
    LORA,
    NOTHING,
    PARTS,
    PRODUCTS,
    REST,
    SWIGLU,
    WIDE,
    Kernel,
    kernels_of,
    part_of,
    purposes,
    shared_out,
)

GRID: dict[str, Any] = {"grid": [132, 1, 1], "block": [384, 1, 1]}


def kernel(name: str, length: float, launched: float, correlation: int, **arguments: Any) -> list[dict[str, Any]]:
    """A launch and the kernel that it starts."""
    return [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "ts": launched, "dur": 1, "args": {"correlation": correlation}},
        {"cat": "kernel", "name": name, "ts": launched + 100, "dur": length, "args": {"correlation": correlation, **GRID, **arguments}},
    ]


UNCAPTURED = [
    {"cat": "user_annotation", "name": WIDE, "ts": 10, "dur": 10},
    {"cat": "gpu_user_annotation", "name": WIDE, "ts": 0, "dur": 900},
    {"cat": "cpu_op", "name": "aten::mm", "ts": 11, "dur": 5},
    {"cat": "cpu_op", "name": "aten::addmm_", "ts": 30, "dur": 5},
    {"cat": "cpu_op", "name": "aten::add", "ts": 40, "dur": 5},
    {"name": "process_name", "ph": "M"},
    *kernel("gemm", 200.0, 12, 1),
    *kernel("gemm", 20.0, 31, 2),
    *kernel("gemm", 15.0, 33, 3, grid=[8, 1, 1]),
    *kernel("vectorized_add", 3.0, 41, 4),
    *kernel("_swiglu", 50.0, 51, 5),
]


def signature(name: str, grid: tuple[int, ...] = (132, 1, 1)) -> tuple[Any, ...]:
    return (name, grid, (384, 1, 1))


def test_a_kernel_is_for_what_launched_it() -> None:
    known = purposes(UNCAPTURED)
    assert known == {
        signature("gemm"): {PRODUCTS: 200.0, LORA: 20.0},
        signature("gemm", (8, 1, 1)): {LORA: 15.0},
        signature("vectorized_add"): {REST: 3.0},
        signature("_swiglu"): {SWIGLU: 50.0},
    }
    assert part_of(Kernel(signature("gemm"), 0, 190.0), known) == PRODUCTS
    assert part_of(Kernel(signature("gemm"), 0, 25.0), known) == LORA
    assert part_of(Kernel(signature("_nf4_dequantize"), 0, 9.0), known) == DEQUANTISE
    assert part_of(Kernel(signature("unheard of"), 0, 9.0), known) == REST


def test_kernels_and_copies_of_a_trace_are_all_there() -> None:
    copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1.5, "dur": 2.5, "args": {}}
    found = kernels_of([*UNCAPTURED, copy])
    assert len(found) == 6
    assert found[-1] == (("Memcpy HtoD", (), ()), 1.5, 2.5)


def test_time_that_several_parts_spend_is_the_first_ones() -> None:
    runs = [(0.0, 10.0, PRODUCTS), (8.0, 13.0, DEQUANTISE), (9.0, 12.0, LORA), (15.0, 16.0, ATTENTION)]
    found = {part: time for part, time in shared_out(runs).items() if time}
    assert found == {PRODUCTS: 10.0, LORA: 2.0, DEQUANTISE: 1.0, NOTHING: 2.0, ATTENTION: 1.0}
    assert not any(shared_out([]).values())


RUNS = st.tuples(st.integers(0, 1000), st.integers(0, 100), st.sampled_from(PARTS)).map(lambda run: (run[0], run[0] + run[1], run[2]))


@settings(max_examples=100, deadline=None, database=None)
@given(runs=st.lists(RUNS, min_size=1, max_size=20))
def test_the_shares_are_all_of_the_time(runs: list[tuple[float, float, str]]) -> None:
    found = shared_out(runs)
    assert sum(found.values()) == max(end for _, end, _ in runs) - min(start for start, _, _ in runs)
    assert min(found.values()) >= 0
    for part in PARTS:
        assert found[part] <= sum(end - start for start, end, whose in runs if whose == part)


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"model": "toy", "batch": 2, "seq": 64, "bf16": False} | changes)


def test_the_least_times_by_hand() -> None:
    """Toy: 2 layers, hidden 128, intermediate 256, 4 query and 2 key heads of 32."""
    rates = {"matmul": 1e12, "copy": 1e9}
    found = step_parts.least_seconds(options(), 128, rates)
    qkv, o, gate_up, down = 128 * (128 + 64 + 64), 128 * 128, 2 * 128 * 256, 128 * 256
    products = qkv + qkv + o + gate_up + down + o + gate_up + down + qkv  # both blocks forward, the first's back, the last's qkv back
    assert found[PRODUCTS] == pytest.approx(2 * 128 * products / 1e12)
    assert found[DEQUANTISE] == pytest.approx((2 * 2 * (qkv + o + gate_up + down) - qkv - down) * 2.5625 / 1e9)
    assert found[SWIGLU] == pytest.approx(128 * 8 * 256 * 2 / 1e9)
    assert found[ATTENTION] == pytest.approx(2 * 128 * (6 * 128 + 6 * 64) * 2 / 1e9)
    assert DEQUANTISE not in step_parts.least_seconds(options(bf16=True), 128, rates)
    assert step_parts.least_seconds(options(), 128, {"matmul": 1.0, "copy": 1e9})[ATTENTION] == 2 * 7 * 2 * 128 * 64**2
