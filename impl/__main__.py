"""`python -m impl`: train, evaluate, predict, merge, summary."""

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from blackswan.impl.commands import COMMANDS, BadInput, Interrupted, TrainingFailed
from blackswan.impl.folder import DISK_ERRORS
from blackswan.impl.signals import leave, no_interrupt_lost

DONE, FAILED, INTERRUPTED, BAD_INPUT = 0, 1, 2, 4
READER_GONE = 141
"""128 + SIGPIPE, as a shell says of a program that its reader has left."""


class _Parser(argparse.ArgumentParser):
    """Bad usage is bad input; the nearest option is named."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}\n{self.format_usage().splitlines()[0]} …; --help shows every option")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 done, 1 failed, 2 interrupted, 4 bad input (nothing was written), 6 the device is not there or too small, 141 nobody
    reads the output."""
    try:
        try:
            return _main(sys.argv[1:] if arguments is None else arguments)
        finally:
            _flush()
    except BrokenPipeError:
        return READER_GONE
    except OSError as error:
        return _say("impl", error, FAILED)


def _main(arguments: Sequence[str]) -> int:
    try:
        options = _parsed(arguments)
    except BadInput as error:
        return _say("impl", error, BAD_INPUT)
    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"impl {options.command}: warning: {message}", file=sys.stderr)
        return _guarded(options)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m impl", description="Trains and runs a classifier: a decoder with LoRA and a head.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    parsers = {}
    for name, command in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=command.help, description=command.description, allow_abbrev=False)
        command.add_options(parsers[name])
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen: argparse.ArgumentParser = parsers[options.command]
        known = [option for action in chosen._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        chosen.error(f"{unknown[0]!r} is no option of {options.command}" + (f"; the nearest is {near[0]}" if near else ""))
    return options


def _guarded(options: argparse.Namespace) -> int:
    """Runs a command; what can go wrong for reasons outside the program becomes a message and a status."""
    name = f"impl {options.command}"
    try:
        with no_interrupt_lost():
            return _run(COMMANDS[options.command].run, options, name)
    except KeyboardInterrupt:
        return _say(name, Interrupted("interrupted"), INTERRUPTED)
    except Interrupted as error:
        return _say(name, error, INTERRUPTED)
    except BrokenPipeError:
        raise
    except (BadInput, ValueError, OSError) as error:
        broken = isinstance(error, OSError) and error.errno in DISK_ERRORS
        return _say(name, error, FAILED if broken else BAD_INPUT)


def _run(run: Callable[[argparse.Namespace], None], options: argparse.Namespace, name: str) -> int:
    from torch import OutOfMemoryError

    from blackswan.impl.agreement import WorkerFailed
    from blackswan.impl.device import EXIT_STATUS, DeviceUnavailable
    from blackswan.impl.group import WorkerLost
    from blackswan.impl.ledger import InsufficientMemory
    from blackswan.impl.residency import NotResident

    try:
        run(options)
        _flush()
    except (DeviceUnavailable, InsufficientMemory) as error:
        return _say(name, error, EXIT_STATUS)
    except (TrainingFailed, FloatingPointError, NotResident, OutOfMemoryError, WorkerFailed, WorkerLost) as error:
        return _say(name, error, FAILED)
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for the host's memory.
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        return _say(name, MemoryError(f"the host's memory is not enough; choose smaller sizes ({error})"), FAILED)
    return DONE


def _flush() -> None:
    """What cannot be written is dropped: Python would try again at its end, complain, and end with a status of its own."""
    if sys.stdout is None:  # the caller has closed it
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _say(name: str, error: Exception, status: int) -> int:
    print(f"{name}: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    leave(main(), INTERRUPTED)
