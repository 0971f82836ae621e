"""Worker processes: their answers, their errors, and Ctrl-C: one line, no traceback, nothing left running."""

import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import pytest
from terminal_processes import interrupted, started

from blackswan.falsifiers.__main__ import main
from blackswan.falsifiers.runner.workers import workers

CLAIMS = [f"--claim={name}" for name in ("CLS-GRADIENT", "CLS-FORWARD", "FWD-DECODER", "BWD-DECODER")]


@pytest.mark.parametrize("seconds", [2.0, 4.0, 9.0])
def test_an_interrupt_of_all_processes_at_any_time_is_one_line(seconds: float) -> None:
    process = started("-m", "falsifiers", "power", *CLAIMS)
    time.sleep(seconds)
    assert interrupted(process) == (130, "interrupted")


def _asleep() -> None:
    time.sleep(60)


def test_what_stops_the_parent_ends_the_workers_at_once() -> None:
    def stopped() -> None:
        with workers(1) as pool:
            for _ in pool.as_done([partial(_double, 5), _asleep]):
                raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert time.monotonic() - start < 30
    assert not multiprocessing.active_children()


def _double(value: int) -> int:
    time.sleep(0.2 / value)
    return 2 * value


def _fails(value: int) -> int:
    raise ValueError(f"no {value}")


def _dies() -> int:
    os._exit(7)


def test_each_task_is_answered_once() -> None:
    tasks = [partial(_double, value) for value in (1, 2, 3, 4, 5)]
    with workers(2) as pool:
        assert sorted(pool.as_done(tasks)) == [(0, 2), (1, 4), (2, 6), (3, 8), (4, 10)]
        assert list(pool.in_order(tasks)) == [2, 4, 6, 8, 10]
        assert list(pool.in_order([])) == []


def test_answers_that_nobody_waited_for_are_not_those_of_the_next_tasks() -> None:
    with workers(2) as pool:
        for _ in pool.in_order([partial(_double, 5), _asleep, partial(_double, 4)]):
            break
        assert list(pool.in_order([partial(_double, value) for value in (1, 2, 3)])) == [2, 4, 6]


def test_no_more_processes_than_tasks() -> None:
    with workers(3) as pool:
        assert list(pool.in_order([partial(_double, 5)])) == [10]
        assert len(pool.processes) == 1
    assert not multiprocessing.active_children()


def test_the_error_of_a_task_says_where_in_the_worker() -> None:
    with pytest.raises(ValueError, match="no 3") as caught, workers(1) as pool:
        list(pool.in_order([partial(_fails, 3)]))
    assert "in _fails" in caught.value.__notes__[0]
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(ChildProcessError, match="exit status 7"), workers(2) as pool:
        list(pool.as_done([_dies, partial(_double, 1)]))
    assert not multiprocessing.active_children()


def test_cells_that_could_not_be_written_are_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--output", str(tmp_path / "nowhere" / "cells.jsonl")]) == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
