"""The exit status of a command that was interrupted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run([sys.executable, "-c", "from impl.ending import leave; leave(7, 130)"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")
