"""Freed memory that stays with the process for the next array, where libc is glibc.

By itself glibc asks the system for every large array anew and gives it back when it is freed. The system then clears its pages one by one
as they are first written, which for the arrays of a large model takes longer than the arithmetic on them (mallopt(3), malloc_trim(3)).
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Parameters of mallopt, from malloc.h."""


class _Blocks:
    """The blocks of `kept` that are open, in any thread."""

    def __init__(self) -> None:
        self._open, self._lock = 0, threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self._open += 1

    def leave(self) -> bool:
        """Whether none is left."""
        with self._lock:
            self._open -= 1
            return not self._open


_BLOCKS = _Blocks()


@contextmanager
def kept() -> Iterator[None]:
    """Inside, freed memory is kept for the next array; at the end of the outermost block what is free goes back to the system.

    glibc's thresholds stay as they are set here: to put them back lets go of the address space, and with it of the large pages that
    NumPy asked for there. So what later code frees stays too, up to the end of the next block. Arrays of more than 32 MiB, the most that
    glibc takes for a threshold, are as before. With another libc nothing happens.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    _BLOCKS.enter()
    try:
        yield
    finally:
        if _BLOCKS.leave():
            libc.malloc_trim(0)
