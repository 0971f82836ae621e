"""Commands whose output nobody reads to its end, or that has no room: never a success, and never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from terminal_processes import ROOT

from contracts.output import READER_GONE
from falsifiers.data import CHECKPOINT

EVIDENCE = next((ROOT / "reports" / "evidence").glob("*.jsonl"))
COMMANDS = {
    "contracts lint": 2,
    "contracts list": 2,
    f"reports check {EVIDENCE}": 2,
    "falsifiers depends": 2,
    f"impl summary --model {CHECKPOINT}": 1,
}


def ended(command: str, output: int) -> tuple[int, str]:
    """Exit status and errors."""
    asked = [sys.executable, "-m", *command.split()]
    done = subprocess.run(asked, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_has_gone(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(command, writer) == (READER_GONE, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize(("command", "status"), COMMANDS.items())
def test_a_disk_that_is_full(command: str, status: int) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("wb") as output:
        found, error = ended(command, output.fileno())
    assert found == status
    assert "No space left on device" in error
    assert error.count("\n") == 1
