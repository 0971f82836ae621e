"""How a command ends."""

import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(status: int, interrupted: int) -> NoReturn:
    """Ends the process with a status; at once where it is that of an interrupt.

    Of `python -m`, CPython says that SIGINT killed it, whatever the status, where the interrupt came inside an `exec` of text, which
    dataclasses and named tuples are made with, even if it was caught (`_Py_UnhandledKeyboardInterrupt`).
    """
    if status == interrupted:
        with suppress(OSError):  # the reader may be gone
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
