"""Values for the arrays of a case, by flavour, from a generator of their own: the same seed and name always give the same numbers."""

import zlib
from collections.abc import Callable, Mapping

import numpy as np

from blackswan.contracts.model import Input
from blackswan.reference.nf4 import MIDPOINTS
from blackswan.reference.table import Array

Generator = np.random.Generator
Shape = tuple[int, ...]


def generator_for(seed: int, name: str) -> Generator:
    """A generator that depends on the case's seed and the array's name only, so that adding an array changes no other."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def wide(rng: Generator, shape: Shape) -> Array:
    """Signs and magnitudes from 1e-3 to 1e3, uniform in the logarithm."""
    return np.asarray(rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(-3, 3, shape))


def outliers(rng: Generator, shape: Shape) -> Array:
    """N(0, 1) with one element in a hundred, and at least one, a hundred times larger: the activations of real language models."""
    values = rng.standard_normal(shape).reshape(-1)
    if values.size:
        values[rng.choice(values.size, max(1, values.size // 100), replace=False)] *= 100
    return values.reshape(shape)


def midpoints(rng: Generator, shape: Shape) -> Array:
    """Midpoints between levels of NF4 times the absmax of their block, which is every 32nd element.

    In half of the cases that is a power of two, so that midpoints are ties; in the others a tie depends on how x / absmax is rounded.
    """
    values = rng.choice(MIDPOINTS.astype(np.float64), shape).reshape(-1)
    values[::32] = rng.choice([-1.0, 1.0], values[::32].shape)
    mantissa = np.float32(rng.uniform(1, 2)) if rng.random() < 0.5 else 1.0
    return np.asarray(values.reshape(shape) * mantissa * 2.0 ** rng.integers(-4, 5))


def scale(rng: Generator) -> Array:
    """One number of either sign, 1/16 to 16, uniform in the logarithm."""
    return np.asarray(rng.choice([-1.0, 1.0]) * 2.0 ** rng.uniform(-4, 4))


def tiny_norm(rng: Generator, shape: Shape) -> Array:
    """Rows whose mean square is of the order of a norm's epsilon, 1e-8 to 1e-4."""
    scale = 10.0 ** rng.uniform(-4, -2, (*shape[:-1], 1)) if shape else 1e-3
    return np.asarray(rng.standard_normal(shape) * scale)


def one_hot(rng: Generator, shape: Shape) -> Array:
    """One large value a row, the rest zero: a saturated softmax."""
    values = np.zeros(shape)
    if values.size and shape:
        np.put_along_axis(values, rng.integers(0, shape[-1], (*shape[:-1], 1)), 30.0, axis=-1)
    return values


FLAVOURS: dict[str, Callable[[Generator, Shape], Array]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "wide": wide,
    "outliers": outliers,
    "zeros": lambda _, shape: np.zeros(shape),
    "ties": lambda rng, shape: rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], shape),
    "midpoints": midpoints,
    "tiny_norm": tiny_norm,
    "minute": lambda rng, shape: np.asarray(rng.standard_normal(shape) * 2.0 ** -rng.integers(30, 91)),
    "subnormal": lambda rng, shape: np.asarray(rng.standard_normal(shape) * 2.0**-130),
    "one_hot": one_hot,
    "sharp": lambda rng, shape: 24 * rng.standard_normal(shape),
    "constant": lambda rng, shape: np.full(shape, float(rng.integers(1, 4)) / 2),
}
FLAVOURS |= dict.fromkeys(("masked", "right_padded", "left_padded", "confident", "certain", "long_context", "soft"), FLAVOURS["normal"])
"""Real values by flavour. Three of the last seven shape the masks instead, `confident` and `certain` the logits, `long_context` the
positions, `soft` the targets."""

SHAPES_FIRST_INPUT_ONLY = frozenset({"zeros", "tiny_norm", "subnormal", "one_hot", "sharp", "constant"})
"""Flavours that only the first real input takes: were all inputs zero, every answer would be zero and nothing attacked."""


def padding(rng: Generator, shape: Shape, flavour: str) -> Array:
    """Attention masks [batch, seq] with at least one real token a sample; `masked` puts holes anywhere."""
    batch, seq = shape
    lengths = rng.integers(1, seq + 1, (batch, 1))
    positions = np.arange(seq)[None, :]
    if flavour == "right_padded":
        return positions < lengths
    if flavour == "left_padded":
        return positions >= seq - lengths
    if flavour == "masked":
        mask = rng.random(shape) < 0.6
        mask[np.arange(batch), rng.integers(0, seq, batch)] = True
        return mask
    return np.ones(shape, dtype=bool)


def predicting(rng: Generator, shape: Shape, flavour: str) -> Array:
    """Attention masks [batch, seq] with a token to predict: rows of at least two tokens, shorter ones padded on the side of the flavour;
    `masked` puts holes anywhere but between two tokens of one row."""
    batch, seq = shape
    if flavour == "masked":
        mask = padding(rng, shape, flavour)
        row, first = rng.integers(0, batch), rng.integers(0, seq - 1)
        mask[row, first : first + 2] = True
        return mask
    lengths = rng.integers(2, seq + 1, (batch, 1)) if flavour.endswith("_padded") else np.full((batch, 1), seq)
    positions = np.arange(seq)[None, :]
    return np.asarray(positions >= seq - lengths if flavour == "left_padded" else positions < lengths)


def norm_weight(rng: Generator, shape: Shape, flavour: str) -> Array:
    """Weights of a norm, around one."""
    return wide(rng, shape) if flavour == "wide" else 1.0 + 0.3 * rng.standard_normal(shape)


def class_weights(rng: Generator, shape: Shape, _flavour: str) -> Array:
    """Positive, summing to the number of classes, a few times apart."""
    values = rng.uniform(0.2, 3.0, shape)
    return np.asarray(values * shape[0] / values.sum())


def multi_hot(rng: Generator, shape: Shape, flavour: str) -> Array:
    """0 or 1 for each class of a sample; `soft` has eighths between them."""
    return rng.integers(0, 9, shape) / 8 if flavour == "soft" else (rng.random(shape) < 0.4).astype(np.float64)


def nonnegative(rng: Generator, shape: Shape, _flavour: str) -> Array:
    """Second moments: squares, some of them zero."""
    values = rng.standard_normal(shape) ** 2
    return np.asarray(values * (rng.random(shape) < 0.9))


MARGINS = {"confident": (2.0, 9.0), "certain": (18.0, 80.0)}
"""How far a label is ahead of all the others together: its probability is 0.88 to 0.9999, or next to 1 − 1e-8 and beyond."""


def confident(inputs: Mapping[str, Array], rng: Generator, margins: tuple[float, float] = MARGINS["confident"]) -> Array:
    """The logits of a case with those of its labels far ahead, as a trained model has them. ValueError where there are no labels."""
    logits = inputs["logits"].copy()
    if "targets" in inputs:
        return np.asarray((2 * inputs["targets"] - 1) * rng.uniform(*margins, logits.shape))
    if "labels" in inputs:
        rows, labels = logits, inputs["labels"]
    elif "input_ids" in inputs:
        rows, labels = logits[:, :-1], inputs["input_ids"][:, 1:]
    else:
        raise ValueError("the flavour confident needs labels, targets or input_ids beside the logits")
    chosen = labels[..., None]
    np.put_along_axis(rows, chosen, -np.inf, axis=-1)
    others = np.logaddexp.reduce(rows, axis=-1, keepdims=True)
    np.put_along_axis(rows, chosen, others + rng.uniform(*margins, others.shape), axis=-1)
    return logits


def absmax(rng: Generator, shape: Shape, flavour: str) -> Array:
    """Absmax of blocks of weights; in the flavour zeros some blocks are zero."""
    values = np.abs(rng.standard_normal(shape)) * 0.05 + 0.05
    if flavour == "wide":
        values = 10.0 ** rng.uniform(-3, 3, shape)
    if flavour == "minute":
        values *= 2.0 ** -rng.integers(30, 91)
    return np.asarray(values * (rng.random(shape) < 0.5) if flavour == "zeros" else values)


LONGEST_CONTEXT = 32_768
"""Positions that Qwen2.5 was published with (arXiv:2412.15115, table 1)."""


def positions(rng: Generator, shape: Shape, flavour: str) -> Array:
    """Successive positions [batch, seq], each sample from below 64 on, in `long_context` from anywhere, uniform in the logarithm."""
    first = rng.integers(0, 64, (shape[0], 1))
    if flavour == "long_context":
        first = np.floor(LONGEST_CONTEXT ** rng.uniform(0, 1, (shape[0], 1))).astype(np.int64) - 1
    return np.asarray(first + np.arange(shape[-1]))


_SPECIAL: dict[str, Callable[[Generator, Shape, str], Array]] = {
    "padding": padding,
    "predicting": predicting,
    "norm_weight": norm_weight,
    "class_weights": class_weights,
    "nonnegative": nonnegative,
    "absmax": absmax,
    "multi_hot": multi_hot,
    "nf4_codes": lambda rng, shape, _: rng.integers(0, 256, shape, dtype=np.uint8),
    "bytes": lambda rng, shape, _: rng.integers(0, 256, shape, dtype=np.uint8),
    "counts": lambda rng, shape, flavour: rng.integers(1, 2**18 if flavour == "wide" else 9, shape, dtype=np.int64),
    "positions": positions,
}


def fill(spec: Input, shape: Shape, below: int | None, flavour: str, first_real: bool, rng: Generator) -> Array:
    """The array of one input."""
    if spec.fill is not None:
        return _SPECIAL[spec.fill](rng, shape, flavour)
    if spec.dtype == "int":
        return rng.integers(0, below or 1, shape, dtype=np.int64)
    if flavour in SHAPES_FIRST_INPUT_ONLY and not first_real:
        return rng.standard_normal(shape)
    return FLAVOURS[flavour](rng, shape)


def model_parameter(name: str, shape: Shape, flavour: str, rng: Generator) -> Array:
    """A model's parameter, scaled so that activations keep their size.

    Biases and LoRA B are not zero, or dropping them would change nothing.
    """
    if len(shape) == 1:
        around = 1.0 if name.endswith("norm.weight") else 0.0
        return np.asarray(around + 0.3 * rng.standard_normal(shape))
    if name.endswith("lora_A.weight"):
        return np.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]))
    if name.endswith("lora_B.weight"):
        return np.zeros(shape) if flavour == "zeros" else np.asarray(0.3 * rng.standard_normal(shape))
    if name.endswith("embed_tokens.weight"):
        return np.asarray(outliers(rng, shape) / 10 if flavour == "outliers" else rng.standard_normal(shape))
    return np.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]))
