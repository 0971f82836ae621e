"""Memory that the reference frees and asks for again stays with the process, and goes back at the end."""

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from blackswan.falsifiers.numeric.whole_model import SHAPES
from blackswan.reference import memory
from blackswan.reference.by_layer import ByLayer

SCALARS = {**SHAPES["qwen2.5-0.5b"], "eps": 1e-6, "classes": 2, "rank": 2, "alpha": 4.0, "pooling": "mean"}
ROUNDS = """
import resource, sys
from contextlib import nullcontext
import numpy as np
from benchmarks.reference_speed import _anonymous
from reference import memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def round():
    arrays = [np.ones(2**17) for _ in range(32)]  # 1 MiB each, which is 256 pages and less than NumPy asks large pages for

with memory.kept() if sys.argv[1] == "kept" else nullcontext():
    round()
    before = faults()
    for _ in range(10):
        round()
    print((faults() - before) / 10, _anonymous())
print(_anonymous())
"""


def rounds(how: str) -> tuple[float, int, int]:
    """Page faults of each later round, and the bytes held before and after the end of the block, in a process of their own."""
    answer = subprocess.run([sys.executable, "-c", ROUNDS, how], check=True, stdout=subprocess.PIPE, text=True)
    faults, inside, after = answer.stdout.split()
    return float(faults), int(inside), int(after)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")
def test_freed_memory_is_kept_inside_and_given_back_after() -> None:
    of_a_round, pages = 32 * 2**20, 32 * 256
    faults, inside, after = rounds("kept")
    assert faults < pages / 100
    assert inside - after > 0.9 * of_a_round
    assert rounds("as it is")[0] > pages / 2, "without it there is nothing to gain, and this module can go"


def test_does_nothing_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with memory.kept():
        assert np.ones(3).sum() == 3


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the C library notes its calls here."""
    names: list[str] = []

    def noted(name: str) -> Callable[..., int]:
        return lambda _, *values: names.append(" ".join(map(str, (name, *values)))) or 1

    libc = type("Libc", (), {name: noted(name) for name in ("mallopt", "malloc_trim")})()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    return names


def test_gives_back_once_at_the_end_of_the_outermost_block_and_after_an_error(called: list[str]) -> None:
    with suppress(KeyError), memory.kept():
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: _in_a_block(), range(20)))
        assert {*called} == {"mallopt -3 33554432", "mallopt -1 2147483647"}
        raise KeyError
    assert called[-1] == "malloc_trim 0"
    assert called.count("malloc_trim 0") == 1


def _in_a_block() -> None:
    with memory.kept():
        pass


def test_a_model_by_layer_keeps_its_memory(called: list[str]) -> None:
    with pytest.raises(ValueError, match="missing"):
        ByLayer({}, {}, SCALARS).run()
    assert called[-1] == "malloc_trim 0"
