"""The commands `python -m falsifiers calibrate` and `… merge`."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from blackswan import contracts
from blackswan.contracts.model import Claim
from blackswan.contracts.problems import unknown
from blackswan.falsifiers.numeric import calibration_record
from blackswan.falsifiers.runner.options import json_lines, positive
from blackswan.falsifiers.runner.workers import answers

Task = tuple[str, str, str, int, int, str]
"""Claim, dtype, device, draws, seed, and the honest mutant that is measured; none for the implementation itself."""


def add_parsers(commands: Any) -> None:
    """Adds the subcommands to `python -m falsifiers`."""
    parser = commands.add_parser("calibrate", help="measure error / noise floor of the correct implementation")
    parser.add_argument("--cases", type=positive, default=300, help="draws a claim and dtype, fewer of large ones (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draws (default: 1)")
    parser.add_argument("--claim", action="append", default=[], metavar="ID", help="this claim only; may be repeated")
    parser.add_argument("--dtype", action="append", default=[], choices=contracts.DTYPES, help="this dtype only; may be repeated")
    parser.add_argument("--device", default="cpu", help="cpu | cuda | cuda:N | auto (default: cpu)")
    parser.add_argument("--honest", action="store_true", help="measure honest mutants, which the factors have to admit too; on the CPU")
    parser.add_argument("--jobs", type=positive, default=1, help="processes (default: 1)")
    parser.add_argument("--write", action="store_true", help="record the ratios, and put the factors into contracts/calibration.json")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="append the ratios to FILE, for `merge` in another checkout")
    parser.set_defaults(run=run)
    merge = commands.add_parser("merge", help="record the ratios of a file of calibrate --lines, and write the factors that follow")
    merge.add_argument("file", type=Path, metavar="FILE")
    merge.set_defaults(run=_merge_file)


def run(options: argparse.Namespace) -> int:
    """Exit status 0. Raises DeviceUnavailable or a ValueError, before anything is written, for a device or input that is none."""
    from blackswan.falsifiers.subjects.implementation import Implementation

    if options.lines is not None:
        json_lines("--lines", options.lines, calibration_record.KEYS)
    tasks = list(_tasks(options))
    if options.honest and options.device != "cpu":
        raise ValueError(f"--honest measures on the CPU; expected no --device {options.device}")
    Implementation(options.device)  # a device that is not there ends the command before it prints or starts anything
    if not tasks:
        raise ValueError("nothing to measure: none of the claims that were chosen has factors, in such a dtype, on this device")
    print(
        f"{'claim':28} {'dtype':9} {'cases':>6} {'rms':>7} {'row':>7} {'max':>7}   largest error / noise floor, machine and honest mutant"
    )
    found = []
    for number, entry in enumerate(_measured(tasks, options.jobs), start=1):
        ratios = " ".join(f"{ratio:7.3f}" for ratio in entry["largest"].values())
        done = f"{number}/{len(tasks)}"
        print(f"{entry['claim']:28} {entry['dtype']:9} {entry['cases']:6} {ratios}   [{done}] {entry['machine']}", flush=True)
        found.append(entry)
        if options.lines is not None:
            with options.lines.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")
    if options.write:
        _merge(found)
    return 0


def _merge_file(options: argparse.Namespace) -> int:
    """Exit status 0. ValueError, and nothing written, where a line of the file is no calibration."""
    from blackswan.falsifiers.numeric.calibration import is_calibrated

    _merge(calibration_record.merged(options.file, {claim.id: claim for claim in _claims() if is_calibrated(claim)}))
    return 0


def _tasks(options: argparse.Namespace) -> Iterator[Task]:
    from blackswan.falsifiers.mutants import honest
    from blackswan.falsifiers.numeric.calibration import is_calibrated
    from blackswan.falsifiers.numeric.precision import CUDA_ONLY

    for claim in _chosen(_claims(), options.claim):
        real = claim.domain.input == "checkpoint"
        draws = max(4, options.cases // 15) if real else max(min(10, options.cases), options.cases * (claim.cases or 20) // 20)
        elsewhere = claim.domain.device and options.device.partition(":")[0] not in (*claim.domain.device, "auto")
        for dtype in claim.domain.dtype if is_calibrated(claim) and not elsewhere else ():
            if not options.dtype or dtype in options.dtype:
                honest_ones = [] if dtype in CUDA_ONLY else honest.names(claim)
                for way in honest_ones if options.honest else [""]:
                    yield claim.id, dtype, options.device, draws, options.seed, way


def _measured(tasks: Sequence[Task], jobs: int) -> Iterator[dict[str, Any]]:
    yield from map(_measure, tasks) if jobs == 1 else answers([partial(_measure, task) for task in tasks], jobs)


def _measure(task: Task) -> dict[str, Any]:
    from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
    from blackswan.falsifiers.mutants import honest
    from blackswan.falsifiers.numeric.calibration import calibrate
    from blackswan.falsifiers.numeric.precision import CUDA_ONLY
    from blackswan.falsifiers.runner.real_input import RealInput
    from blackswan.falsifiers.subjects.functions import Functions
    from blackswan.falsifiers.subjects.implementation import Implementation
    from blackswan.falsifiers.subjects.protocol import Subject
    from blackswan.falsifiers.subjects.tf32 import Tf32Emulation
    from blackswan.impl.operations import OPERATIONS

    name, dtype, device, draws, seed, way = task
    claim = next(claim for claim in _claims() if claim.id == name)
    source = RealInput(CHECKPOINT, CORPUS_HELDOUT).case if claim.domain.input == "checkpoint" else None
    if dtype in CUDA_ONLY and Implementation(device).device == "cpu":
        found = calibrate(claim, dtype, Tf32Emulation(), draws, seed, source)
        return {**found, "machine": f"{found['machine']}, TF32 emulated"}
    if way:
        found = calibrate(claim, dtype, honest.subject(way), draws, seed, source)
        return {**found, "machine": f"{found['machine']}, {way}"}
    subject: Subject = Implementation(device)
    if dtype == "float16":  # no setting of impl has this dtype, but its operations compute in it
        subject = Functions(OPERATIONS, "impl", subject.device)
    return calibrate(claim, dtype, subject, draws, seed, source)


def _merge(entries: Iterable[dict[str, Any]]) -> None:
    """Adds to the record, and writes the factors that follow from it; a claim that states its own factors keeps them."""
    record = calibration_record.add(entries)
    new = {}
    for claim in _claims():
        if claim.id in record and "factors" not in claim.content.get("tolerance", {}):
            known = [dtype for dtype in claim.domain.dtype if dtype in record[claim.id]]
            new[claim.id] = {dtype: calibration_record.factors(record, claim.id, dtype) for dtype in known}
    calibration_record.write_factors(new)


def _claims() -> list[Claim]:
    """All claims, those too that have no factors yet."""
    vocabulary = replace(contracts.load_vocabulary(), factors=None)
    return [claim for contract in contracts.load(vocabulary=vocabulary) for claim in contract.claims]


def _chosen(claims: Sequence[Claim], names: Sequence[str]) -> list[Claim]:
    known = {claim.id: claim for claim in claims}
    for name in names:
        if name not in known:
            raise ValueError(f"--claim: {unknown('claim', name, known)}")
    return [claim for claim in claims if not names or claim.id in names]
