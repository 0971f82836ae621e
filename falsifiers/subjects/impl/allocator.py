"""Counts the bytes that a device's allocator gives out while something runs."""

import atexit
import gc
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._C._profiler import RecordScope

from blackswan.falsifiers.subjects.protocol import Lacks

atexit.register(gc.unfreeze)  # libraries would say that what is frozen has leaked


@contextmanager
def allocated(place: torch.device, mapped: Collection[int] = ()) -> Iterator[dict[str, int]]:
    """After the block: `peak`, the most bytes given out beyond those at its start, and `kept`, those at its end beyond those.

    Mapping a file, of a size in `mapped`, takes none. Lacks where nothing counts the bytes of that kind of device.
    """
    if place.type not in ("cpu", "cuda"):
        raise Lacks(f"nothing counts the bytes of {place.type}")
    found: dict[str, int] = {}
    gc.collect()
    gc.freeze()  # what is alive here, modules for the most part, need not be searched for garbage again
    yield from _counted(place, mapped, found)


def _counted(place: torch.device, mapped: Collection[int], found: dict[str, int]) -> Iterator[dict[str, int]]:
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        yield found
        found["peak"] = torch.cuda.max_memory_allocated(place) - before
        found["kept"] = torch.cuda.memory_allocated(place) - before
        return
    # Not torch.profiler's, which makes an object of each event; and of events no operation's, for the time that they take.
    profiler: Any = torch.autograd.profiler.profile(profile_memory=True)
    of_memory = partial(vars(torch.autograd)["_enable_profiler"], scopes={RecordScope.USER_SCOPE})
    with _silent(), mock.patch.object(torch.autograd.profiler, "_enable_profiler", of_memory):
        profiler.__enter__()
    try:
        yield found
    finally:
        with _silent():
            profiler.__exit__(None, None, None)
    # Among them are those of a GPU, where there is one.
    memory = (event for event in profiler.kineto_results.events() if event.name() == "[memory]")
    events = sorted((event.start_ns(), event.nbytes()) for event in memory if event.device_type().name == "CPU")
    live = np.cumsum([0, *(size for _, size in events if abs(size) not in mapped)])
    found |= {"peak": int(live.max()), "kept": int(live[-1])}


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler's library says on standard error that it begins and ends."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
