"""Commands as users run them: in a terminal of their own, where Ctrl-C goes to all their processes, and what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
PLAIN = ("-q", "-p", "no:cacheprovider")


def started(*arguments: str, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Python with these arguments, in the checkout, as a process group."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A run in the background of a shell inherits that it ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # single-threaded
    )


def interrupted(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit status and errors of a process after Ctrl-C; nothing is left of its group, or that is an error."""
    with process:  # closes its pipes, whatever comes
        try:
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert gone(process.pid)
        finally:
            if not gone(process.pid, patience=0):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, err.strip()


def gone(group: int, patience: float = 10.0) -> bool:
    """Whether no process of the group is left, after so many seconds at most."""
    end = time.monotonic() + patience
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)


def records(file: Path) -> list[dict[str, Any]]:
    """The lines of a verdict file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
