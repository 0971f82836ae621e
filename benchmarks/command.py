"""How the benchmarks start and end: what was given is looked at before anything is measured, and what ends one of them is one line."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

INTERRUPTED, BAD_INPUT, NO_DEVICE = 130, 2, 6
"""The exit statuses of the other commands."""


class CannotRun(Exception):  # noqa: N818  what was given or a state of the host, not a defect of the program
    """Why nothing is measured, and the exit status that says so."""

    def __init__(self, reason: str, status: int = BAD_INPUT) -> None:
        super().__init__(reason)
        self.status = status


def importing() -> None:
    """Until `run` is called, Ctrl-C ends the process at once: raised inside an import, it may be swallowed or come out as another error."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # what runs in the background may ignore it
        signal.signal(signal.SIGINT, _leave)


def _imported() -> None:
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os._exit(_interrupted())


def run(main: Callable[[], int]) -> int:
    """The exit status of `main`; of what it raises for reasons outside the program, one line is printed."""
    _imported()
    try:
        return main()
    except KeyboardInterrupt:
        return _interrupted()
    except CannotRun as error:
        return _say(error, error.status)
    except OSError as error:
        return _say(error, BAD_INPUT)
    except RuntimeError as error:
        if (status := _status_of_the_device(error)) is None:
            raise
        return _say(" ".join(str(error).split()), status)


def start(main: Callable[[], int]) -> NoReturn:
    """Runs `main` as a command and ends the process with its status."""
    sys.exit(run(main))


def _status_of_the_device(error: RuntimeError) -> int | None:
    """Of an error that says what the device lacks; None for every other."""
    device, torch = sys.modules.get("blackswan.impl.device"), sys.modules.get("torch")  # where they are not imported, it is none of theirs
    if device is not None and isinstance(error, device.DeviceUnavailable):
        return NO_DEVICE
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return BAD_INPUT
    return None


def _interrupted() -> int:
    print("interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def _say(error: Exception | str, status: int) -> int:
    print(f"benchmarks.{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
    return status


def require_cuda() -> None:
    """Raises a CannotRun on a host without a CUDA device."""
    importing()
    import torch

    _imported()
    if not torch.cuda.is_available():
        raise CannotRun("this benchmark needs a CUDA device, and this host has none; nothing was measured", NO_DEVICE)


def require_writable(path: Path) -> None:
    """Raises a CannotRun for a file that cannot be written when all is measured."""
    if path.is_dir():
        raise CannotRun(f"{path} is a folder; expected a file to write")
    if not path.parent.is_dir():
        raise CannotRun(f"there is no folder {path.parent} to write {path.name} into")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CannotRun(f"no permission to write {path}")


# Types of options.


def output(text: str) -> Path:
    """A file that can be written."""
    try:
        require_writable(Path(text))
    except CannotRun as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 on")
    return int(text)


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number above 0")
    return value


def device(text: str) -> str:
    """The name of a device, which may not be there."""
    from blackswan.impl.device import parse_device

    try:
        parse_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
