"""The functions of `impl` that run inside a block, or its lines: also in threads, forks, and ranks of runs that are started there."""

import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from blackswan.falsifiers.subjects.patching import planting

IMPL = Path(__file__).resolve().parents[2] / "impl"
FUNCTIONS, LINES = "functions", "lines"


@contextmanager
def executed(what: str = FUNCTIONS) -> Iterator[set[str]]:
    """The functions that are called inside the block, `impl.fit:fit`, or the LINES that run, `fit.py:12`; the set is whole when the block
    ends."""
    found = set[str]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "notes"
        try:
            with applied(f"{what}={file}"):
                yield found
        finally:
            found.update(file.read_text(encoding="utf-8").splitlines())


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Inside the block each function, or line, is noted when it first runs; `functions=FILE` says which, and in which file. A rank that is
    started there enters the same block."""
    what, _, file = name.partition("=")
    before, of_threads, open_now = sys.gettrace(), threading.gettrace(), True
    notes = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    note = {FUNCTIONS: _functions, LINES: _lines}[what](lambda place: os.write(notes, f"{place}\n".encode()))

    def trace(frame: FrameType, event: str, _: object) -> Any:
        return trace if open_now and note(frame, event) else None  # a thread may outlive the block

    try:
        threading.settrace(trace)
        sys.settrace(trace)
        with planting(f"{__name__}:{name}"):
            yield
    finally:
        open_now = False
        sys.settrace(before)
        threading.settrace(of_threads)
        os.close(notes)


def _functions(write: Callable[[str], object]) -> Callable[[FrameType, str], bool]:
    seen = set[CodeType]()

    def note(frame: FrameType, event: str) -> bool:
        del event
        if frame.f_code not in seen:
            seen.add(frame.f_code)
            if (name := _name(frame.f_code)) is not None:
                write(name)
        return False  # its lines are not asked for

    return note


def _lines(write: Callable[[str], object]) -> Callable[[FrameType, str], bool]:
    seen, files = set[tuple[str, int]](), dict[str, Path | None]()

    def note(frame: FrameType, event: str) -> bool:
        name, line = place = frame.f_code.co_filename, frame.f_lineno
        if name not in files:
            path = Path(name).resolve()
            files[name] = path.relative_to(IMPL) if path.is_relative_to(IMPL) else None
        if event == "line" and place not in seen:
            seen.add(place)
            write(f"{files[name]}:{line}")
        return files[name] is not None

    return note


def _name(code: CodeType) -> str | None:
    """The name of a function of `impl`; a function inside another one has the name of that one. None for code of others, and for the body
    of a module or a class."""
    path = Path(code.co_filename).resolve()
    if not code.co_flags & inspect.CO_NEWLOCALS or not path.is_relative_to(IMPL):
        return None
    return f"{module_of(path)}:{code.co_qualname.partition('.<locals>')[0]}"


def module_of(path: Path) -> str:
    """The module of `impl` that a file holds, `impl.commands.train`."""
    parts = path.resolve().relative_to(IMPL).with_suffix("").parts
    return ".".join(["impl", *(part for part in parts if part != "__init__")])
