"""Standard output that nobody reads to its end."""

import os
import sys
from collections.abc import Callable
from typing import Final

READER_GONE: Final = 141
"""128 + SIGPIPE, as a shell says of a program that its reader has left: what was not said is no success."""


def written(command: Callable[[], int]) -> int:
    """The command's exit status once all that it printed is written; 141 where the reader has gone.

    Raises an OSError where there is no room for it, and what the command raises.
    """
    try:
        try:
            return command()
        finally:
            _flush()
    except BrokenPipeError:
        return READER_GONE


def _flush() -> None:
    """What cannot be written is dropped: Python would try again at its end, complain, and end with a status of its own."""
    if sys.stdout is None:  # the caller has closed it
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
