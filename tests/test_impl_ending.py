"""The exit status of a command that was interrupted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blackswan.impl.signals import interrupts_first, no_interrupt_lost

ROOT = Path(__file__).resolve().parent.parent
CAUGHT = """
import sys
from impl.ending import leave
try:
    exec("raise KeyboardInterrupt")
except KeyboardInterrupt:
    print("caught")
"""


@pytest.mark.parametrize(("end", "expected"), [("sys.exit(130)", -2), ("leave(130, 130)", 130), ("leave(7, 130)", -2)])
def test_an_interrupt_inside_text_that_was_executed(end: str, expected: int, tmp_path: Path) -> None:
    """The first line is what CPython does, and why there is `leave`."""
    (tmp_path / "interrupted.py").write_text(CAUGHT + end)
    given = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(given, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "caught\n", "")


def test_other_statuses() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from blackswan.impl.signals import interrupts_first, leave; leave(7, 130)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (7, "")


COLLECTED = """
import gc, os, signal, sys, time
from contextlib import nullcontext
from impl.ending import no_interrupt_lost

signal.signal(signal.SIGINT, signal.default_int_handler)
came = []

def interrupted_once(phase, info):
    if not came:
        came.append(phase)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

try:
    with no_interrupt_lost() if sys.argv[1] == "kept" else nullcontext():
        gc.callbacks.append(interrupted_once)
        gc.collect()
        time.sleep(3)
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("how", "expected", "said"), [("lost", "went on", "Exception ignored"), ("kept", "interrupted", "")])
def test_an_interrupt_of_the_garbage_collector(how: str, expected: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED, how], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == expected + "\n"
    assert said in done.stderr if said else not done.stderr


def test_other_exceptions_that_python_lets_out_of_nowhere_go_where_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    former = sys.unraisablehook

    class Raises:
        def __del__(self) -> None:
            raise KeyError

    with no_interrupt_lost():
        Raises()
    assert (seen, sys.unraisablehook) == ([KeyError], former)


def test_an_error_that_an_interrupt_led_to_is_the_interrupt() -> None:
    def fails_when_it_cleans_up() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            assert not sys

    with pytest.raises(KeyboardInterrupt), interrupts_first():
        fails_when_it_cleans_up()
    with pytest.raises(KeyboardInterrupt), interrupts_first():
        raise ValueError from KeyboardInterrupt()


def test_other_errors_stay_what_they_are() -> None:
    around = ValueError("around")
    around.__context__ = KeyError("within")
    around.__context__.__cause__ = around
    with pytest.raises(ValueError, match="around") as caught, interrupts_first():
        raise around
    assert caught.value is around
