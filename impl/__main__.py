"""`python -m impl`: train, pretrain, evaluate, predict, merge, export, tokenize, summary."""

import argparse
import codecs
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO

from blackswan.impl.commands import COMMANDS, BadInput, Interrupted, TrainingFailed
from blackswan.impl.folder import DISK_ERRORS

DONE, FAILED, INTERRUPTED, BAD_INPUT = 0, 1, 2, 4


class _Parser(argparse.ArgumentParser):
    """Bad usage is bad input; the nearest option is named."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}\n{self.format_usage().splitlines()[0]} …; --help shows every option")


def main(arguments: Sequence[str] | None = None, prog: str = "python -m impl") -> int:
    """Exit status 0 done, 1 failed, 2 interrupted, 4 bad input (nothing was written), 6 the device is not there or too small."""
    said = prog.removeprefix("python -m ")
    with _heard():
        try:
            options = _parsed(sys.argv[1:] if arguments is None else arguments, prog)
        except BadInput as error:
            return _say(said, error, BAD_INPUT)
        except SystemExit:  # behind the help
            try:
                with _written(sys.stdout):
                    pass
            except OSError as error:
                return _say(said, error, FAILED)
            raise
        name = f"{said} {options.command}"
        with warnings.catch_warnings():
            warnings.filterwarnings("default", category=UserWarning)
            warnings.showwarning = lambda message, *_, **__: print(f"{name}: warning: {message}", file=sys.stderr)
            return _guarded(options, name)


def parser(prog: str, named: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of those that are named."""
    found = _Parser(
        prog=prog, description="Trains and runs a classifier, a decoder with LoRA and a head; pre-trains a decoder.", allow_abbrev=False
    )
    commands = found.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.help, description=command.description, allow_abbrev=False)
        if name in named:
            command.add_options(one)
        one.set_defaults(parser=one)
    return found


def _parsed(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    options, unknown = parser(prog, arguments).parse_known_args(arguments)
    if unknown:
        chosen: argparse.ArgumentParser = options.parser
        known = [option for action in chosen._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        chosen.error(f"{unknown[0]!r} is no option of {options.command}" + (f"; the nearest is {near[0]}" if near else ""))
    return options


def _guarded(options: argparse.Namespace, name: str) -> int:
    """Runs a command; what can go wrong for reasons outside the program becomes a message and a status."""
    try:
        with _escaping(sys.stdout), _written(sys.stdout):
            return _run(COMMANDS[options.command].run, options, name)
    except KeyboardInterrupt:
        return _say(name, Interrupted("interrupted"), INTERRUPTED)
    except Interrupted as error:
        return _say(name, error, INTERRUPTED)
    except (BadInput, ValueError, OSError) as error:
        broken = isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.errno in DISK_ERRORS)
        return _say(name, error, FAILED if broken else BAD_INPUT)


@contextmanager
def _heard() -> Iterator[None]:
    """Inside there is a standard error: what is said there by a program that was started without one is not for standard output."""
    if sys.stderr is not None:
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8", errors="backslashreplace") as nobody, redirect_stderr(nobody):
        yield


def _bytes_or_escapes(error: UnicodeError) -> tuple[str | bytes, int]:
    """Characters that stand for bytes of a name are these bytes, and others that an encoding lacks are escaped."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error("bytes or escapes", _bytes_or_escapes)
ESCAPING = {"strict": "backslashreplace", "surrogateescape": "bytes or escapes"}
"""What takes the place of a way in which a stream meets characters that its encoding lacks; the second one is that of the locale C."""


@contextmanager
def _escaping(stream: TextIO) -> Iterator[None]:
    """Inside, characters that a stream's encoding lacks are escaped, as standard error has them: no name of a file may end a command."""
    if not isinstance(stream, TextIOWrapper) or (errors := stream.errors) not in ESCAPING:
        yield
        return
    stream.reconfigure(errors=ESCAPING[errors])
    try:
        yield
    finally:
        stream.reconfigure(errors=errors)


@contextmanager
def _written(stream: TextIO | None) -> Iterator[None]:
    """At its end what was printed inside is written, or an OSError raised."""
    try:
        yield
        if stream is not None:
            stream.flush()
    except BaseException:  # what ended the command is told, not that nobody reads
        if stream is not None:
            _write_or_drop(stream)
        raise


def _write_or_drop(stream: TextIO) -> None:
    """What cannot be written is dropped: Python would try it again at its own end, and end with a status of its own, 120."""
    try:
        stream.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nobody, suppress(OSError):  # a stream without a descriptor has none to lend
            own = os.dup(number := stream.fileno())
            os.dup2(nobody.fileno(), number)
            try:
                stream.flush()
            finally:
                os.dup2(own, number)
                os.close(own)


def _run(run: Callable[[argparse.Namespace], None], options: argparse.Namespace, name: str) -> int:
    from torch import OutOfMemoryError

    from blackswan.impl.agreement import WorkerFailed
    from blackswan.impl.device import EXIT_STATUS, DeviceUnavailable
    from blackswan.impl.group import WorkerLost
    from blackswan.impl.ledger import InsufficientMemory
    from blackswan.impl.residency import NotResident
    from blackswan.impl.warm_up import WarmUpFailed

    try:
        run(options)
    except (DeviceUnavailable, InsufficientMemory) as error:
        return _say(name, error, EXIT_STATUS)
    except (TrainingFailed, FloatingPointError, NotResident, OutOfMemoryError, WarmUpFailed, WorkerFailed, WorkerLost) as error:
        return _say(name, error, FAILED)
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for the host's memory.
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        return _say(name, MemoryError(f"the host's memory is not enough; choose smaller sizes ({error})"), FAILED)
    return DONE


def _say(name: str, error: Exception, status: int) -> int:
    print(f"{name}: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
