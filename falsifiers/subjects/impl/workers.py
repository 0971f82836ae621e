"""Groups of workers for what runs in several processes.

One process, started once, imports everything and computes nothing; for each run it forks as many ranks as are wanted, which are gone when
the run ends. A rank may be killed without harm to the next run, and a run costs no start of Python. See `forking` for the other end.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import blackswan
from blackswan.falsifiers.subjects.patching import planted

START_SECONDS = 120.0
"""What the process may take to import everything."""
RUN_SECONDS = 60.0
"""What a run may take; its ranks are killed then."""


@dataclass(frozen=True)
class Task:
    """A function of (group, device, *arguments) for `size` ranks, with a mutant's step of `impl` in place of the right one.

    The function is found by its module and name; arguments and answers travel by pickle.
    """

    function: Callable[..., Any]
    size: int
    arguments: tuple[Any, ...] = ()
    device: str = "cpu"
    mutant: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a rank ended with: its answer, or the error that it raised (its type and text), or the signal that ended it."""

    answer: Any = None
    error: str | None = None
    message: str = ""
    signal: int | None = None

    @property
    def ended(self) -> str:
        """How, in words: "" with an answer, "killed" by SIGKILL, else the error and its text."""
        if self.signal == signal.SIGKILL:
            return "killed"
        return "" if self.error is None else f"{self.error}: {self.message}"


def on_ranks(function: Callable[..., Any], size: int, arguments: tuple[Any, ...], device: object) -> list[Outcome]:
    """The outcome of that function on each rank, with the mutant that is planted here planted there."""
    return WORKERS.run(Task(function, size, arguments, str(device), planted()))


class Workers:
    """The process that forks the ranks: started by the first run, and again where it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    def run(self, task: Task) -> list[Outcome]:
        """The outcome of each rank. Raises a RuntimeError where the forking process itself gives none."""
        pipe = self._started()
        try:
            pipe.send(task)
            if pipe.poll(RUN_SECONDS + 10.0):
                outcomes: list[Outcome] = pipe.recv()
                return outcomes
        except (EOFError, OSError):
            pass
        self.close()
        raise RuntimeError(f"the process that forks the workers died or hung in {task.function.__name__}")

    def close(self) -> None:
        """Ends the process, where there is one."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._pipe = None

    def _started(self) -> "Connection[Any, Any]":
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._pipe is None:
            self._pipe, theirs = Pipe()
            command = [sys.executable, "-m", "blackswan.falsifiers.subjects.impl.forking", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=_environment(), stdin=subprocess.DEVNULL)  # noqa: S603  # this program's own module
            theirs.close()
            self._await_start(self._pipe)
        return self._pipe

    def _await_start(self, pipe: "Connection[Any, Any]") -> None:
        try:
            if pipe.poll(START_SECONDS):
                pipe.recv()
                return
        except (EOFError, OSError):
            pass
        self.close()
        raise RuntimeError(f"the process that forks the workers did not start within {START_SECONDS:g} s, or ended at once")


def _environment() -> dict[str, str]:
    """One thread a rank: threads do not survive a fork, and each rank is one of several on the machine."""
    path = [str(Path(blackswan.__file__).parent.parent), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


WORKERS = Workers()
Finalize(None, WORKERS.close, exitpriority=10)  # at the end of a main program and of a multiprocessing child, where atexit is not heeded
