"""Memory that a corpus takes: bytes a line while it is read, split, weighed and put in order, and of the commands that read one.

    python benchmarks/corpus_memory.py [--lines 20000 200000] [--commands predict resume]

Lines are those of the shipped corpus, again and again. Counted is what Python, NumPy and array allocate at the peak (tracemalloc); the
tokens lie in a temporary file and do not count. A part does not grow with the lines, so that the rate falls with their number.

With `--commands` the commands run instead, on the shipped checkpoint, until they give their first answer or make their first step: by then
they hold all that grows with the lines. Counted is the most that the process had resident (Linux), torch and the model with it.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import command
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_TRAIN
from blackswan.impl.samples import balanced_weights, epoch_order, read_samples, split_validation
from blackswan.impl.tokens import Tokens, load_tokenizer

CLASSES, LARGE = 5, 2_000_000
COMMANDS = ("predict", "resume")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each number of lines, and what the rate of the last one comes to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=command.positive, nargs="+", default=[20_000, 200_000], help="lines (default: 20000 200000)")
    parser.add_argument("--commands", choices=COMMANDS, nargs="+", help="the peak of these commands instead")
    given = parser.parse_args(arguments)
    if given.commands:
        return _commands(given.commands, given.lines)
    lines = given.lines
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
        path = _corpus(Path(folder), lines)
        tracemalloc.start()
        try:
            samples, validation = split_validation(read_samples(path, tokens, CLASSES), 0.1, seed=0)
            balanced_weights(samples, "balanced")
            assert len(epoch_order(len(samples), 0, 0)) + len(validation) == lines
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def _corpus(folder: Path, lines: int) -> Path:
    path = folder / "corpus.jsonl"
    with path.open("wb") as file:
        file.writelines(islice(cycle(CORPUS_TRAIN.read_bytes().splitlines(keepends=True)), lines))
    return path


def _commands(names: Sequence[str], lines: Sequence[int]) -> int:
    print(f"{'command':>8}  {'lines':>9}  {'seconds':>8}  {'peak MB':>8}")
    for name in names:
        for count in lines:
            start, peak = time.perf_counter(), peak_of_command(name, count)
            print(f"{name:>8}  {count:>9,}  {time.perf_counter() - start:>8.1f}  {peak / 1e6:>8.1f}", flush=True)
    return 0


def peak_of_command(name: str, lines: int) -> int:
    """The most bytes that `predict`, or `train --resume` of a run that was killed after a step, has resident on so many lines."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        corpus, run = _corpus(place, lines), place / "run"
        train = ["train", f"--model={CHECKPOINT}", f"--corpus={corpus}", f"--output={run}", f"--num-classes={CLASSES}", "--max-seq-len=160"]
        if name == "resume":
            metrics = run / "metrics.jsonl"
            _resident([*train, "--save-every=1"], place, lambda _: _lines(metrics) > 1)
            made = _lines(metrics)
            return _resident([*train, "--resume"], place, lambda _: _lines(metrics) > made)
        few = place / "few.jsonl"
        few.write_bytes(b"".join(corpus.read_bytes().splitlines(keepends=True)[:100]))
        settings = ["--epochs=1", "--validation-fraction=0", "--quantize-nf4"]
        trained = [each.replace(str(corpus), str(few)) for each in train]
        subprocess.run([sys.executable, "-m", "blackswan.impl", *trained, *settings], check=True, capture_output=True)  # noqa: S603
        return _resident(["predict", f"--adapter={run}", f"--corpus={corpus}"], place, lambda out: _lines(out) > 0)


def _resident(arguments: Sequence[str], place: Path, begun: Callable[[Path], bool]) -> int:
    """The peak of the command's process when its work has begun, at which it is killed. `begun` is asked with its output."""
    out, errors = place / "out", place / "errors"
    with out.open("wb") as output, errors.open("wb") as said:
        process = subprocess.Popen([sys.executable, "-u", "-m", "blackswan.impl", *arguments], stdout=output, stderr=said)  # noqa: S603
        try:
            while not begun(out):
                if process.poll() is not None:
                    raise RuntimeError(f"{arguments[0]} ended with {process.returncode}: {errors.read_text()}")
                time.sleep(0.05)
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
            process.wait()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


if __name__ == "__main__":
    command.start(main)
