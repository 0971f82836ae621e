"""A small training run as a case: parameters, samples and settings drawn from a seed, and the reference's view of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare, compare_exactly
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.numeric.strategies import Draw, build
from blackswan.reference.classifier import trainable_names
from blackswan.reference.table import Array, Arrays
from blackswan.reference.training import flatten

MICRO, ACCUMULATION = 2, 2
BATCH = MICRO * ACCUMULATION
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class Problem:
    """A small run: a case of `train_steps` for its parameters, samples as bytes, and settings that the parameters agree with."""

    def __init__(self, attack: Attack, case: Case, samples: tuple[int, int] = (9, 7), **settings: Any) -> None:
        rng = generator_for(case.seed, "run")
        self.classes, self.several = int(settings.get("num_classes", 3)), bool(settings.get("multi_label", False))
        rank = int(settings.get("lora_rank", 2))
        self.scalars: dict[str, Any] = {
            "family": str(rng.choice(["llama", "qwen2", "qwen3"])),
            "eps": 1e-6,
            "theta": 10000.0,
            "tied": True,
            "alpha": 4.0,
            "targets": settings.get("lora_targets", str(rng.choice(["q_v", "all"]))),
            "pooling": settings.get("pooling", str(rng.choice(["mean", "last"]))),
            "nf4": bool(settings.get("quantize_nf4", False)),
            "learning_rate": 1e-2,
        }
        sizes = {"batch": 1, "seq": 2, "vocab": 257, "hidden": 16, "intermediate": 24, "layers": 1, "kv_heads": 1, "groups": 2}
        sizes |= {"half_dim": 4, "steps": 1, "micro": 1, "classes": self.classes, "rank": rank}
        drawn = build(replace(attack.claim, operation="train_steps"), Draw(sizes, self.scalars, {}, case.seed), "normal", "float32")
        self.scalars = dict(drawn.scalars)
        self.parameters = {name: value for name, value in drawn.inputs.items() if name.startswith("parameters/")}
        self.names = trainable_names(self.scalars)
        self.settings = {
            "num_classes": self.classes,
            "lora_rank": rank,
            "lora_alpha": 4.0,
            "lora_targets": self.scalars["targets"],
            "pooling": self.scalars["pooling"],
            "batch_size": MICRO,
            "accumulation_steps": ACCUMULATION,
            "epochs": 2,
            "max_seq_len": 16,
            "learning_rate": 1e-2,
            "gradient_clip_norm": 0.5,
            "multi_label": self.several,
            "seed": int(rng.integers(1000)),
            **settings,
        }
        self.train, self.validation = (self._corpus(rng, count) for count in samples)

    def _corpus(self, rng: Generator, count: int) -> tuple[list[list[int]], list[Any]]:
        """Rows of bytes, every class among the labels; no two samples alike."""
        rows = [[index, *rng.integers(0, 256, int(rng.integers(1, 7))).tolist()] for index in range(count)]
        if self.several:
            return rows, (rng.random((count, self.classes)) < 0.5).astype(int).tolist()
        return rows, [int(label) for label in [*range(self.classes), *rng.integers(0, self.classes, count)][:count]]

    def request(self, **more: Any) -> dict[str, Any]:
        """What the subject is asked for."""
        corpora = {"train_rows": self.train[0], "train_targets": self.train[1]}
        corpora |= {"validation_rows": self.validation[0], "validation_targets": self.validation[1]}
        return {"inputs": self.parameters, "scalars": self.scalars, "settings": self.settings, **corpora, **more}

    @property
    def batches(self) -> list[int]:
        """Samples of each step of an epoch."""
        count = len(self.train[0])
        return [min(BATCH, count - start) for start in range(0, count, BATCH)]

    def inputs(self, trainable: Arrays, rows: Sequence[Sequence[int]], labels: Sequence[Any]) -> dict[str, Array]:
        """The inputs of `classifier_loss` at those trainable tensors."""
        longest = max(map(len, rows))
        ids = np.array([[*row, *[0] * (longest - len(row))] for row in rows])
        mask = np.array([[index < len(row) for index in range(longest)] for row in rows])
        given = {"input_ids": ids, "mask": mask, "labels": np.array(labels, np.float64 if self.several else np.int64)}
        weights = self._class_weights()
        return {**self.parameters, **trainable, **given, **({} if weights is None else {"class_weights": weights})}

    def _class_weights(self) -> Array | None:
        """Of "balanced" settings: inversely proportional to the number of samples, adding up to the number of classes."""
        if self.settings.get("class_weights") != "balanced":
            return None
        inverse = 1.0 / np.bincount(self.train[1], minlength=self.classes)
        return np.asarray(self.classes * inverse / inverse.sum())

    def loss(self, trainable: Arrays, rows: Sequence[Sequence[int]], labels: Sequence[Any]) -> float:
        """The reference's mean loss."""
        return float(reference.evaluate("classifier_loss", self.inputs(trainable, rows, labels), self.scalars)["loss"])

    def gradient(self, trainable: Arrays, rows: Sequence[Sequence[int]], labels: Sequence[Any]) -> Array:
        """The reference's mean gradient, one vector [count]."""
        inputs = self.inputs(trainable, rows, labels)
        found = reference.differentiate("classifier_loss", inputs, self.scalars, {"loss": np.ones(())}, ["trainable"])
        return flatten([found[f"parameters/{name}"] for name in self.names])


def group_of(answer: Arrays, prefix: str) -> dict[str, Array]:
    """The outputs whose names begin so, as parameters of the names after it."""
    return {f"parameters/{name.removeprefix(prefix)}": value for name, value in answer.items() if name.startswith(prefix)}


def near(attack: Attack, name: str, expected: Array | float, actual: Array | float) -> Comparison:
    """Within the claim's literal tolerance, relative to the largest magnitude."""
    wanted, got = np.asarray(expected, np.float64), np.asarray(actual)
    return compare(name, wanted, got, attack.literal(wanted), UNIT_ROUNDOFF["float32"])


def equal(expected: Mapping[str, Array], actual: Mapping[str, Array], what: str) -> list[Comparison]:
    """The same names with the same bits."""
    if set(expected) != set(actual):
        return [broken(what, "other names", str(sorted(expected)[:4]), str(sorted(actual)[:4]))]
    if not expected:
        return [broken(what, "nothing to compare")]
    return [compare_exactly(f"{what} {name}", np.asarray(value), np.asarray(actual[name])) for name, value in expected.items()]


def same_texts(name: str, expected: Sequence[str], actual: Sequence[str]) -> Comparison:
    """Texts that have to be the same."""
    if list(expected) == list(actual):
        return Comparison(name, True, 0.0, "exact")
    odd = sorted(set(expected) ^ set(actual))
    return broken(name, "not the same", f"{len(expected)} texts", f"{len(actual)}, only one side has {odd[0] if odd else 'some twice'}")
