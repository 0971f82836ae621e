"""What a program that calls another one has in common with it in one process, and must find again afterwards, whatever the end.

A setting that was changed is put back where that can be, so that what is asked next is asked in the same process as before.
"""

import gc
import locale
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.subjects.shared import Setting, difference, process_settings, torch_settings

SWITCHES = {
    "blackswan.impl.dispatch": ("_replacements", "_calls", "_around", "_prefix", "_scopes", "_backend"),
    "blackswan.impl.validation": ("_enabled", "_blocks"),
}
"""Names of a module that hold for a block of a program, and which every call of the program asks."""
PATIENCE = 5.0
"""Seconds in which a thread that is about to end has to."""
NARROW = {"bfloat16": "allow_bf16_reduced_precision_reduction", "float16": "allow_fp16_reduced_precision_reduction"}
"""Switches of torch that the choice of a GPU turns off for the process, as `impl.device.resolve_device` says; one turned on is a change."""


class Process:
    """The process as it is when this is made."""

    def __init__(self) -> None:
        self._before, self._open, self._threads = dict(_settings()), _open_files(), set(threading.enumerate())

    def changes(self) -> list[str]:
        """What is otherwise now, in words; it is put back."""
        now, found = dict(_settings()), []
        for name, (value, put_back) in self._before.items():
            turned_off = name in {f"torch's sums of {dtype} products" for dtype in NARROW} and not now[name][0]
            if value != now[name][0] and not turned_off:
                found.append(f"{name}: {difference(value, now[name][0])}")
                with suppress(OSError, ValueError, TypeError, RuntimeError):  # it is reported, whether it can be put back or not
                    put_back(value)
        if _open_files() - self._open:
            gc.collect()  # what an error's traceback holds is let go of with it
        found += [f"{name} is open still" for name in sorted(_open_files() - self._open)]
        return found + [
            f"thread {name} runs still" for name in sorted(map(_still_running, set(threading.enumerate()) - self._threads)) if name
        ]


def _open_files() -> set[str]:
    """Descriptors of files and folders where temporary ones are; others are opened by libraries, once and for all."""
    found, listed = set(), Path("/proc/self/fd")
    for each in listed.iterdir() if listed.is_dir() else ():  # which Linux alone has
        with suppress(OSError):  # that of the listing itself is gone
            found.add(f"{each.name}: {each.readlink()}")
    return {each for each in found if f": {tempfile.gettempdir()}/" in each}


def _settings() -> Iterator[tuple[str, Setting]]:
    yield from process_settings().items()
    for module, names in SWITCHES.items():
        if (loaded := sys.modules.get(module)) is not None:
            known = (name for name in names if hasattr(loaded, name))  # a subject may keep what it switches elsewhere
            yield from ((f"{module}.{name}", (getattr(loaded, name), partial(setattr, loaded, name))) for name in known)
    yield "hook of uncaught errors", (sys.excepthook, partial(setattr, sys, "excepthook"))
    yield "output and error stream", ((sys.stdout, sys.stderr), _put_back_streams)
    yield "locale", (locale.setlocale(locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL))
    yield "collection of garbage", (gc.isenabled(), lambda on: gc.enable() if on else gc.disable())
    yield "limits of garbage", (gc.get_threshold(), lambda were: gc.set_threshold(*were))
    yield "handlers and level of the log", ((list(logging.root.handlers), logging.root.level, logging.root.manager.disable), lambda _: None)
    yield "folder of temporary files", (tempfile.gettempdir(), partial(setattr, tempfile, "tempdir"))
    if hasattr(os, "sched_getaffinity"):  # on Linux
        yield "processors", (os.sched_getaffinity(0), partial(os.sched_setaffinity, 0))
    yield "priority", (os.getpriority(os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0))
    yield "patience of sockets", (socket.getdefaulttimeout(), socket.setdefaulttimeout)
    yield "start of processes", (_start_of_processes(), partial(multiprocessing.set_start_method, force=True))
    yield "how NumPy shows arrays", (np.get_printoptions(), lambda were: np.set_printoptions(**were))
    yield "gradients", ((torch.is_grad_enabled(), torch.is_inference_mode_enabled()), lambda were: torch.set_grad_enabled(were[0]))
    put_back: dict[str, Callable[[Any], object]] = {
        "default dtype": torch.set_default_dtype,
        "number of threads": torch.set_num_threads,
        "deterministic algorithms": torch.use_deterministic_algorithms,
        "precision of float32 products": torch.set_float32_matmul_precision,
        "search for anomalies": torch.autograd.set_detect_anomaly,
        "flushing of subnormal numbers": torch.set_flush_denormal,
    }
    products = torch.backends.cuda.matmul
    put_back |= {f"sums of {dtype} products": partial(setattr, products, switch) for dtype, switch in NARROW.items()}
    yield from ((f"torch's {name}", (value, put_back.get(name, lambda _: None))) for name, value in torch_settings().items())


def _start_of_processes() -> str:
    """How processes start; the system's own way is the first of all, and holds where none was chosen."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _still_running(thread: threading.Thread) -> str:
    """The name of a thread that Python started and that does not end by itself at once; else nothing.

    Others, as those of a GPU's backward pass, only came by, and tqdm's, which watches all bars, stays for as long as the process.
    """
    if isinstance(thread, threading._DummyThread) or type(thread).__module__.startswith("tqdm."):
        return ""
    thread.join(PATIENCE)
    return thread.name if thread.is_alive() else ""


def _put_back_streams(before: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = before
