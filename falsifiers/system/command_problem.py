"""A small classifier that the commands train, evaluate and ask: its files, and what an independent reader makes of them."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from blackswan import reference
from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.system.adapter_files import TOKENIZER, Model, generated, read_adapter
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, METRICS, RUN, STATISTICS, STATE = "config.yaml", "metrics.jsonl", "run.json", "statistics.yaml", "state/state.safetensors"
MAX_SEQ_LEN = 10
STANDSTILL = 1e-30
"""A learning rate by which no logit moves: every number of a run is then that of the adapter that it leaves."""
ODD = (
    *("  rm -rf", "rm -rf  ", "\tdate", "rm\trf", " ", "", "\x0bls", "ls\x0c", "a\x1cb", "a\x85", "\u2028b", "\ufeffls", "\u00a0ls"),
    *("a\rb", '"q"', "\\n", "e\u0301", "\u00e9", "🙂", "{}", "-rf", "@reboot", "date"),
)
"""Texts of one line that a door may change: white space at either end, other line ends, an empty one."""
LEFT_BY_OTHERS: Mapping[str, Any] = {
    "truncation": {"direction": "Left", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        **{"strategy": {"Fixed": 7}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 5, "pad_type_id": 0, "pad_token": "p"},
    },
}
"""A tokenizer is saved with these by a program that was cutting and padding texts; they are not those of a run."""
LARGE_TEXT = "ls " * 2**15
"""This text has more bytes than a command keeps in memory before it has read all texts."""
LONG = "cp one two three four five six seven eight nine ten eleven"


@dataclass(frozen=True)
class Small:
    """A checkpoint `base` with the shipped tokenizer, the same as arrays, and the settings of a run on it, all of which are given."""

    folder: Path
    model: Model
    settings: dict[str, Any]

    @property
    def base(self) -> Path:
        """The checkpoint's folder."""
        return self.folder / "base"

    @property
    def several(self) -> bool:
        """Whether a text has several labels."""
        return bool(self.settings["multi_label"])

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.settings["num_classes"])

    def corpus(self, name: str, texts: Sequence[str], labels: Sequence[Label]) -> Path:
        """Writes a corpus."""
        path = self.folder / f"{name}.jsonl"
        rows = ({"input": text, "labels" if isinstance(label, list) else "label": label} for text, label in zip(texts, labels, strict=True))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def labels(self, rng: Generator, count: int, without: int | None = None) -> list[Label]:
        """Drawn labels, every class at least once where there are so many texts, else each at most once; `without` has none."""
        chosen = [label for label in range(self.classes) if label != without]
        if self.several:
            drawn = rng.integers(0, 2, (count, self.classes))
            drawn[:, [label for label in range(self.classes) if label not in chosen]] = 0
            rows: list[Label] = drawn.tolist()
            return rows
        if count < len(chosen):
            return [int(label) for label in rng.permutation(chosen)[:count]]
        return [chosen[place] if place < len(chosen) else int(rng.choice(chosen)) for place in range(count)]

    def with_weights_of(self, labels: Sequence[Label]) -> "Small":
        """The same with the numbers that balance these labels, where its class weights are a word."""
        if not isinstance(kind := self.settings["class_weights"], str):
            return self
        counts = np.bincount(np.asarray(labels), minlength=self.classes)
        scale = counts.sum() / self.classes if kind == "balanced" else self.classes / (1.0 / counts).sum()
        return replace(self, settings={**self.settings, "class_weights": (scale / counts).tolist()})

    def inputs(self, adapter: Path, texts: Sequence[str]) -> dict[str, Array]:
        """The inputs of the reference's classifier with an adapter's files, its ids cut and padded here."""
        rows = [tokenizer().encode(text).ids[:MAX_SEQ_LEN] or [0] for text in texts]
        longest = max(map(len, rows))
        ids = np.array([row + [0] * (longest - len(row)) for row in rows])
        mask = np.arange(longest) < np.array([len(row) for row in rows])[:, None]
        trainable = read_adapter(adapter, self.model.scalars)
        return replace(self.model, trainable=trainable, input_ids=ids, mask=mask).inputs()

    def logits(self, adapter: Path, texts: Sequence[str]) -> Array:
        """[texts, classes] in float64."""
        return np.asarray(reference.evaluate("classifier_forward", self.inputs(adapter, texts), self.model.scalars)["logits"])

    def losses(self, logits: Array, labels: Sequence[Label]) -> Array:
        """The loss of each text, with its class's weight, [texts]."""
        wanted = np.asarray(labels)
        if self.several:
            return np.asarray((np.logaddexp(0.0, logits) - wanted * logits).mean(axis=1))
        shifted = logits - logits.max(axis=1, keepdims=True)
        found = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(wanted)), wanted]
        weights = self.settings["class_weights"]
        return np.asarray(found if weights is None else found * np.asarray(weights)[wanted])


@contextmanager
def small(trial: Trial, name: str, fixed: Mapping[str, Any], **architecture: Any) -> Iterator[Small]:
    """A problem of the trial's seed and a name, in a folder of its own; what is fixed or of the architecture is not drawn."""
    rng = trial.rng(f"classifier {name}")
    rank = int(rng.integers(2, 5))
    settings: dict[str, Any] = {
        **{"num_classes": 4, "multi_label": bool(rng.integers(2)), "lora_rank": rank, "lora_alpha": rank * float(rng.choice([0.5, 3.0]))},
        **{"lora_targets": str(rng.choice(["q_v", "all"])), "pooling": str(rng.choice(["mean", "last", "first"]))},
        **{"padding_side": str(rng.choice(["right", "left"])), "seed": int(rng.integers(1, 2**31)), "max_seq_len": MAX_SEQ_LEN},
        **{"learning_rate": 0.05, "schedule": "constant", "warmup_fraction": 0.0, "weight_decay": 0.1, "gradient_clip_norm": 0.7},
        **{"epochs": 2, "batch_size": 3, "accumulation_steps": 2, "log_interval": 2, "class_weights": None, "dtype": "float32"},
        **{"quantize_nf4": False, "double_quantize": False, "validation_fraction": 0.2, "early_stop_patience": None},
        **{"backend": "auto"},
        **fixed,
    }
    scalars = {"classes": settings["num_classes"], "rank": settings["lora_rank"], "alpha": settings["lora_alpha"]}
    scalars |= {"targets": settings["lora_targets"].replace(",", "+"), "pooling": settings["pooling"], "nf4": settings["quantize_nf4"]}
    scalars |= {"double_quantize": settings["double_quantize"], "vocab": tokenizer().get_vocab_size()}
    scalars |= architecture
    with tempfile.TemporaryDirectory() as folder:
        model = generated(rng, trial.seed, "float32", factor=1.0, **scalars)
        base = model.write_checkpoint(Path(folder) / "base")
        said = json.loads((CHECKPOINT / TOKENIZER).read_text(encoding="utf-8"))
        (base / TOKENIZER).write_text(json.dumps({**said, **LEFT_BY_OTHERS}, ensure_ascii=False), encoding="utf-8")
        yield Small(Path(folder), model, settings)


@cache
def tokenizer() -> "Tokenizer":
    """The shipped tokenizer, by its own library."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(CHECKPOINT / TOKENIZER))


def options(settings: Mapping[str, Any]) -> list[str]:
    """Settings as options of a command line."""
    return [_option(f"--{name.replace('_', '-')}", value) for name, value in settings.items()]


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else name.replace("--", "--no-", 1)
    return f"{name}={'none' if value is None else ','.join(map(repr, value)) if isinstance(value, list) else value}"


def texts_of(rng: Generator, count: int) -> list[str]:
    """Odd texts of one line each in a drawn order; where there are several, one that is cut and one that is not empty are the last."""
    odd = [str(text) for text in rng.permutation(ODD)]
    return [*(f"ls {index}" for index in range(count - len(odd) - 2)), *odd, LONG, "rm"][-count:]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without the seconds, which no two runs share."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in timed_metrics(run)]


def timed_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (run / METRICS).read_text().splitlines()]


def kind_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Whether a line of the metrics is a step's or an epoch's, and its place in the run."""
    return (line["kind"], line["epoch"], line.get("step"), line.get("samples"))


def number_of(line: Mapping[str, Any]) -> str:
    """A line of the metrics by its number."""
    return f"{line['kind']} {line.get('step', line['epoch'])}"


def in_yaml(file: Path) -> dict[str, Any]:
    """The values of a YAML file, as a reader of numbers, words and lists of them takes them, however they are laid out."""
    return {key: plain(value) for key, value in yaml.load(file.read_text(), yaml.BaseLoader).items()}  # noqa: S506  # it makes words alone


def plain(text: str | list[Any]) -> Any:
    """A value of a YAML file, from its words."""
    if isinstance(text, list):
        return [plain(part) for part in text]
    if text in ("null", "true", "false"):
        return json.loads(text)
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|\.inf", text)
    return float(text.replace(".inf", "inf")) if number else text


@contextmanager
def piped(content: bytes) -> Iterator[str]:
    """The name of a pipe, as a shell's `<(…)` has one, from which that content can be read once."""
    reading, writing = os.pipe()
    with os.fdopen(reading), ThreadPoolExecutor(1) as writer:
        writer.submit(_write, writing, content)
        yield f"/dev/fd/{reading}"


@contextmanager
def fed(pipe: Path, content: bytes) -> Iterator[Path]:
    """A pipe with a name of its own, in which each who opens it while nobody else has it open finds that content."""
    os.mkfifo(pipe)
    over = Event()
    with ThreadPoolExecutor(1) as writer:
        writer.submit(_feed, pipe, content, over)
        try:
            yield pipe
        finally:
            over.set()


def _feed(pipe: Path, content: bytes, over: Event) -> None:
    while not over.wait(0.01):
        with suppress(OSError):  # nobody reads
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            _write(descriptor, content)


def _write(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(content)
