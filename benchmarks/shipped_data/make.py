"""Makes the shipped input again: `python -m benchmarks.shipped_data.make corpus | tokenizer | checkpoint | baseline | all`."""

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.shipped_data.language_model import STEPS
from benchmarks.shipped_data.scripts import SEED, Example, make_corpus
from blackswan.falsifiers.data import CLASSES, DATA

TRAIN, HELDOUT = Path("corpus", "train.jsonl"), Path("corpus", "heldout.jsonl")
CHECKPOINT = Path("checkpoint")
TOKENIZER = CHECKPOINT / "tokenizer.json"
PROVENANCE = Path("PROVENANCE.json")


class MakeError(Exception):
    """Something is missing that a step needs; the message says what and where to get it."""


def make_corpus_files(options: argparse.Namespace) -> dict[str, Any]:
    """Write both splits; returns the section of the provenance."""
    splits = dict(zip((TRAIN, HELDOUT), make_corpus(options.seed), strict=True))
    for path, examples in splits.items():
        _write(options.output / path, corpus_text(examples))
    counts = {
        path.stem: [sum(example.label == label for example in split) for label in range(len(CLASSES))] for path, split in splits.items()
    }
    return {"seed": options.seed, "classes": CLASSES, "counts": counts}


def corpus_text(examples: Sequence[Example]) -> str:
    """The JSONL text of a split."""
    return "".join(json.dumps({"input": example.text, "label": example.label}) + "\n" for example in examples)


def make_tokenizer(options: argparse.Namespace) -> dict[str, Any]:
    """Train and write the tokenizer; returns the section of the provenance."""
    from benchmarks.shipped_data.language_model import EOS, PAD, VOCABULARY, train_tokenizer

    texts = _texts(options.output / TRAIN)
    (options.output / CHECKPOINT).mkdir(parents=True, exist_ok=True)
    train_tokenizer(texts, options.output / TOKENIZER)
    return {
        "vocabulary": VOCABULARY,
        "special_tokens": [PAD, EOS],
        "tokenizers": version("tokenizers"),
        "corpus": _digest(options.output / TRAIN),
    }


def make_checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Train and write the language model; returns the section of the provenance."""
    if not (options.output / TOKENIZER).exists():
        raise MakeError(f"{options.output / TOKENIZER} does not exist; make it first: python -m benchmarks.shipped_data.make tokenizer")
    import torch

    from benchmarks.shipped_data import language_model

    train, heldout = (language_model.encode(_texts(options.output / path), options.output / TOKENIZER) for path in (TRAIN, HELDOUT))
    torch.set_num_threads(options.threads)
    model = language_model.new_model(options.seed)
    started = time.monotonic()
    language_model.train_model(
        model, train, options.steps, options.seed, lambda line: _say(f"[{time.monotonic() - started:6.0f} s] {line}")
    )
    model.save_pretrained(options.output / CHECKPOINT)
    (options.output / CHECKPOINT / "generation_config.json").unlink(missing_ok=True)
    losses = {
        "train": language_model.mean_loss(model, train),
        "heldout": language_model.mean_loss(model, heldout),
        "heldout_without_biases": language_model.mean_loss(language_model.without_biases(model), heldout),
        "ln_vocabulary": math.log(language_model.VOCABULARY),
    }
    _say(", ".join(f"{name} {value:.4f}" for name, value in losses.items()))
    return {
        "seed": options.seed,
        "steps": options.steps,
        "batch": language_model.BATCH,
        "learning_rate": language_model.LEARNING_RATE,
        "threads": options.threads,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_tokens": sum(map(len, train)),
        "losses": {name: round(value, 4) for name, value in losses.items()},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "corpus": _digest(options.output / TRAIN),
        "tokenizer": _digest(options.output / TOKENIZER),
    }


def measure_baseline(options: argparse.Namespace) -> dict[str, Any]:
    """Held-out accuracy of TF-IDF with logistic regression, for words and for blank-separated tokens, one at a time and in pairs."""
    (train, train_labels), (heldout, heldout_labels) = (_read(options.output / path) for path in (TRAIN, HELDOUT))
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    accuracy: dict[str, float] = {}
    for name, pattern in {"words": r"\b\w\w+\b", "blank-separated": r"\S+"}.items():
        for longest in (1, 2):
            features = TfidfVectorizer(ngram_range=(1, longest), token_pattern=pattern, lowercase=False)
            classifier = make_pipeline(features, LogisticRegression(C=10, max_iter=2000)).fit(train, train_labels)
            key = f"{name}, {'pairs' if longest == 2 else 'single'}"
            accuracy[key] = round(float(classifier.score(heldout, heldout_labels)), 4)
            _say(f"TF-IDF {key}: {accuracy[key]:.4f}")
    return {"accuracy": accuracy, "scikit-learn": version("scikit-learn"), "corpus": _digest(options.output / TRAIN)}


STEPS_OF: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "corpus": make_corpus_files,
    "tokenizer": make_tokenizer,
    "checkpoint": make_checkpoint,
    "baseline": measure_baseline,
}


def write_provenance(output: Path, section: str, content: dict[str, Any]) -> None:
    """Replace one section of PROVENANCE.json and take the digests of all files anew."""
    path = output / PROVENANCE
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    shipped = sorted(file for folder in ("corpus", "checkpoint") for file in (output / folder).glob("*") if file.is_file())
    record[section] = content
    record["files"] = {file.relative_to(output).as_posix(): {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in shipped}
    _write(path, json.dumps(record, indent=2) + "\n")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> tuple[list[str], list[int]]:
    if not path.exists():
        raise MakeError(f"{path} does not exist; make it first: python -m benchmarks.shipped_data.make corpus")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["input"] for row in rows], [row["label"] for row in rows]


def _texts(path: Path) -> list[str]:
    return _read(path)[0]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shipped_data.make", description=__doc__)
    parser.add_argument("what", choices=[*STEPS_OF, "all"], help="what to make; all is corpus, tokenizer and checkpoint")
    parser.add_argument("--output", type=Path, default=DATA, help="folder to write to (default: the shipped one)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=_positive, default=STEPS, help=f"training steps of the language model (default: {STEPS})")
    parser.add_argument("--threads", type=_positive, default=2, help="threads to train with (default: 2)")
    options = parser.parse_args(arguments)
    try:
        for step in ("corpus", "tokenizer", "checkpoint") if options.what == "all" else (options.what,):
            _say(f"{step} → {options.output}")
            write_provenance(options.output, step, STEPS_OF[step](options))
    except ModuleNotFoundError as error:
        _say(f"{parser.prog}: package {error.name} is needed for this step and is not installed; pip install {error.name}")
        return 1
    except (MakeError, OSError) as error:
        _say(f"{parser.prog}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
