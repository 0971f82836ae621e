"""A small training run: parameters, samples and settings drawn from a trial's seed, the reference's view of them, and its state."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from blackswan import reference
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.strategies import Draw, build
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Corpus, Kept, Problem, Run, Sample, State
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.classifier import trainable_names
from blackswan.reference.table import Array
from blackswan.reference.training import flatten

MICRO, ACCUMULATION = 2, 2
BATCH = MICRO * ACCUMULATION
ARCHITECTURE = ("family", "vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "eps", "theta", "tied")
SIZES = {"batch": 1, "seq": 2, "vocab": 257, "hidden": 16, "intermediate": 24, "layers": 1, "kv_heads": 1, "groups": 2, "half_dim": 4}
STATE = "state/state.safetensors"


@dataclass(frozen=True)
class SmallRun(Problem):
    """A problem whose parameters agree with its settings; `scalars` are those of the reference's classifier."""

    parameters: dict[str, Array]
    scalars: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The trainable tensors in their order: of each layer A before B, then the head."""
        return list(trainable_names(self.scalars))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.settings["num_classes"])

    @property
    def several(self) -> bool:
        """Whether a sample has several labels."""
        return bool(self.settings["multi_label"])

    @property
    def batches(self) -> list[int]:
        """Samples of each step of an epoch."""
        return [min(BATCH, len(self.training) - start) for start in range(0, len(self.training), BATCH)]

    def trainable(self) -> dict[str, Array]:
        """The trainable tensors before the first step."""
        return {name: self.parameters[name] for name in self.names}

    def loss(self, trainable: Mapping[str, Array], samples: Sequence[Sample]) -> float:
        """The reference's mean loss at those trainable tensors."""
        return float(reference.evaluate("classifier_loss", self.inputs(trainable, samples), self.scalars)["loss"])

    def gradient(self, trainable: Mapping[str, Array], samples: Sequence[Sample]) -> Array:
        """The reference's mean gradient, one vector [count]."""
        inputs = self.inputs(trainable, samples)
        found = reference.differentiate("classifier_loss", inputs, self.scalars, {"loss": np.ones(())}, ["trainable"])
        return flatten([found[f"parameters/{name}"] for name in self.names])

    def inputs(self, trainable: Mapping[str, Array], samples: Sequence[Sample]) -> dict[str, Array]:
        """The inputs of `classifier_loss`."""
        longest = max(len(row) for row, _ in samples)
        ids = np.array([[*row, *[0] * (longest - len(row))] for row, _ in samples])
        mask = np.array([[index < len(row) for index in range(longest)] for row, _ in samples])
        labels = np.array([label for _, label in samples], np.float64 if self.several else np.int64)
        kind = self.settings.get("class_weights")
        weights = {} if kind is None else {"class_weights": self._balanced(kind) if isinstance(kind, str) else np.asarray(kind)}
        named = {f"parameters/{name}": np.asarray(value, np.float64) for name, value in {**self.parameters, **trainable}.items()}
        return {**named, "input_ids": ids, "mask": mask, "labels": labels, **weights}

    def _balanced(self, kind: str) -> Array:
        """Inversely proportional to the number of samples, with a mean of 1 over the samples or over the classes."""
        counts = np.bincount(np.asarray(self.training.labels), minlength=self.classes)
        over_samples = kind == "balanced"
        return np.asarray((1.0 / counts) * (counts.sum() / self.classes if over_samples else self.classes / (1.0 / counts).sum()))


def small_run(trial: Trial, samples: tuple[int, int] = (9, 7), hidden: int = SIZES["hidden"], **settings: Any) -> SmallRun:
    """A run of the trial's seed, on so many samples for training and validation; the settings given are not drawn."""
    rng = trial.rng("run")
    drawn: dict[str, Any] = {"family": str(rng.choice(["llama", "qwen2", "qwen3"]))}
    targets, pooling = str(rng.choice(["q_v", "all"])), str(rng.choice(["mean", "last"]))
    settings = {
        **{"num_classes": 3, "multi_label": False, "lora_rank": 2, "lora_alpha": 4.0, "lora_targets": targets, "pooling": pooling},
        **{"batch_size": MICRO, "accumulation_steps": ACCUMULATION, "epochs": 2, "max_seq_len": 16, "learning_rate": 1e-2},
        "padding_side": str(trial.rng("side").choice(["right", "left"])),
        **{"gradient_clip_norm": 0.5, "quantize_nf4": False, "double_quantize": False, "seed": int(rng.integers(1000))},
        **({"backend": trial.backend} if trial.backend else {}),
        **settings,
    }
    drawn |= {"eps": 1e-6, "theta": 10000.0, "tied": True, "alpha": settings["lora_alpha"], "learning_rate": 1e-2}
    drawn |= {"targets": settings["lora_targets"], "pooling": settings["pooling"], "nf4": settings["quantize_nf4"]}
    drawn["double_quantize"] = settings["double_quantize"]
    sizes = {**SIZES, "hidden": hidden, "steps": 1, "micro": 1, "classes": settings["num_classes"], "rank": settings["lora_rank"]}
    case = build(replace(trial.claim, operation="train_steps"), Draw(sizes, drawn, {}, trial.seed), "normal", "float32")
    parameters = {name.removeprefix("parameters/"): value for name, value in case.inputs.items() if name.startswith("parameters/")}
    training, validation = (_corpus(rng, count, settings["num_classes"], settings["multi_label"]) for count in samples)
    architecture, scalars = {name: case.scalars[name] for name in ARCHITECTURE}, dict(case.scalars)
    return SmallRun(architecture, parameters, settings, training, validation, scalars)


def _corpus(rng: Generator, count: int, classes: int, several: bool) -> Corpus:
    """Rows of bytes, every class among the labels; no two samples alike: the first token is the sample's place."""
    rows = [[index, *rng.integers(0, 256, int(rng.integers(1, 7))).tolist()] for index in range(count)]
    if several:
        return Corpus(rows, (rng.random((count, classes)) < 0.5).astype(int).tolist())
    labels: list[Label] = [*range(classes), *rng.integers(0, classes, count).tolist()]
    return Corpus(rows, labels[:count])


PARTS = ("training", "validation")


def with_samples(problem: SmallRun, part: str, corpus: Corpus) -> SmallRun:
    """The run with other samples to train on, or to validate on."""
    return replace(problem, training=corpus) if part == "training" else replace(problem, validation=corpus)


def part(state: State, group: str) -> dict[str, Array]:
    """The tensors of one group of a state: `trainable`, `exp_avg` or `exp_avg_sq`."""
    return {name.removeprefix(f"{group}/"): value for name, value in state.items() if name.startswith(f"{group}/")}


def left_as_kept(when: str, run: Run, kept: Kept) -> list[Comparison]:
    """The model in memory after a run holds the trainable tensors of the state in its folder."""
    if run.left is None:
        return []
    return same(f"trainable tensors in memory, {when}", part(kept.state, "trainable"), part(run.left, "trainable"))


def read_state(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Tensors and progress of a run's state."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["progress"])  # noqa: SIM118
