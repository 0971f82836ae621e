"""The verdict file of a run: written by one run at a time, a record a line as verdicts are reached."""

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from falsifiers.verdict import plain


class VerdictFile:
    """A file that a run has for itself from `reserve`, or where there was none from `start`, to `close`.

    The lock is on the file itself, so that nothing lies beside it; who ends, however, holds none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._stream: IO[str] | None = None
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
        self._stream, self._descriptor = os.fdopen(self._descriptor, "w", encoding="utf-8"), None

    def write(self, record: dict[str, Any]) -> None:
        """A line, which readers see at once."""
        assert self._stream is not None
        self._stream.write(json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()

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
