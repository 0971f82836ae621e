"""Commands as users run them: in a terminal of their own, where Ctrl-C goes to all their processes, and what they leave."""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
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
import contextlib, functools, io, json, sys
import pytest
for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = pytest.main(json.loads(line))
    print(json.dumps([int(status), out.getvalue()]), flush=True)
    contracts = sys.modules["blackswan.contracts"]  # which pytest imports, that it can rewrite its assert statements
    if not hasattr(contracts.load, "cache_info"):
        contracts.load = functools.cache(contracts.load)
"""


class Run(NamedTuple):
    status: int
    text: str

    def refuses(self, status: int, *words: str) -> None:
        """It ended so, with one message that has these words, and no traceback."""
        assert self.status == status, self.text
        assert [word for word in words if word not in self.text] == [], self.text
        assert self.text.count("blackswan: ") + self.text.count("error: ") == 1, self.text
        assert "Traceback" not in self.text, self.text
        assert "INTERNALERROR" not in self.text, self.text

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


def several(lines: list[list[str]]) -> list[Run]:
    """The same command many times, in one process for all tests, since it takes seconds to start."""
    if not _kept:
        _kept.append(_server(ROOT))
        atexit.register(_kept[0].kill)
    return [_asked(_kept[0], line) for line in lines]


_kept: "list[subprocess.Popen[str]]" = []


@contextmanager
def serving(tree: Path = ROOT) -> Iterator[Callable[[list[str]], Run]]:
    """The same in a process of its own, with the environment and the tree as they are now."""
    with _server(tree) as server:
        yield partial(_asked, server)


def _server(tree: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SEVERAL]
    return subprocess.Popen(command, cwd=tree, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _asked(server: "subprocess.Popen[str]", line: list[str]) -> Run:
    limit = Timer(600, server.kill)
    limit.start()
    try:
        print(json.dumps(["falsifiers", *QUICK, *map(str, line)]), file=server.stdin, flush=True)
        return Run(*json.loads(server.stdout.readline()))
    finally:
        limit.cancel()


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}
