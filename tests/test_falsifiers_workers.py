"""Worker processes: their answers, their errors, and Ctrl-C: one line, no traceback, nothing left running."""

import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import pytest
from terminal_processes import interrupted, started

from blackswan.falsifiers.__main__ import main
from blackswan.falsifiers.runner.workers import answers

CLAIMS = [f"--claim={name}" for name in ("CLS-GRADIENT", "CLS-FORWARD", "FWD-DECODER", "BWD-DECODER")]


def test_an_interrupt_of_all_processes_at_work_is_one_line() -> None:
    process = started("-m", "falsifiers", "power", *CLAIMS)
    children, end = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 60
    while len(children.read_text().split()) < 2 and time.monotonic() < end:  # a worker, and what tracks resources
        time.sleep(0.1)
    time.sleep(1.0)  # an interrupt inside an import prints what Python prints of it
    assert interrupted(process) == (130, "interrupted")


def _asleep() -> None:
    time.sleep(60)


def test_what_stops_the_parent_ends_the_workers_at_once() -> None:
    def stopped() -> None:
        for _ in answers([partial(_double, 5), _asleep], 1):
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert time.monotonic() - start < 30
    assert not multiprocessing.active_children()


def _double(value: float) -> float:
    time.sleep(0.2 / value)
    return 2 * value


def _fails(value: int) -> int:
    raise ValueError(f"no {value}")


def _dies() -> int:
    os._exit(7)


def test_each_task_is_answered_once() -> None:
    tasks = [partial(_double, value) for value in (1, 2, 3, 4, 5)]
    assert sorted(answers(tasks, 2)) == [2, 4, 6, 8, 10]
    assert list(answers(tasks, 2, in_order=True)) == [2, 4, 6, 8, 10]
    assert list(answers([], 2)) == []
    assert not multiprocessing.active_children()


def test_the_soonest_answer_comes_first_unless_the_order_counts() -> None:
    tasks = [partial(_double, 0.2), partial(_double, 50)]
    assert list(answers(tasks, 2)) == [100, 0.4]
    assert list(answers(tasks, 2, in_order=True)) == [0.4, 100]


def test_answers_that_nobody_waits_for_are_not_waited_for() -> None:
    start = time.monotonic()
    for _ in answers([partial(_double, 5), _asleep, partial(_double, 4)], 2, in_order=True):
        break
    assert time.monotonic() - start < 30
    assert not multiprocessing.active_children()


def test_the_error_of_a_task_says_where_in_the_worker() -> None:
    with pytest.raises(ValueError, match="no 3") as caught:
        list(answers([partial(_fails, 3)], 1))
    assert "in _fails" in str(caught.value.__cause__)
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(ChildProcessError, match="ended before it answered"):
        list(answers([_dies, partial(_double, 1)], 2))
    assert not multiprocessing.active_children()


def test_cells_that_could_not_be_written_are_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--output", str(tmp_path / "nowhere" / "cells.jsonl")]) == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
