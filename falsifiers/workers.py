"""Worker processes of the commands."""

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that leave Ctrl-C, which a terminal sends to all of them, to this one; where it comes, they are ended at once.

    Not a Pool: its workers are daemons, which may have no children, and some procedures run in processes of their own.
    """
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=ignore_interrupts)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    pool.shutdown()


def ignore_interrupts() -> None:
    """Ctrl-C does nothing to this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
