"""Worker processes of the commands."""

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import InvalidStateError, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that leave Ctrl-C, which a terminal sends to all of them, to this one; where it comes, they are ended at once.

    Not a Pool: its workers are daemons, which may have no children, and some procedures run in processes of their own.
    """
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=ignore_interrupts)
    try:
        _start(pool, count)
        yield pool
    except BaseException:
        _silence_cancelled()
        if (tasks := getattr(pool, "_call_queue", None)) is not None:
            tasks.cancel_join_thread()  # nobody reads on: what is left there would be waited for when the process ends
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    pool.shutdown()


def _start(pool: ProcessPoolExecutor, count: int) -> None:
    """Starts all workers with Ctrl-C blocked, as it stays in them until they ignore it: one that still imports would print a traceback."""
    resource_tracker.ensure_running()  # which unblocks it when it starts
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):  # each task starts one, as none is idle yet
            pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _silence_cancelled() -> None:
    """A pool's thread that finds its workers ended may give their error to futures that are cancelled, which raises one more in it."""
    former = threading.excepthook

    def unless_cancelled(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not InvalidStateError:
            former(args)

    threading.excepthook = unless_cancelled


def ignore_interrupts() -> None:
    """Ctrl-C does nothing to this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
