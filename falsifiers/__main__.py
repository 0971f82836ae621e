"""`python -m falsifiers calibrate`: measures the factors of rounding tolerances; `… power`: shows that every claim can fail."""

import argparse
import sys
from collections.abc import Sequence

import contracts
from falsifiers import calibrate_command, power_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when done, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (contracts.ContractError, ValueError, OSError) as error:
        print(f"falsifiers {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m falsifiers", description="Measures of the falsifiers themselves.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    calibrate_command.add_parser(commands)
    power_command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
