"""`python -m falsifiers calibrate`: measures the factors of rounding tolerances; `… power`: shows that every claim can fail."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INTERRUPTED = 130
MODEL = """Holds a model as it is to the float64 reference on its own weights: hidden states after every layer, logits, loss, and the
gradient of whatever requires one. MODEL is a torch.nn.Module, or a function that returns one, of the Llama, Qwen2 or Qwen3 family, with
LoRA of PEFT and NF4 of bitsandbytes or without. It runs in a process of its own that never holds an answer. Exit status: 0 all held,
1 something left its noise, 4 the model, a name or an option cannot be used."""


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
    from blackswan.falsifiers.runner import calibrate_command, checkpoint_command

    found = argparse.ArgumentParser(prog=prog, description="Measures of the falsifiers themselves.")
    commands = found.add_subparsers(dest="command", metavar="COMMAND", required=True)
    calibrate_command.add_parsers(commands)
    checkpoint_command.add_parser(commands)
    _add_model(commands)
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
    said = "record where claims about runs, files, data and devices fail on each mutant, by which a culprit is named later"
    power.add_argument("--record-failures", action="store_true", help=said)
    power.set_defaults(run=_power)


def _add_model(commands: Any) -> None:
    said = "hold a model of your own, as it is, to the reference on its own weights"
    found = commands.add_parser("vet-model", help=said, description=MODEL)
    add = found.add_argument
    add("model", metavar="MODEL", help="FILE.py:NAME or package.module:NAME of a module, or of a function that returns one")
    add("--names", type=Path, metavar="FILE", help="a JSON object from its names, or beginnings of them, to Hugging Face's; * is one part")
    add("--config", type=Path, metavar="FILE", help="its config.json, where it has no .config")
    add("--pooling", choices=("mean", "last", "first"), default="last", help="what its head of classes reads (default: last)")
    add("--alpha", type=float, help="LoRA's alpha, where it has no peft_config")
    add("--declare", action="append", default=[], metavar="NAME=VALUE", help="a convention that it follows; may be repeated")
    add("--device", default="cpu", help="where it runs (default: cpu)")
    add("--seed", type=int, default=0, help="seed of the batch (default: 0)")
    add("--json", action="store_true", help="print the comparisons as JSON, and nothing else")
    found.set_defaults(run=_model)


def _model(options: argparse.Namespace) -> int:
    from blackswan.falsifiers.runner import model_command

    return model_command.run(options)


def _power(options: argparse.Namespace) -> int:
    from blackswan.falsifiers.mutants import power_command

    return power_command.run(options)


def _catalogue(options: argparse.Namespace) -> int:
    from blackswan.falsifiers.mutants import catalogue_command

    return catalogue_command.run(options)


if __name__ == "__main__":
    sys.exit(main())
