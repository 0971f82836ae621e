"""What the learning benchmark runs with: the learning rate, and TF-IDF's features and strength, chosen on the training split alone.

    python benchmarks/learning_choice.py [--processes 3]

The rate is chosen on a fifth of the training split, TF-IDF's part by cross-validation on it. Writes
benchmarks/results/learning-choice.json.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import baselines, command, paired
from benchmarks.learning import CHOICE, Input, cpu_seconds, digests, read, say, trained, versions
from blackswan.falsifiers.runner import workers

SETTINGS: dict[str, Any] = {
    "num_classes": 5, "lora_rank": 16, "lora_alpha": 32.0, "lora_targets": "q_v", "batch_size": 16, "max_seq_len": 256, "pooling": "mean",
    "validation_fraction": 0.0, "epochs": 8,
}  # fmt: skip
# Tried at the full number of epochs: in fewer of them a rate does best that is too high for more.
RATES = (1e-3, 3e-3, 1e-2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=command.positive, default=3, help="at a time, one thread each (default: 3)")
    options = parser.parse_args(arguments)
    command.require_writable(CHOICE)
    CHOICE.write_text(json.dumps(choose(Input(), SETTINGS, RATES, options.processes), indent=1) + "\n", encoding="utf-8")
    return 0


def choose(given: Input, settings: dict[str, Any], rates: Sequence[float], processes: int) -> dict[str, Any]:
    """Settings with the best rate, every rate and every choice of TF-IDF with its accuracy, the best TF-IDF first; as JSON holds them."""
    started, spent = time.monotonic(), cpu_seconds()
    texts, labels = read(given.train)
    groups = paired.families(texts)
    inner, outer = _fifth(labels, groups)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    with tempfile.TemporaryDirectory() as folder:
        part = _write_part(Path(folder), given.train, inner)
        asked = [[texts[index] for index in outer]]
        trials = [partial(trained, given.checkpoint, part, asked, settings | {"learning_rate": rate}) for rate in rates]
        features = partial(baselines.candidates, texts, labels, groups)
        *answers, found = list[Any](workers.answers([*trials, features], processes, in_order=True))
    right = [paired.accuracy(answer[0], [labels[index] for index in outer]) for answer in answers]
    rate = rates[right.index(max(right))]
    say(f"learning rate {rate:g}, by accuracy on {len(outer)} training scripts left out: {dict(zip(rates, right, strict=True))}")
    say(f"{found[0]}: {found[0].accuracy:.3f} in cross-validation")
    return {
        "settings": settings | {"learning_rate": rate},
        "rates": [{"learning_rate": rate, "accuracy": value} for rate, value in zip(rates, right, strict=True)],
        "tf_idf": [asdict(choice) for choice in found],
        "seconds": round(time.monotonic() - started),
        "cpu_seconds": round(cpu_seconds() - spent),
        "processes": processes,
        "versions": versions(),
        "sha256": digests({"checkpoint": given.checkpoint / "model.safetensors", "train": given.train}),
    }


def _fifth(labels: Sequence[int], groups: Sequence[int]) -> tuple[list[int], list[int]]:
    """Indices to train on, and a fifth of all to choose by, stratified and with families whole."""
    from sklearn.model_selection import StratifiedGroupKFold

    inner, outer = next(iter(StratifiedGroupKFold(5, shuffle=True, random_state=0).split(list(labels), list(labels), list(groups))))
    return [int(index) for index in inner], [int(index) for index in outer]


def _write_part(folder: Path, corpus: Path, indices: Sequence[int]) -> Path:
    lines, path = corpus.read_text(encoding="utf-8").splitlines(keepends=True), folder / "part.jsonl"
    path.write_text("".join(lines[index] for index in indices), encoding="utf-8")
    return path


if __name__ == "__main__":
    command.start(main)
