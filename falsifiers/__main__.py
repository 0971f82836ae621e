"""`python -m falsifiers calibrate`: measures the factors of rounding tolerances; `… power`: shows that every claim can fail."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, prog: str = "python -m falsifiers") -> int:
    """Exit status 0 when done, 1 where a claim cannot fail or a mutant survives, 2 bad input, 6 no such device, 130 interrupted."""
    try:
        return _run(arguments, prog)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str] | None, prog: str) -> int:
    options = parser(prog).parse_args(arguments)
    from blackswan import contracts
    from blackswan.contracts.vocabulary import use_folder
    from blackswan.impl.device import EXIT_STATUS, DeviceUnavailable

    try:
        use_folder(getattr(options, "contracts", None))
        status: int = options.run(options)
    except (contracts.ContractError, ValueError, OSError) as error:
        print(f"falsifiers {options.command}: {error}", file=sys.stderr)
        return 2
    except DeviceUnavailable as error:
        print(f"falsifiers {options.command}: {error}", file=sys.stderr)
        return EXIT_STATUS
    return status


def parser(prog: str) -> argparse.ArgumentParser:
    """The parser of all commands. What runs them is imported when they run."""
    from blackswan.falsifiers.runner import calibrate_command, checkpoint_command, model_command

    found = argparse.ArgumentParser(prog=prog, description="Measures of the falsifiers themselves.")
    commands = found.add_subparsers(dest="command", metavar="COMMAND", required=True)
    calibrate_command.add_parsers(commands)
    checkpoint_command.add_parser(commands)
    model_command.add_parser(commands)
    _add_power(commands)
    said = "write the names of mutants and of checks of systems, by which contracts are linted, from the code"
    catalogue = commands.add_parser("catalogue", help=said, description=said)
    catalogue.add_argument("--contracts", metavar="DIR", type=Path, help="write the mutants of this folder of your own, and no others")
    catalogue.set_defaults(run=_catalogue)
    return found


def _add_power(commands: Any) -> None:
    from blackswan.falsifiers.runner.options import cores, positive

    said = "run every claim on wrong implementations: each must be caught, and each claim must catch some"
    power = commands.add_parser("power", help=said, description=said)
    power.add_argument("--claim", action="append", default=[], metavar="ID", help="this claim only; may be repeated")
    power.add_argument("--mutant", action="append", default=[], metavar="NAME", help="this mutant only; may be repeated")
    power.add_argument("--contracts", metavar="DIR", type=Path, help="the claims and mutants of this folder of your own, and no others")
    power.add_argument("--full", action="store_true", help="every cell, not only those that decide something")
    power.add_argument("--processes", type=positive, default=cores(), metavar="N", help="processes to run in (default: one a core)")
    power.add_argument("--output", type=Path, metavar="FILE", help="write the cells as JSON lines")
    power.set_defaults(run=_power)


def _power(options: argparse.Namespace) -> int:
    from blackswan.falsifiers.mutants import power_command

    return power_command.run(options)


def _catalogue(options: argparse.Namespace) -> int:
    from blackswan.falsifiers.mutants import catalogue_command

    return catalogue_command.run(options)


if __name__ == "__main__":
    sys.exit(main())
