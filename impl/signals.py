"""How a command ends."""

import _thread
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

AGAIN = 0.05
"""Seconds after which a lost interrupt comes again: the callback that it came in has ended by then, most often."""


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


@contextmanager
def no_interrupt_lost() -> Iterator[None]:
    """Inside, Ctrl-C comes again where it came in a place from which Python lets no exception out.

    Such are finalisers and callbacks of the garbage collector: a signal during a collection, which with torch takes long, is handled in the
    callback at its end (Hypothesis has one), and the KeyboardInterrupt goes to `sys.unraisablehook`.
    """
    former = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            former(unraisable)
            return
        again = threading.Timer(AGAIN, _thread.interrupt_main)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = former


@contextmanager
def interrupts_first() -> Iterator[None]:
    """Raises KeyboardInterrupt where one led to the error that leaves the block: libraries that clean up after it may fail at that."""
    try:
        yield
    except Exception as error:
        if _led_to(error):
            raise KeyboardInterrupt from error
        raise


def _led_to(error: BaseException) -> bool:
    seen: list[BaseException] = []
    ahead: list[BaseException | None] = [error]
    while ahead:
        found = ahead.pop()
        if found is None or found in seen:
            continue
        if isinstance(found, KeyboardInterrupt):
            return True
        seen.append(found)
        ahead += [found.__cause__, found.__context__]
    return False
