"""Memory that a corpus takes in training: bytes a line while it is read, split, weighed and put in order, and what large corpora come to.

    python benchmarks/corpus_memory.py [--lines 20000 200000]

Lines are those of the shipped corpus, again and again. Counted is what Python, NumPy and array allocate at the peak (tracemalloc); the
tokens lie in a temporary file and do not count. A part does not grow with the lines, so that the rate falls with their number.
"""

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import command
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_TRAIN
from blackswan.impl.samples import balanced_weights, epoch_order, read_samples, split_validation
from blackswan.impl.tokens import Tokens, load_tokenizer

CLASSES, LARGE = 5, 2_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each number of lines, and what the rate of the last one comes to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=command.positive, nargs="+", default=[20_000, 200_000], help="lines (default: 20000 200000)")
    lines = parser.parse_args(arguments).lines
    tokens = load_tokenizer(CHECKPOINT, 160)
    print(f"{'lines':>9}  {'seconds':>8}  {'peak MB':>8}  {'bytes a line':>12}")
    for count in lines:
        start, peak = time.perf_counter(), peak_of(count, tokens)
        print(f"{count:>9,}  {time.perf_counter() - start:>8.1f}  {peak / 1e6:>8.1f}  {peak / count:>12.1f}", flush=True)
    print(f"{LARGE:,} lines take at most {peak / count * LARGE / 1e6:,.0f} MB at the last rate, beside torch and the model")
    return 0


def peak_of(lines: int, tokens: Tokens) -> int:
    """The most bytes that are allocated at once when so many lines are made ready for training."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        shipped = CORPUS_TRAIN.read_bytes().splitlines(keepends=True)
        with path.open("wb") as file:
            file.writelines(islice(cycle(shipped), lines))
        tracemalloc.start()
        try:
            samples, validation = split_validation(read_samples(path, tokens, CLASSES), 0.1, seed=0)
            balanced_weights(samples, "balanced")
            assert len(epoch_order(len(samples), 0, 0)) + len(validation) == lines
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


if __name__ == "__main__":
    command.start(main)
