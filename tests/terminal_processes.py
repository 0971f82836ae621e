"""Commands as in a terminal of their own, where Ctrl-C goes to all their processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def started(*arguments: str) -> "subprocess.Popen[str]":
    """Python with these arguments, in the checkout, as a process group."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
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
