"""Claims about the samples that a run trains on and validates on, from a corpus on disk to every pass."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Read, Sample
from blackswan.falsifiers.system.adapter_files import TOKENIZER, generated
from blackswan.falsifiers.system.same import same, same_samples
from blackswan.falsifiers.system.trial import Trial

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLASSES, EPOCHS = 3, 2
Rows = list[tuple[str, int]]
SETTINGS: dict[str, Any] = {
    **{"num_classes": CLASSES, "lora_rank": 2, "batch_size": 2, "accumulation_steps": 2, "epochs": EPOCHS, "max_seq_len": 16},
    **{"quantize_nf4": False, "dtype": "float32", "backend": "torch"},
}


def validation_samples_are_not_trained_on(trial: Trial) -> list[Comparison]:
    """Every epoch trains on each sample that the split does not hold out, once, and validates on each that it does, once.

    Where a validation corpus is given, a run trains on all of the corpus and validates on that one, whatever fraction of other corpora the
    settings hold out: none, their default or the one that is drawn. Both entries to a run are tried. Python may give an empty list for
    validation: then all is trained on, and nothing validated.
    """
    rng = trial.rng("split run")
    fraction, seed = float(rng.choice([0.1, 0.2, 0.25])), int(rng.integers(2**32, 2**63 - 1))
    used = {"validation_fraction": fraction}
    unused: list[dict[str, Any]] = [{"validation_fraction": 0.0, "early_stop_patience": EPOCHS}, [{}, used][trial.seed % 2]]
    own, other = _rows(rng, "rm", int(rng.integers(18, 31))), _rows(rng, "date", int(rng.integers(3, 8)))
    labels: list[Label] = [label for _, label in own]
    split = trial.corpora.split(labels, CLASSES, fraction, seed)
    parts = [own[place] for place in split.training], [own[place] for place in split.validation]
    found = []
    with tempfile.TemporaryDirectory() as parent:
        model = generated(rng, trial.seed, "float32", vocab=_tokenizer().get_vocab_size()).write_checkpoint(Path(parent) / "model")
        shutil.copy(CHECKPOINT / TOKENIZER, model)
        files = {"model": model, "corpus": _written(Path(parent) / "corpus.jsonl", own)}
        given = files | {"validation": _written(Path(parent) / "validation.jsonl", other)}
        for entry in ("pipeline", "command"):
            runs = {"split": (used, files, parts)} | {f"given beside {each}": (each, given, (own, other)) for each in unused}
            for name, (settings, places, expected) in runs.items():
                folder = Path(parent) / f"{entry} {len(list(Path(parent).iterdir()))}"
                reads = trial.trainer.fit_files(entry, SETTINGS | {"seed": seed} | settings, folder, **places)
                found += _epochs(f"{entry}, validation {name}", reads, *expected)
        (empty := Path(parent) / "empty.jsonl").write_text("")
        reads = trial.trainer.fit_files("pipeline", SETTINGS | used, Path(parent) / "alone", **files, validation=empty)
        found.append(same_samples("trained on without validation", EPOCHS * _samples(own), [read.sample for read in reads if read.trained]))
    return found


def _epochs(name: str, reads: Sequence[Read], train: Rows, validate: Rows) -> list[Comparison]:
    """Training and validation take turns: where one begins after the other, a part of an epoch ends."""
    parts = [[read.sample for read in part] for _, part in groupby(reads, key=lambda read: read.trained)]
    found = same(f"{name}: parts of epochs", 2 * EPOCHS, len(parts))
    for index, part in enumerate(parts):
        what, expected = ("validated on", validate) if index % 2 else ("trained on", train)
        found.append(same_samples(f"{name}: {what} in epoch {index // 2 + 1}", _samples(expected), part))
    return found


def _samples(rows: Rows) -> list[Sample]:
    return [(tuple(_tokenizer().encode(text).ids), label) for text, label in rows]


@cache
def _tokenizer() -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(CHECKPOINT / TOKENIZER))


def _rows(rng: Generator, word: str, count: int) -> Rows:
    """Texts of which no two are alike, two samples of each class at least where there are so many."""
    labels: Sequence[int] = [*range(CLASSES), *range(CLASSES), *rng.integers(0, CLASSES, count).tolist()][:count]
    return [(f"{word} {index}", label) for index, label in enumerate(labels)]


def _written(path: Path, rows: Rows) -> Path:
    path.write_text("\n".join(json.dumps({"input": text, "label": label}) for text, label in rows))
    return path
