"""A disk that is slow while other threads of a program work."""

import gc
import hashlib
import io
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic, sleep  # not the clock that goes ahead while a run is watched
from typing import Any
from unittest import mock

from torch import Tensor

from blackswan.falsifiers.subjects.patching import opening

Wait = Callable[[str], None]
"""Is given what is called: `sha256`, `write`, `pwrite` or `fsync`."""
PATIENCE = 1.0
"""Seconds that a thread beside the run waits for the next step of a small model, which takes a hundredth of that."""
KINDS = 4
"""There are so many kinds of call that a thread waits in: see `Wait`."""
PAUSE = 0.5
"""Seconds that a write takes while other threads work, in which they can convert a small model many times."""


@contextmanager
def slow(wait: Wait) -> Iterator[None]:
    """Inside the block `wait` is called before a call writes to a file, flushes one or begins a hash. At its end the block waits for the
    threads that began inside, at most for what a thread may wait for."""
    real, before = io.open, {*threading.enumerate()}

    class Slow(io.FileIO):
        def write(self, content: Any) -> int:
            wait("write")
            return super().write(content)

    def opened(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
        if "b" not in mode or mode == "rb":
            return real(file, mode, buffering, *given, **named)
        raw = Slow(file, mode, **{name: value for name, value in named.items() if name in ("closefd", "opener")})
        return raw if buffering == 0 else io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    def late(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def waited(*given: Any, **named: Any) -> Any:
            wait(kind)
            return call(*given, **named)

        return waited

    with ExitStack() as stack:
        stack.enter_context(opening(opened))
        for module, name in ((os, "write"), (os, "pwrite"), (os, "fsync"), (hashlib, "sha256")):
            stack.enter_context(mock.patch.object(module, name, late(getattr(module, name), name)))
        stack.enter_context(mock.patch.object(os, "fdatasync", late(os.fdatasync, "fsync")))
        try:
            yield
        finally:
            end = monotonic() + KINDS * PATIENCE
            for each in {*threading.enumerate()} - before:
                with suppress(RuntimeError):  # a thread that Python did not begin cannot be joined
                    each.join(max(0.0, end - monotonic()))


def until_the_next_step(parameters: Collection[Tensor]) -> Wait:
    """Lets another thread than the one that asks for this wait until a step has moved the parameters, PATIENCE at most for all calls
    of a kind from one step to the next. The thread that makes the steps never waits, and none waits while it waits for another."""
    own, until = threading.get_ident(), dict[tuple[str, float], float]()

    def moment() -> float:
        return sum(float(each.detach().double().sum()) for each in parameters)

    def wait(kind: str) -> None:
        if threading.get_ident() == own:
            return
        began = moment()
        end = until.setdefault((kind, began), monotonic() + PATIENCE)
        while moment() == began and monotonic() < end:
            if _waits(own):
                until.clear()  # whoever begins after that wait has all of his patience
                return
            sleep(0.001)

    return wait


def _waits(thread: int) -> bool:
    """Says whether the thread waits for another one, which has begun already."""
    frame, names = sys._current_frames().get(thread), set[str]()  # documented, in spite of its name
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return not names.isdisjoint({"wait", "join"}) and "start" not in names


def held_by_then(mapped: Collection[int], found: list[int]) -> Wait:
    """Notes in `found` the bytes of tensors that are held at each call, of whatever thread, without files of a size in `mapped` and what
    was frozen before. The first call beside which threads have begun takes PAUSE."""
    before, paused = set(threading.enumerate()), list[bool]()

    def wait(_: str) -> None:
        if not paused and set(threading.enumerate()) - before:
            paused.append(True)
            sleep(PAUSE)
        # The type is asked, because isinstance follows a weak proxy to an object that may be gone.
        storages = (each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu")
        sizes = {each.data_ptr(): each.nbytes() for each in storages}
        found.append(sum(size for size in sizes.values() if size not in mapped))

    return wait
