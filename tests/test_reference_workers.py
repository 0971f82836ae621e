"""Work of the reference that is shared among threads."""

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from reference import workers
from reference.by_layer import _Rooms
from reference.workers import for_each


@pytest.fixture(autouse=True)
def three_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    workers._pool.cache_clear()
    yield
    workers._pool.cache_clear()


@pytest.mark.parametrize("items", [0, 1, 2, 7])
def test_every_item_comes_once(items: int) -> None:
    seen: list[int] = []
    for_each(seen.append, range(items))
    assert sorted(seen) == list(range(items))


def test_several_threads_work_at_once() -> None:
    together = threading.Barrier(2, timeout=30)  # breaks where one thread alone comes to it
    for_each(lambda _: together.wait() and None, range(2))


def test_an_error_comes_out_after_all_have_ended() -> None:
    seen: list[int] = []

    def function(item: int) -> None:
        seen.append(item)
        if item == 1:
            raise KeyError(item)

    with pytest.raises(KeyError, match="1"):
        for_each(function, range(3))
    assert sorted(seen) == [0, 1, 2]


def test_threads_do_about_an_overflow_what_the_caller_does() -> None:
    seen: list[str] = []
    together = threading.Barrier(3, timeout=30)

    def function(_: int) -> None:
        together.wait()
        seen.append(np.geterr()["over"])

    with np.errstate(over="raise"):
        for_each(function, range(3))
    assert seen == ["raise"] * 3


def test_as_many_threads_as_blas_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers.count() == 3
    for asked in ("", "0", "4,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert workers.count() == len(os.sched_getaffinity(0))


def test_a_forked_process_has_threads_of_its_own() -> None:
    for_each(lambda _: None, range(3))
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # without threads it would wait for ever
        for_each(lambda _: None, range(3))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("shape", [(7, 5), (2,), (1, 3)])
def test_a_weight_is_widened_in_parts(shape: tuple[int, ...]) -> None:
    stored = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    wide = _Rooms().widened("model.layers.0.self_attn.q_proj.weight", stored)
    assert wide.dtype == np.float64
    assert np.array_equal(wide, stored)
