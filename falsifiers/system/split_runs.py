"""What a run trains on and what it validates on, from a corpus on disk to the samples of every pass."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, compare_exactly
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.system.adapter_files import TOKENIZER, generated
from blackswan.falsifiers.system.run_problem import same_texts
from blackswan.reference.table import Arrays

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLASSES, EPOCHS = 3, 2
Rows = list[tuple[str, int]]


def validation_samples_are_not_trained_on(attack: Attack, case: Case) -> list[Comparison]:
    """Every epoch trains on each sample that `split_validation` does not hold out, once, and validates on each that it does, once.

    Where a validation corpus is given, on all of the corpus and on that one. By either entry to a run.
    """
    rng = generator_for(case.seed, "split run")
    fraction, seed = float(rng.choice([0.1, 0.2, 0.25])), int(rng.integers(0, 2**31))
    own, other = _rows(rng, "rm", int(rng.integers(18, 31))), _rows(rng, "date", int(rng.integers(3, 8)))
    found = []
    with tempfile.TemporaryDirectory() as parent:
        model = generated(rng, case.seed, "float32", vocab=_tokenizer().get_vocab_size()).write_checkpoint(Path(parent) / "model")
        shutil.copy(CHECKPOINT / TOKENIZER, model)
        places = {"model": str(model), "corpus": _written(Path(parent) / "corpus.jsonl", own), "labels": [label for _, label in own]}
        validation = {"validation": _written(Path(parent) / "validation.jsonl", other)}
        for entry in ("pipeline", "command"):
            for name, more in (("split", {}), ("given", validation)):
                output = {"entry": entry, "output": str(Path(parent) / f"{entry} {name}"), "settings": _settings(fraction, seed)}
                answer = attack.answer(case, scalars={**places, **more, **output})
                parts = (own, other) if more else _parts(own, set(answer["held_out"].tolist()))
                found += _epochs(f"{entry}, validation {name}", answer, *parts)
    return found


def _parts(rows: Rows, held_out: set[int]) -> tuple[Rows, Rows]:
    return [row for index, row in enumerate(rows) if index not in held_out], [row for index, row in enumerate(rows) if index in held_out]


def _epochs(name: str, answer: Arrays, train: Rows, validate: Rows) -> list[Comparison]:
    """Training and validation take turns: where one begins after the other, a part of an epoch ends."""
    trained = answer["trained"].astype(bool)
    parts = np.split(answer["text"], np.flatnonzero(np.diff(trained)) + 1)
    found = [compare_exactly(f"{name}: parts of epochs", np.asarray(2 * EPOCHS), np.asarray(len(parts)))]
    for index, part in enumerate(parts):
        what, expected = ("validated on", validate) if index % 2 else ("trained on", train)
        found.append(same_texts(f"{name}: {what} in epoch {index // 2 + 1}", _texts(expected), sorted(part.tolist())))
    return found


def _texts(rows: Rows) -> list[str]:
    return sorted(json.dumps([_tokenizer().encode(text).ids, label]) for text, label in rows)


@cache
def _tokenizer() -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(CHECKPOINT / TOKENIZER))


def _rows(rng: Generator, word: str, count: int) -> Rows:
    """Texts of which no two are alike, two samples of each class at least where there are so many."""
    labels: Sequence[int] = [*range(CLASSES), *range(CLASSES), *rng.integers(0, CLASSES, count).tolist()][:count]
    return [(f"{word} {index}", label) for index, label in enumerate(labels)]


def _written(path: Path, rows: Rows) -> str:
    path.write_text("\n".join(json.dumps({"input": text, "label": label}) for text, label in rows))
    return str(path)


def _settings(fraction: float, seed: int) -> dict[str, Any]:
    return {
        "num_classes": CLASSES,
        "lora_rank": 2,
        "batch_size": 2,
        "accumulation_steps": 2,
        "epochs": EPOCHS,
        "max_seq_len": 16,
        "validation_fraction": fraction,
        "seed": seed,
        "quantize_nf4": False,
        "dtype": "float32",
        "engine": "torch",
    }
