"""The verdict file of a run: written by one run at a time, a record a line as verdicts are reached."""

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from blackswan.falsifiers.runner.environment import ROOT
from blackswan.falsifiers.runner.verdict import plain
from blackswan.reports.digests import sealed
from blackswan.reports.render import FORMATS, is_page

EVIDENCE = ROOT / "reports" / "evidence"


def writable(path: Path) -> Path:
    """ValueError where the verdict file cannot be written, or it or a page of its report would replace what no run may make anew."""
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if (path.exists() and not path.is_file()) or not nearest.is_dir() or not os.access(path if path.exists() else nearest, os.W_OK):
        raise ValueError(f"--verdicts: {path} cannot be written; expected a file in a folder that can be written to")
    if path.suffix.removeprefix(".").lower() in FORMATS:
        raise ValueError(f"--verdicts: {path} has the name of a page of the report; expected another suffix, such as {path.stem}.jsonl")
    if path.exists() and path.resolve().is_relative_to(EVIDENCE.resolve()):
        raise ValueError(f"--verdicts: {path} is kept evidence, which no run replaces; name another file")
    if path.exists() and not _starts_with_a_run(path):
        raise ValueError(
            f"--verdicts: {path} is no verdict file, and would be replaced; expected a new file, or one that a run has written"
        )
    for format_ in FORMATS:
        page = path.parent / f"{path.stem}.{format_}"
        if page.exists() and not is_page(page, format_):
            raise ValueError(f"--verdicts: {page} is no page of a report, and would be replaced by one; expected another name than {path}")
    return path


def _starts_with_a_run(path: Path) -> bool:
    with path.open("rb") as stream:
        first = stream.readline()
    # A run that was killed, or a full disk, may have left nothing or the first half of a line.
    if not first or first.startswith(b'{"record": "run"'):
        return True
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("record") == "run"


class UnwrittenError(Exception):
    """A verdict was reached and could not be written: whatever the others are, the file does not tell."""


class VerdictFile:
    """A file that a run has for itself from `reserve`, or where there was none from `start`, to `close`.

    The lock is on the file itself, so that nothing lies beside it; who ends, however, holds none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._stream: IO[str] | None = None
        self._digests: list[str] = []
        self._absent = False

    @property
    def is_open(self) -> bool:
        """Whether records can be written."""
        return self._stream is not None

    def reserve(self) -> None:
        """Keeps other runs from the file and changes nothing. ValueError where another run has it."""
        self._absent = not self.path.exists()
        if not self._absent:
            self._lock(os.O_RDWR)

    def start(self) -> None:
        """Makes the file, or empties it. ValueError where another run has it, or made it after `reserve`; OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._descriptor is None or not self._in_place():
            self._lock(os.O_RDWR | os.O_CREAT)
        assert self._descriptor is not None
        if self._absent and os.fstat(self._descriptor).st_size:
            self.close()
            raise ValueError(f"--verdicts: {self.path} was written by another run since this one began; start again, or name another file")
        os.ftruncate(self._descriptor, 0)
        self._digests = []
        self._stream, self._descriptor = os.fdopen(self._descriptor, "w", encoding="utf-8"), None

    def write(self, record: dict[str, Any]) -> None:
        """A line, which readers see at once. UnwrittenError where it cannot be written, after which nothing is."""
        assert self._stream is not None
        line = json.dumps(sealed(plain(record), self._digests), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:
            with suppress(OSError):  # what is left in the buffer cannot be written either
                self._stream.close()
            self._stream = None
            raise UnwrittenError(f"{self.path} cannot be written: {error.strerror or error}; what was written before stands") from None

    def close(self) -> None:
        """Leaves the file to others."""
        if self._stream is not None:
            self._stream.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._stream = self._descriptor = None

    def _lock(self, flags: int) -> None:
        while True:
            self.close()
            self._descriptor = os.open(self.path, flags, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise ValueError(
                    f"--verdicts: {self.path} is being written by another run; wait for its end, or name another file"
                ) from None
            # The file may have been moved away between the two: a lock on that one keeps nobody from this one.
            if self._in_place():
                return

    def _in_place(self) -> bool:
        assert self._descriptor is not None
        return self.path.exists() and os.path.samestat(os.fstat(self._descriptor), self.path.stat())
