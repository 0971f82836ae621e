"""Groups of workers: a function runs on several ranks, each a process of its own that is gone when the run ends.

A server imports everything once and computes nothing; every rank is forked from it. So a rank may be killed without harm to the next run,
and a run costs no start of Python.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import blackswan
from blackswan.falsifiers.subjects.patching import planted, replanted
from blackswan.impl import group as groups

RUN_SECONDS = 60.0
"""A run may take so long; its ranks are killed then."""
GROUP_SECONDS = 20.0
"""A rank waits so long for the others."""
PRELOADED = ("subjects.implementation", "system.run_problem")
_FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """The end of a rank: its answer, or the error that it raised (its type and text), or the signal that ended it."""

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


def on_ranks(
    function: Callable[..., Any], size: int, arguments: tuple[Any, ...], device: object, *, by_environment: bool = False
) -> list[Outcome]:
    """Runs `function(group, device, *arguments)` on each rank, with the change of a mutant that holds here.

    The function is found by its module and name; arguments and answers travel by pickle. With `by_environment` each rank is ALONE and has
    the environment that torchrun gives, so that the function can find the others itself.
    """
    _serve()
    with tempfile.TemporaryDirectory() as folder:
        ranks, port = [], _free_port() if by_environment else None
        for rank in range(size):
            receiving, sending = _FORKS.Pipe(duplex=False)
            given = (sending, function, arguments, rank, size, str(device), Path(folder) / "group", port, planted())
            process = _FORKS.Process(target=_run, args=given, daemon=True)
            with _free_to_start():
                process.start()
            sending.close()
            ranks.append((process, receiving))
        end = time.monotonic() + RUN_SECONDS
        return [_received(process, pipe, end) for process, pipe in ranks]


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _address(size: int) -> str:
    """The address of this host; two ranks are given its IPv4 address in the notation of IPv6, which takes no network of IPv6."""
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1"
    return "::ffff:127.0.0.1" if size == 2 else "127.0.0.1"


def _serve() -> None:
    """Starts the server, where none runs, with the path of this process. One thread a rank: threads do not survive a fork."""
    path = [str(Path(blackswan.__file__).parent.parent), *filter(None, sys.path)]
    _FORKS.set_forkserver_preload([f"blackswan.falsifiers.{name}" for name in ("mutants", *PRELOADED)] + ["triton"])
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # sets have another order there than here
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1", PYTHONHASHSEED=other):
        forkserver.ensure_running()


@contextmanager
def _free_to_start() -> Iterator[None]:
    """Inside the block a daemon, such as the watchdog's process, may start processes too, which are gone with the run.

    And they do not import this program's main module, which they do not need, and which might begin its work again there.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
            yield
    finally:
        sys.modules["__main__"] = main


def _received(process: Any, pipe: "Connection[Any, Any]", end: float) -> Outcome:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        process.kill()
    try:
        outcome: Outcome | None = pipe.recv()
    except EOFError:
        outcome = None
    pipe.close()
    process.join()
    code = process.exitcode
    return outcome or Outcome(error="Died", message=f"exit status {code}", signal=-code if code < 0 else None)


def _run(
    pipe: "Connection[Any, Any]",
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    size: int,
    device: str,
    meeting: Path,
    port: int | None,
    changes: Sequence[str],
) -> None:
    """One rank. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    several = device.startswith("cuda") and torch.cuda.device_count() >= size
    own = torch.device("cuda", rank) if several else torch.device(device)
    # gloo on the host where there is no GPU for each rank: NCCL refuses two ranks on one
    exchange = own if several else torch.device("cpu")
    try:
        with replanted(changes):
            if port is not None:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}  # as if each had a machine of its own
                os.environ |= {"MASTER_ADDR": _address(size), "MASTER_PORT": str(port)}
            if size == 1 or port is not None:
                outcome = Outcome(function(groups.ALONE, own, *arguments))
            else:
                with groups.connected(rank, size, exchange, f"file://{meeting}", timeout=GROUP_SECONDS) as group:
                    outcome = Outcome(function(group, own, *arguments))
    except Exception as error:  # whatever a rank raises is its outcome
        outcome = Outcome(error=type(error).__name__, message=str(error))
    if torch.distributed.is_initialized():
        outcome = Outcome(error="Joined", message=f"is in the group still, after {outcome.ended or 'its answer'}")
    pipe.send(outcome)
