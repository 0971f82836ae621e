"""The events of a process at which a kill could hurt: what it does to the files of a folder, and what else is told to it."""

import itertools
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

_RANDOM = re.compile(r"\.[A-Za-z0-9_]{8}(?=$|/)")
"""This part makes the name of a temporary file its own."""

STATE, PATIENCE = Path("state", "state.safetensors"), 5.0
"""The file of a run's state, and the seconds after which a worker that is behind goes on all the same."""

Event = Callable[[str], None]


class KillPoints:
    """Counts events by their names, and kills this process when the one has come that often."""

    def __init__(self, name: str | None = None, times: int = 0, by: signal.Signals = signal.SIGKILL) -> None:
        self.name, self.times, self.by, self.seen = name, times, by, list[str]()

    def __call__(self, name: str) -> None:
        """Something of that name is about to happen."""
        self.seen.append(name)
        if name == self.name and self.seen.count(name) == self.times:
            os.kill(os.getpid(), self.by)


class Copies(KillPoints):
    """Copies a folder at each event, as a process that is killed then leaves it; and with a file empty that is opened to be written."""

    def __init__(self, folder: Path, copies: Path) -> None:
        super().__init__()
        self.folder, self.copies = folder, copies

    def __call__(self, name: str) -> None:
        """Something of that name is about to happen."""
        super().__call__(name)
        file = name.removeprefix("open ")
        there = self.copies / f"{len(self.seen)} {name.replace('/', '|')}"
        if self.folder.exists():
            shutil.copytree(self.folder, there)
            if file != name and (self.folder / file).is_file():
                shutil.copytree(self.folder, torn := there.with_name(f"{there.name}, empty"))
                (torn / file).write_bytes(b"")


def file_events(folder: Path, event: Event) -> None:
    """Calls `event` before a file in the folder is opened to be written, flushed, renamed or removed, for the life of this process.

    Nothing is flushed: a killed process loses nothing that it has written; a power failure is another matter.
    """

    def hook(kind: str, arguments: tuple[Any, ...]) -> None:
        opened = kind == "open" and not isinstance(arguments[0], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if opened or kind in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            name = _name(arguments[0], folder)
            if not name.startswith(".."):
                event(f"{kind} {name}")

    sys.addaudithook(hook)
    os.fsync = os.fdatasync = _flushed(folder, event)  # type: ignore[assignment]  # they are called by place


@contextmanager
def flushes(folder: Path, event: Event) -> Iterator[None]:
    """Inside the block `event` is called before a file in the folder is flushed, which is not done."""
    flushed = _flushed(folder, event)
    with mock.patch.multiple(os, fsync=flushed, fdatasync=flushed):
        yield


def _flushed(folder: Path, event: Event) -> Callable[[Any], None]:
    def flushed(fd: Any) -> None:
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        event(f"flush {_name(Path(f'/proc/self/fd/{descriptor}').readlink(), folder)}")

    return flushed


def _name(path: Any, folder: Path) -> str:
    """The path from the folder, by whatever links either is named."""
    place = Path(os.fsdecode(path))
    return _RANDOM.sub("", os.path.relpath(place.parent.resolve() / place.name, folder.resolve()))


def sums(group: Any, event: Event) -> None:
    """Calls `event` before and after each sum over the workers."""
    add = group.sum

    def summed(tensor: Any) -> Any:
        event("before the sum")
        total = add(tensor)
        event("after the sum")
        return total

    group.sum = summed


def behind(group: Any, folder: Path) -> None:
    """The last worker goes on after a gather only when the first one has begun the next, or has written the first state of its run."""
    gather, numbers = group.gather, itertools.count()

    def gathered(tensor: Any) -> Any:
        at = next(numbers)
        begun, following = (folder.with_name(f"{folder.name}, gather {number}") for number in (at, at + 1))
        if group.rank == 0:
            begun.touch()
        rows, end = gather(tensor), time.monotonic() + PATIENCE
        while group.rank == group.size - 1 and not (following.exists() or (folder / STATE).exists() or time.monotonic() > end):
            time.sleep(0.001)
        return rows

    group.gather = gathered
