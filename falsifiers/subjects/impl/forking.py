"""Forks the ranks of a run: `python -m blackswan.falsifiers.subjects.impl.forking FD`, where FD is a connection of `Workers`."""

import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeAlias

import torch

from blackswan.falsifiers.subjects.impl.workers import RUN_SECONDS, Outcome, Task
from blackswan.falsifiers.subjects.patching import replanted
from blackswan.impl.group import ALONE, connected

GROUP_SECONDS = 20.0
"""What a rank waits for the others."""

Channel: TypeAlias = "Connection[Any, Any]"


def serve(pipe: Channel) -> None:
    """Runs what is asked for until the other end is closed. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_module("blackswan.falsifiers.subjects.implementation")  # once, before any rank is forked
    pipe.send("ready")
    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        pipe.send(_outcomes(task, pipe))


def _outcomes(task: Task, parent: Channel) -> list[Outcome]:
    """What each rank ended with. Ranks that are late, or whose asker has gone, are killed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_forked(task, rank, folder, parent) for rank in range(task.size)]
        results: dict[int, Outcome] = {}
        end = time.monotonic() + RUN_SECONDS
        while len(results) < task.size:
            waiting = {ranks[rank][1]: rank for rank in range(task.size) if rank not in results}
            ready = wait([*waiting, parent], max(0.0, end - time.monotonic()))
            if not ready or parent in ready:
                for rank in waiting.values():
                    os.kill(ranks[rank][0], signal.SIGKILL)
                ready = list(waiting)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]  # `wait` is typed for sockets and handles as well
                results[rank] = _received(ranks[rank][0], ranks[rank][1])
        return [results[rank] for rank in range(task.size)]


def _received(process: int, pipe: Channel) -> Outcome:
    try:
        outcome: Outcome | None = pipe.recv()
    except EOFError:
        outcome = None
    pipe.close()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return outcome or Outcome(error="Died", message=f"exit status {status}", signal=-status if status < 0 else None)


def _forked(task: Task, rank: int, folder: str, parent: Channel) -> tuple[int, Channel]:
    """The process of a rank and the pipe of its outcome."""
    receiving, sending = Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        try:
            parent.close()
            receiving.close()
            sending.send(_outcome(task, rank, folder))
        finally:
            os._exit(0)
    sending.close()
    return process, receiving


def _outcome(task: Task, rank: int, folder: str) -> Outcome:
    device = torch.device(task.device)
    several = device.type == "cuda" and torch.cuda.device_count() >= task.size
    own = torch.device("cuda", rank) if several else device
    try:
        with replanted(task.mutant):
            if task.size == 1:
                return Outcome(task.function(ALONE, own, *task.arguments))
            # gloo on the host where there is no GPU for each rank: NCCL refuses two ranks on one
            exchange = own if several else torch.device("cpu")
            with connected(rank, task.size, exchange, f"file://{folder}/group", timeout=GROUP_SECONDS) as group:
                return Outcome(task.function(group, own, *task.arguments))
    except Exception as error:  # whatever a rank raises is its outcome
        return Outcome(error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
