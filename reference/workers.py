"""Independent pieces of work shared among the cores, as BLAS shares its products; which core does what changes no bit."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import TypeVar

T = TypeVar("T")


def count() -> int:
    """OMP_NUM_THREADS, which BLAS takes as well, or one for each core of the process."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, count() - 1))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def for_each(function: Callable[[T], None], items: Sequence[T]) -> None:
    """function(item) for every item, in no order: the items touch nothing in common, and call this no further."""
    share = min(count(), len(items))
    if share < 2:
        for item in items:
            function(item)
        return

    def some(first: int) -> None:
        for item in items[first::share]:
            function(item)

    # In a copy of the context each, since NumPy keeps there what it does about an overflow.
    others = [_pool().submit(copy_context().run, some, first) for first in range(1, share)]
    try:
        some(0)
    finally:
        errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error
