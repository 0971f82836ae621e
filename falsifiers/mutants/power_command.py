"""`python -m falsifiers power`: runs the kill matrix, prints it as it grows, and fails where a claim cannot fail or a mutant survives."""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from blackswan import contracts
from blackswan.contracts.model import Claim
from blackswan.contracts.problems import unknown
from blackswan.contracts.vocabulary import own_folder
from blackswan.falsifiers import mutants
from blackswan.falsifiers.diagnosis import run_failures
from blackswan.falsifiers.mutants import power, power_report
from blackswan.falsifiers.runner.options import json_lines
from blackswan.falsifiers.runner.verdict import plain


def run(options: argparse.Namespace) -> int:
    """Exit status 0 where every mutant dies and every claim can fail, 1 otherwise."""
    start = time.perf_counter()
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels are asked on a CPU, too; Triton looks for it when it is imported
    own = own_folder()
    loaded = [claim for contract in contracts.load() if own is None or contract.path.parent == own for claim in contract.claims]
    claims = _selected("claim", {claim.id: claim for claim in loaded}, options.claim)
    every = {name: entry for name, entry in mutants.every().items() if own is None or name in mutants.own_mutants()}
    names = [entry.name for entry in _selected("mutant", every, options.mutant)]
    selected = bool(options.claim or options.mutant)
    tasks = power.first_tasks(claims, options.full or selected, options.mutant)
    _require_tried(options.mutant, tasks, options.claim, loaded)
    if options.output:
        json_lines("--output", options.output, [field.name for field in dataclasses.fields(power.Cell)])
    cells = _attack(tasks, options.processes)
    if not selected:
        cells += _attack(power.further_tasks(claims, cells), options.processes)
    if options.output:
        options.output.write_text("".join(json.dumps(plain(dataclasses.asdict(cell))) + "\n" for cell in cells), encoding="utf-8")
    if options.record_failures:
        _record_failures(loaded, claims, cells)
    faults = _concluded(options, claims, names, cells, time.perf_counter() - start)
    return 1 if faults else 0


def _concluded(
    options: argparse.Namespace, claims: Sequence[Claim], names: Sequence[str], cells: Sequence[power.Cell], seconds: float
) -> Sequence[str]:
    """The faults, printed below the tables, or that there are none."""
    tried = {cell.mutant for cell in cells}
    shown = [name for name in names if name in tried] if options.claim else names
    must_die = () if options.claim and not options.mutant else names  # some are beyond a claim, and what it must catch is asked anyway
    faults = power_report.faults(claims, must_die, cells, bool(options.mutant))
    print("\n".join(["\nmutant: the quickest kill, and by which claims", *power_report.kill_table(shown, cells)]))
    least = "claim and dtype: power (the least, over the mutants to catch, of the largest error / tolerance) and the mutant that gives it"
    print("\n".join([f"\n{least}", *power_report.power_table(cells)]))
    if faults:
        print("\n  ".join(["\nfaults", *faults]))
    right = len({cell.mutant for cell in cells if cell.honest})
    counts = f"{len(shown)} mutants, {right} honest ones, {len({cell.claim for cell in cells})} claims, {len(cells)} cells"
    closing = f"{len(faults)} faults" if faults else power_report.closing(shown, cells, bool(options.claim), bool(options.mutant))
    print(f"\n{counts} in {seconds:.0f} s: {closing}")
    return faults


def _record_failures(every: Sequence[Claim], claims: Sequence[Claim], cells: Sequence[power.Cell]) -> None:
    """Records where the selected claims failed on each mutant; what is recorded of the other claims stays."""
    systems, selected = ({claim.id for claim in each if claim.system} for each in (every, claims))
    killed = ((cell.claim, cell.mutant, cell.tensor) for cell in cells if cell.mutant and cell.tensor and cell.claim in systems)
    run_failures.record(killed, systems - selected)


def _require_tried(chosen: Sequence[str], tasks: Sequence[power.Task], claims: Sequence[str], loaded: Sequence[Claim]) -> None:
    """ValueError where a chosen mutant would be tried on no claim, with those that reach it."""
    tried = {name for task in tasks for name in task.subjects}
    for name in chosen:
        if name not in tried:
            by = power_report.listed(claims) or "any claim in a dtype that the CPU has"
            reach = sorted(
                (claim for claim in loaded if name in power.candidate_mutants(claim)), key=lambda claim: name not in power.must_catch(claim)
            )
            found = power_report.listed([claim.id for claim in reach]) or "none"
            raise ValueError(f"--mutant {name}: not reached by {by}; claims that reach it, those that must catch it first: {found}")


def _selected(what: str, known: dict[str, Any], chosen: Sequence[str]) -> list[Any]:
    for name in chosen:
        if name not in known:
            raise ValueError(f"--{what}: {unknown(what, name, known)}")
    return [entry for name, entry in known.items() if not chosen or name in chosen]


def _attack(tasks: Sequence[power.Task], processes: int) -> list[power.Cell]:
    found: list[power.Cell] = []
    for number, cells in enumerate(power.run(tasks, processes), start=1):
        found += cells
        against = [cell for cell in cells if cell.mutant is not None and not cell.honest]
        spent = sum(cell.seconds for cell in cells)
        killed = sum(cell.killed for cell in against)
        print(f"[{number}/{len(tasks)}] {cells[0].claim} in {cells[0].dtype}: {killed} of {len(against)} killed, {spent:.1f} s", flush=True)
    return found
