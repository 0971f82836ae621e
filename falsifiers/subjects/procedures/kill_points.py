"""The moments of a process at which a kill could hurt: what it does to the files of a folder."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_RANDOM = re.compile(r"\.[A-Za-z0-9_]{8}(?=$|/)")
"""What makes the name of a temporary file its own."""

Moment = tuple[str, int]


class KillPoints:
    """Counts what happens, by its name, and kills this process when that has happened that often."""

    def __init__(self, kill: Moment | None) -> None:
        self.kill, self.seen = kill, list[str]()

    def __call__(self, name: str) -> None:
        """Something of that name is about to happen."""
        self.seen.append(name)
        if self.kill is not None and name == self.kill[0] and self.seen.count(name) == self.kill[1]:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def file_events(folder: Path, moment: KillPoints) -> Iterator[None]:
    """Moments before a file in the folder is opened to be written, flushed, renamed or removed. The hook stays for the life of the process,
    which is this run's own.
    """

    def name(path: Any) -> str:
        return _RANDOM.sub("", os.path.relpath(path, folder))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (opened or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")) and str(arguments[0]).startswith(str(folder)):
            moment(f"{event} {name(arguments[0])}")

    flush = os.fsync

    def flushed(fd: Any) -> None:
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        moment(f"flush {name(Path(f'/proc/self/fd/{descriptor}').readlink())}")
        flush(fd)

    sys.addaudithook(hook)
    os.fsync = flushed
    try:
        yield
    finally:
        os.fsync = flush
