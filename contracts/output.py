"""Standard output that nobody reads to its end."""

import os
import sys
from typing import Final

READER_GONE: Final = 141
"""128 + SIGPIPE, as a shell says of a program that its reader has left: what was not said is no success."""


def reader_gone() -> int:
    """Drops what is still to be printed, of which Python would complain once more at its end; returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE
