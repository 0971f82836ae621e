"""`python -m falsifiers calibrate`: measures the factors of rounding tolerances; `… power`: shows that every claim can fail."""

import argparse
import sys
from collections.abc import Sequence

from blackswan.impl.signals import leave, no_interrupt_lost

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when done, 1 where a claim cannot fail or a mutant survives, 2 bad input, or output that cannot be written, 6 no such
    device, 130 interrupted, 141 nobody reads the output."""
    try:
        with no_interrupt_lost():
            from blackswan.contracts.output import written  # with what contracts need it takes a while, in which Ctrl-C may come

            return written(lambda: _run(arguments))
    except OSError as error:
        print(f"falsifiers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    from blackswan import contracts
    from blackswan.impl.device import EXIT_STATUS, DeviceUnavailable

    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except BrokenPipeError:
        raise
    except (contracts.ContractError, ValueError, OSError) as error:
        print(f"falsifiers {options.command}: {error}", file=sys.stderr)
        return 2
    except DeviceUnavailable as error:
        print(f"falsifiers {options.command}: {error}", file=sys.stderr)
        return EXIT_STATUS
    return status


def _parser() -> argparse.ArgumentParser:
    from blackswan.falsifiers.mutants import catalogue_command, power_command
    from blackswan.falsifiers.runner import calibrate_command

    parser = argparse.ArgumentParser(prog="python -m falsifiers", description="Measures of the falsifiers themselves.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    calibrate_command.add_parser(commands)
    power_command.add_parser(commands)
    catalogue_command.add_parser(commands)
    return parser


if __name__ == "__main__":
    leave(main(), INTERRUPTED)
