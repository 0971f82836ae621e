"""What the harness costs: seconds of drawing, comparing and recording against those of reference and implementation, by number of examples.

    python benchmarks/falsifier_overhead.py [--examples 5 10 20 40] [--claim ID ...]

Each row is one whole run over the claims on the CPU, in this process, after a warm-up run that pays the imports. `noise` is the reference
once more, under rounding; the ratio leaves it out of both sides.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import command
from blackswan import contracts
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.runner.campaign import Campaign, Selection
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.runner.verdict_file import VerdictFile
from blackswan.falsifiers.subjects.implementation import Implementation

COLUMNS = ("examples", "cases", "drawing", "reference", "noise", "subject", "comparison", "engine", "recording", "total", "ratio")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each number of examples, the ratio of the default run, and how the time grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=command.positive, nargs="+", default=[5, 10, 20, 40], help="a claim (default: 5 10 20 40)")
    parser.add_argument("--claim", action="append", default=[], metavar="ID", help="this claim only; may be repeated")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.claim) - {claim.id for contract in contracts.load() for claim in contract.claims}):
        parser.error(f"no claim is named {unknown[0]!r}")
    run(1, options.claim)
    print("  ".join(f"{name:>10}" for name in COLUMNS))
    rows = []
    for examples in options.examples:
        rows.append(run(examples, options.claim))
        print("  ".join(f"{value:>10.2f}" if isinstance(value, float) else f"{value:>10}" for value in rows[-1]), flush=True)
    default = run(None, options.claim)
    print("default run: " + ", ".join(f"{name} {value:.2f}" for name, value in zip(COLUMNS[1:], default[1:], strict=True)))
    median = statistics.median(row[-1] for row in rows)
    print(f"harness / (reference + implementation): {default[-1]:.2f} in the default run, median {median:.2f} above")
    first, last = rows[0], rows[-1]
    if first[0] != last[0]:
        exponent = math.log(last[-2] / first[-2]) / math.log(last[0] / first[0])
        print(f"total grows as examples^{exponent:.2f} from {first[0]} to {last[0]} examples")
    return 0


def run(examples: int | None, claims: Sequence[str]) -> list[float]:
    """One run: examples, cases, seconds by stage, seconds in all, and harness / (reference + implementation)."""
    with tempfile.TemporaryDirectory() as folder:
        real_input = RealInput(CHECKPOINT, CORPUS_HELDOUT)
        campaign = Campaign(
            Implementation("cpu"), contracts.load(), Options(examples=examples), Selection(claims), real_input, Path(folder) / "v.jsonl"
        )
        file = VerdictFile(campaign)
        file.open()
        verdicts = []
        start = time.perf_counter()
        for target in campaign.targets():
            verdicts.append(campaign.attack(target))
            file.add(campaign.record(verdicts[-1]))
        total = time.perf_counter() - start
        file.close(0, interrupted=False)
    spent = Counter[str]()
    for verdict in verdicts:
        spent.update(verdict.seconds)
        if verdict.state not in (State.HELD, State.NOT_RUN):
            print(f"note: {verdict.claim.id} in {verdict.dtype} is {verdict.state.value}")
    stages = ("drawing", "reference", "noise", "subject", "comparison")
    engine = spent["total"] - sum(spent[stage] for stage in stages)
    recording = total - spent["total"]
    harness = spent["drawing"] + spent["comparison"] + engine + recording
    cases = sum(verdict.tally.run for verdict in verdicts)
    ratio = harness / (spent["reference"] + spent["subject"])
    return [examples or 0, cases, *(spent[stage] for stage in stages), engine, recording, total, ratio]


if __name__ == "__main__":
    command.start(main)
