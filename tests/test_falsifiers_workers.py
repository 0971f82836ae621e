"""Ctrl-C in the commands that run in several processes: one line, no traceback, nothing left running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from falsifiers.__main__ import main
from falsifiers.workers import workers

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = [f"--claim={name}" for name in ("CLS-GRADIENT", "CLS-FORWARD", "FWD-DECODER", "BWD-DECODER")]


@pytest.mark.parametrize("seconds", [2.0, 4.0, 9.0])
def test_an_interrupt_of_all_processes_at_any_time_is_one_line(seconds: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "falsifiers", "power", *CLAIMS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A run in the background of a shell inherits that it ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # single-threaded
    )
    try:
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, err.strip()) == (130, "interrupted")
    assert gone(process.pid)


def gone(group: int) -> bool:
    """Whether no process of the group is left, soon."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def _asleep() -> None:
    time.sleep(60)


def test_what_stops_the_parent_ends_the_workers_at_once() -> None:
    def stopped() -> None:
        with workers(1) as pool:
            pool.submit(_asleep)
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert time.monotonic() - start < 30


def test_cells_that_could_not_be_written_are_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--output", str(tmp_path / "nowhere" / "cells.jsonl")]) == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
