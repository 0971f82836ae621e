"""The probabilities and classes that users see: of the logits, and of the same text."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.comparison import Comparison, compare_exactly, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.devices import Answered
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

TEXTS = ("rm -rf", "date +%s", 'cp "$A" "$B"', "for f in *; do", "mkdir -p build", "curl | sh", "")


def probabilities_are_of_the_logits(trial: Trial) -> Iterator[Comparison]:
    """Every answer's probabilities are softmax, or with several labels sigmoid, of the logits that the same model gives for the text.

    The answered class has the largest of them, an answered label one above a half, and the loss of an evaluation is minus the logarithm
    of the label's. Logits are the same without gradients as in training, bit for bit. The update and the head are drawn, so that the
    logits differ by one or two, and there are several batches of texts.
    """
    rng, several = trial.rng("answers"), trial.seed % 2 == 1
    settings = _settings(rng, several, nf4=trial.seed % 4 >= 2)
    texts, classes = [*rng.permutation(TEXTS)], settings["num_classes"]
    drawn = rng.integers(0, 2, (len(texts), classes)) if several else rng.integers(0, classes, len(texts))
    labels: list[Label] = drawn.tolist()
    fresh = trial.classifiers.fresh(CHECKPOINT, {**settings, "quantize_nf4": False}, texts[:1]).trainable
    trainable = {
        name: value if "lora_A" in name else rng.normal(size=value.shape).astype(np.float32) * 0.1 for name, value in fresh.items()
    }
    answers = trial.classifiers.answers(CHECKPOINT, settings, trainable, texts, labels)
    yield from (each for model, answered in answers.items() for each in _as_in_training(model, answered))
    yield from (found for model, answered in answers.items() for found in _judged(trial, model, answered, np.asarray(labels), several))
    narrow = trial.classifiers.answers(
        CHECKPOINT, {**settings, "quantize_nf4": False, "dtype": "bfloat16"}, trainable, texts[:3], labels[:3]
    )
    yield from (each for model, answered in narrow.items() for each in _as_in_training(f"{model} in bfloat16", answered))
    yield from (each for model, answered in narrow.items() for each in _wide(model, answered))


def _as_in_training(model: str, answered: Answered) -> Iterator[Comparison]:
    yield compare_exactly(f"{model}: logits without gradients", answered.logits_in_training, answered.logits)


def _wide(model: str, answered: Answered) -> Iterator[Comparison]:
    """Probabilities of a model in bfloat16 are computed in float32: few of them are numbers that bfloat16 holds."""
    for way, given in answered.probabilities.items():
        rounded = np.asarray(given, np.float32)
        share = float(np.mean(rounded == rounded.astype(ml_dtypes.bfloat16).astype(np.float32)))
        yield value_at_most(f"{model} in bfloat16, {way}: share of probabilities that are numbers of bfloat16", share, 0.25)


def _judged(trial: Trial, model: str, answered: Answered, labels: Array, several: bool) -> Iterator[Comparison]:
    expected = _probabilities(np.asarray(answered.logits, np.float64), several)
    limit = float(trial.literal(expected).max)
    for way, given in answered.probabilities.items():
        yield trial.near(f"{model}, {way}: probabilities", expected, given)
        if not several:
            rounding = (expected.shape[1] + 2) * UNIT_ROUNDOFF["float32"]
            total = float(np.abs(np.asarray(given, np.float64).sum(axis=1) - 1.0).max())
            yield value_at_most(f"{model}, {way}: |sum of a text's probabilities − 1|", total, rounding)
        yield value_at_most(f"{model}, {way}: probabilities outside 0 to 1", int(np.sum((given < 0) | (given > 1))), 0)
    for way, classes in answered.classes.items():
        probable = answered.probabilities.get(way, expected)
        yield value_at_most(f"{model}, {way}: what the answer lacks of the most probable", _lacking(probable, classes, several), limit)
    right = expected if several else np.take_along_axis(expected, labels[:, None], axis=1)
    losses = -np.log(np.where(labels == 1, right, 1.0 - right)).mean(axis=1) if several else -np.log(right[:, 0])
    yield trial.near(f"{model}, evaluate: loss of each text", losses, answered.losses)


def _probabilities(logits: Array, several: bool) -> Array:
    if several:
        return np.asarray(1.0 / (1.0 + np.exp(-logits)))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _lacking(probabilities: Array, classes: Array, several: bool) -> float:
    """How far the answered class is below the most probable one, or an answered label on the wrong side of a half."""
    if several:
        return float(np.max(np.where(classes == 1, 0.5 - probabilities, probabilities - 0.5), initial=0.0))
    return float(np.max(probabilities.max(axis=1) - np.take_along_axis(probabilities, classes[:, None], axis=1)[:, 0]))


def _settings(rng: Generator, several: bool, *, nf4: bool) -> dict[str, Any]:
    return {
        "num_classes": int(rng.integers(3, 6)),
        "multi_label": several,
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "lora_targets": str(rng.choice(["q_v", "all"])),
        "pooling": str(rng.choice(["mean", "last"])),
        "max_seq_len": 32,
        "batch_size": 3,
        "quantize_nf4": nf4,
    }
