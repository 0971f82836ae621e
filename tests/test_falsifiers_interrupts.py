"""Ctrl-C in `pytest falsifiers`, wherever it comes: the run is interrupted, and its file says so."""

import signal
import time
from pathlib import Path

import pytest
from terminal_processes import ENVIRONMENT, PLAIN, records, started

DURING_A_COLLECTION = """
import gc, os, signal, sys

came = []

def interrupt_once(phase, info):
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "falsify":
        frame = frame.f_back
    if frame is not None and not came:
        came.append(phase)
        os.kill(os.getpid(), signal.SIGINT)

gc.callbacks.append(interrupt_once)
"""
WHERE_NO_LINE_IS = """
def interrupt():
    raise KeyboardInterrupt

interrupt.__code__ = interrupt.__code__.replace(co_linetable=b"")

def pytest_runtest_call(item):
    interrupt()
"""

BEFORE_THE_FIRST_DRAW = """
import inspect

def interrupt(test):
    raise KeyboardInterrupt

def pytest_runtest_call(item):
    inspect.getsource = interrupt
"""
PLACES = {
    "during a collection of garbage": DURING_A_COLLECTION,
    "where no line is": WHERE_NO_LINE_IS,
    "before Hypothesis draws": BEFORE_THE_FIRST_DRAW,
}


@pytest.mark.parametrize("plugin", PLACES.values(), ids=PLACES)
def test_an_interrupt_is_neither_lost_nor_a_failure(plugin: str, tmp_path: Path) -> None:
    (tmp_path / "interrupting.py").write_text(plugin)
    file = tmp_path / "verdicts.jsonl"
    asked = ["--verdicts", str(file), "--effort", "deep", "--claim", "OP-ATTENTION-GRADIENT"]
    found = {"PYTHONPATH": str(tmp_path)}
    process = started("-m", "pytest", "falsifiers", *PLAIN, "-p", "interrupting", *asked, environment=ENVIRONMENT | found)
    out, err = process.communicate(timeout=180)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    assert records(file)[-1]["interrupted"] is True
    assert "failed" not in out
    assert "Traceback" not in out + err


def test_ctrl_c_leaves_a_readable_verdict_file(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    asked = ["--verdicts", str(file), "--effort", "deep", "--claim", "OP-RESIDUAL", "--claim", "OP-ATTENTION-GRADIENT"]
    process = started("-m", "pytest", "falsifiers", *PLAIN, *asked, environment=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < deadline and '"verdict"' not in (file.read_text() if file.exists() else ""):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    found = records(file)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, text
    assert [found[0]["record"], found[-1]["record"]] == ["run", "end"]
    assert found[-1]["interrupted"] is True
    assert found[-1]["exit_status"] == 2
    verdicts = [record for record in found if record["record"] == "verdict"]
    assert verdicts
    assert sum(found[-1]["totals"].values()) == len(verdicts)
    assert "verdicts" in text
