"""`python -m falsifiers calibrate`: measures the factors of rounding tolerances; `… power`: shows that every claim can fail."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import contracts
from contracts.model import Claim
from contracts.problems import unknown
from falsifiers import power_command

if TYPE_CHECKING:
    from falsifiers.calibration import Calibration
    from falsifiers.engine import Options
    from falsifiers.subjects.protocol import Subject


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
    calibrate = commands.add_parser("calibrate", help="measure error / noise floor of the correct implementation")
    calibrate.add_argument("--cases", type=int, default=300, help="draws a claim and dtype (default: 300)")
    calibrate.add_argument("--seed", type=int, default=1, help="seed of the draws (default: 1)")
    calibrate.add_argument("--claim", action="append", default=[], metavar="ID", help="this claim only; may be repeated")
    calibrate.add_argument("--dtype", action="append", default=[], choices=contracts.DTYPES, help="this dtype only; may be repeated")
    calibrate.add_argument("--device", default="cpu", help="cpu | cuda | cuda:N | auto (default: cpu)")
    calibrate.add_argument("--write", action="store_true", help="record the ratios, and put the factors into the contracts")
    calibrate.set_defaults(run=_calibrate)
    power_command.add_parser(commands)
    return parser


def _calibrate(options: argparse.Namespace) -> int:
    from falsifiers import calibration
    from falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
    from falsifiers.engine import Options
    from falsifiers.real_input import RealInput
    from falsifiers.subjects.implementation import Implementation

    loaded = contracts.load()
    chosen = _chosen([claim for contract in loaded for claim in contract.claims], options.claim)
    paths = {claim.id: contract.path for contract in loaded for claim in contract.claims}
    subject, source = Implementation(options.device), RealInput(CHECKPOINT, CORPUS_HELDOUT).case
    targets = [claim for claim in chosen if calibration.is_calibrated(claim)]
    print(f"{'claim':28} {'dtype':9} {'cases':>6} {'rms':>7} {'row':>7} {'max':>7}   largest error / noise floor; factors rms, row, max")
    for number, claim in enumerate(targets, start=1):
        found = []
        for dtype in [dtype for dtype in claim.domain.dtype if not options.dtype or dtype in options.dtype]:
            real = claim.domain.input == "checkpoint"
            cases = max(4, options.cases // 20) if real else max(10, options.cases * (claim.cases or 20) // 20)
            result = calibration.calibrate(claim, dtype, subject, cases, options.seed, source if real else None)
            found.append(result)
            ratios, factors = result.largest, ", ".join(f"{value:g}" for value in result.factors().values())
            print(
                f"{claim.id:28} {dtype:9} {result.cases:6} {ratios.rms:7.3f} {ratios.row:7.3f} {ratios.max:7.3f}   {factors}   "
                f"[{number}/{len(targets)}]",
                flush=True,
            )
        if options.write:
            _write(claim, paths[claim.id], found, subject, Options(seed=options.seed))
    return 0


def _write(claim: Claim, path: Path, found: Sequence["Calibration"], subject: "Subject", options: "Options") -> None:
    from falsifiers import calibration

    calibration.write_record(found, subject, options)
    recorded = calibration.read_record()["claims"][claim.id]
    current = next(c for contract in contracts.load([path]) for c in contract.claims if c.id == claim.id)
    calibration.write_factors(current, path, {dtype: recorded[dtype]["factors"] for dtype in claim.domain.dtype if dtype in recorded})


def _chosen(claims: Sequence[Claim], names: Sequence[str]) -> list[Claim]:
    known = {claim.id: claim for claim in claims}
    for name in names:
        if name not in known:
            raise ValueError(f"--claim: {unknown('claim', name, known)}")
    return [claim for claim in claims if not names or claim.id in names]


if __name__ == "__main__":
    sys.exit(main())
