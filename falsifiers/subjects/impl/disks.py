"""What disks and calls on files do in a block: fewer bytes at a time, no exchange of names, no room, something that happens meanwhile."""

import ctypes
import errno
import gc
import io
import itertools
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.subjects.patching import opening

UNKNOWN_FLAG = 0x80
"""A bit that renameat2 does not know, and refuses."""


@contextmanager
def exchanging(code: int) -> Iterator[None]:
    """Inside the block the system's library has no call that exchanges two names, or one that ends with that error.

    EINVAL is what the system itself says, of flags that it does not have: its number is then where the system's library leaves it.
    """

    find = ctypes.CDLL.__getattr__

    def refused(call: Callable[..., int], *given: Any) -> int:
        ctypes.set_errno(0 if code == errno.EINVAL else code)
        return call(*given[:-1], UNKNOWN_FLAG) if code == errno.EINVAL else -1

    def found(library: ctypes.CDLL, name: str) -> Any:
        if name != "renameat2":
            return find(library, name)
        if not code:
            raise AttributeError(name)
        return partial(refused, library[name])

    for library in [each for each in gc.get_objects() if issubclass(type(each), ctypes.CDLL)]:
        vars(library).pop("renameat2", None)  # it is kept where it was found before
    with mock.patch.object(ctypes.CDLL, "__getattr__", found):
        yield


@contextmanager
def renaming(before: int) -> Iterator[None]:
    """Inside the block a path cannot be renamed once, after so many times."""
    made = itertools.count()

    def rename(real: Callable[..., None], *given: Any, **named: Any) -> None:
        if next(made) == before:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*given, **named)

    calls: dict[str, Any] = {name: partial(rename, getattr(os, name)) for name in ("rename", "replace")}
    with mock.patch.multiple(os, **calls):
        yield


@contextmanager
def once_begun(meanwhile: Callable[[], object]) -> Iterator[None]:
    """Inside the block something happens once, when a folder was made to write into."""
    real, left = os.mkdir, [meanwhile]

    def made(*given: Any, **named: Any) -> None:
        real(*given, **named)
        if left:
            left.pop()()

    with mock.patch.object(os, "mkdir", made):
        yield


@contextmanager
def at_the_last_opening(path: Path, tensors: Mapping[str, torch.Tensor], meanwhile: Callable[[], object]) -> Iterator[None]:
    """Inside the block, in which the tensors are read, something happens where that file is opened for the last of them.

    They are read once before, by which it is known how often the file is opened.
    """
    real, place, times = io.open, os.path.realpath(path), 0

    def opened(file: Any, *given: Any, **named: Any) -> Any:
        nonlocal times
        if not isinstance(file, int) and os.path.realpath(file) == place:
            times += 1
            if times == last:
                meanwhile()
        return real(file, *given, **named)

    last = 0
    with opening(opened):
        dict(tensors)
        last, times = times, 0
        yield


@contextmanager
def when_first_closed(path: Path, meanwhile: Callable[[], object]) -> Iterator[None]:
    """Inside the block something happens where that file is closed by whoever read it first."""
    real, place, waits = io.open, os.path.realpath(path), True

    class Watched(io.FileIO):
        def close(self) -> None:
            nonlocal waits
            super().close()
            if waits:
                waits = False
                meanwhile()

    def opened(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
        if mode != "rb" or isinstance(file, int) or os.path.realpath(file) != place or not waits:
            return real(file, mode, buffering, *given, **named)
        return Watched(file) if buffering == 0 else io.BufferedReader(Watched(file))

    with opening(opened):
        yield


@contextmanager
def reading(at_most: int) -> Iterator[None]:
    """Inside the block a call that reads a file gets so many bytes at most."""
    real = io.open

    class Short(io.FileIO):
        def readinto(self, into: Any) -> int:
            return super().readinto(memoryview(into)[:at_most])

        def read(self, size: int | None = -1) -> Any:
            return super().read(size if size is None or size < 0 else min(size, at_most))  # all of a file is read by several calls

    def opened(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
        if mode != "rb":
            return real(file, mode, buffering, *given, **named)
        return Short(file) if buffering == 0 else io.BufferedReader(Short(file))

    def filled(call: Callable[..., int], handle: int, into: Sequence[Any], *given: Any) -> int:
        return call(handle, [memoryview(into[0]).cast("B")[:at_most]], *given)

    def new(call: Callable[..., bytes], handle: int, length: int, *given: Any) -> bytes:
        return call(handle, min(length, at_most), *given)

    shortened: dict[str, Callable[..., Any]] = {"readv": filled, "preadv": filled, "read": new, "pread": new}
    calls: dict[str, Any] = {name: partial(short, getattr(os, name)) for name, short in shortened.items()}
    with opening(opened), mock.patch.multiple(os, **calls):
        yield


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Inside the block no file may have more than so many bytes: a write that goes beyond is cut short, and the next one fails."""
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


@contextmanager
def writing(at_most: int) -> Iterator[None]:
    """Inside the block a call that writes to a file writes so many bytes at most, and no file gets a second name: some disks have none."""
    real, pwrite, write = io.open, os.pwrite, os.write

    class Short(io.FileIO):
        def write(self, content: Any) -> int:
            return super().write(memoryview(content).cast("B")[:at_most])

    def opened(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
        if "b" not in mode or mode == "rb":
            return real(file, mode, buffering, *given, **named)
        short = Short(file, mode, **{name: value for name, value in named.items() if name in ("closefd", "opener")})
        return short if buffering == 0 else io.BufferedRandom(short) if "+" in mode else io.BufferedWriter(short)

    def direct(handle: int, content: Any, offset: int) -> int:
        return pwrite(handle, memoryview(content).cast("B")[:at_most], offset)

    def plain(handle: int, content: Any) -> int:
        return write(handle, memoryview(content).cast("B")[:at_most])

    no_link = OSError(errno.EPERM, os.strerror(errno.EPERM))
    with opening(opened), mock.patch.multiple(os, pwrite=direct, write=plain, link=mock.Mock(side_effect=no_link)):
        yield
