"""Worker processes of the commands."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")


def answers(tasks: Sequence[Callable[[], T]], processes: int, in_order: bool = False) -> Iterator[T]:
    """The answers of tasks, computed in so many processes: the soonest first, or in the order of the tasks.

    An error of a task is raised, with the worker's traceback as its cause; ChildProcessError where a worker ends before it answers. Where
    an error, Ctrl-C or the caller stops early, the workers are ended at once. They leave Ctrl-C, which a terminal sends to all of them, to
    this process.
    """
    pool = ProcessPoolExecutor(min(processes, len(tasks)) or 1, multiprocessing.get_context("spawn"), _leave_interrupts)
    before = set(multiprocessing.active_children())
    finished = False
    try:
        futures = _submitted(pool, tasks)
        for future in futures if in_order else as_completed(futures):
            yield future.result()
        finished = True
    except BrokenExecutor:
        raise ChildProcessError("a worker process ended before it answered, most often for want of memory") from None
    finally:
        if not finished:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
        pool.shutdown(cancel_futures=True)


def _submitted(pool: ProcessPoolExecutor, tasks: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """The tasks handed to processes that start with Ctrl-C blocked: one that is still importing would print a traceback."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(task) for task in tasks]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _leave_interrupts() -> None:
    """Has a worker ignore Ctrl-C, which it was started with blocked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
