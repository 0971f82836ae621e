"""Commands as users run them: in a terminal of their own, where Ctrl-C goes to all their processes, and what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


QUICK = ("--effort", "quick", *PLAIN)

SEVERAL = """
import contextlib, io, json, sys
import pytest
for arguments in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = pytest.main(arguments)
    print(json.dumps([int(status), out.getvalue()]), flush=True)
"""


class Run(NamedTuple):
    status: int
    text: str

    def verdict(self, file: Path) -> dict[str, Any]:
        """The only verdict of the file."""
        (record,) = [record for record in records(file) if record["record"] == "verdict"]
        return record


def command(*arguments: object, tree: Path = ROOT, folder: Path | None = None) -> Run:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", str(tree / "falsifiers") if folder else "falsifiers", *QUICK, *map(str, arguments)],
        cwd=folder or tree,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return Run(ran.returncode, ran.stdout + ran.stderr)


def several(lines: list[list[str]], tree: Path = ROOT) -> list[Run]:
    """The same command many times in one process, since it takes seconds to start."""
    given = json.dumps([["falsifiers", *QUICK, *line] for line in lines])
    ran = subprocess.run(
        [sys.executable, "-c", SEVERAL], cwd=tree, env=ENVIRONMENT, input=given, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    return [Run(*json.loads(line)) for line in ran.stdout.splitlines()]


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}
