"""Small classifiers whose sizes, weights and batch a check draws, and their tensors by the reference's account."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.reference.classifier import parameter_shapes, trainable_names
from blackswan.reference.table import Array

FAMILIES = ("llama", "qwen2", "qwen3")
BLOCK, GROUP = 64, 256
"""Weights of an absmax; absmax of a scale where they are quantised in turn."""
BYTES = {"bfloat16": 2, "float32": 4}


def small(rng: Generator, seed: int, nf4: bool, double_quantize: bool = False) -> Workload:
    """Sizes that are unlike each other, and a batch of four."""
    head_dim = int(rng.choice([8, 16]))
    family, intermediate = str(rng.choice(FAMILIES)), int(rng.choice([72, 96]))
    layers, classes, rank = int(rng.integers(2, 4)), int(rng.integers(2, 5)), int(rng.integers(1, 5))
    sizes: dict[str, Any] = {"family": family, "vocab": 40, "hidden": 4 * head_dim, "intermediate": intermediate, "layers": layers}
    return Workload(
        **sizes,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        classes=classes,
        rank=rank,
        alpha=2.0 * rank,
        nf4=nf4,
        double_quantize=double_quantize,
        batch=4,
        seq=6,
        seed=seed % 2**31,
    )


def scale_bytes(weights: int, double_quantize: bool) -> int:
    """Bytes of the absmax of so many weights in NF4: four a block, or one with four for every 256 blocks and four for the mean."""
    blocks = -(-weights // BLOCK)
    return blocks + 4 * -(-blocks // GROUP) + 4 if double_quantize else 4 * blocks


def through_nf4(weight: Array, double_quantize: bool) -> Array:
    """The weight [out, in] after quantisation and back, by the reference."""
    rows, columns = weight.shape
    stored = reference.evaluate("nf4_quantize", {"weight": weight}, {"block_size": 64})
    if double_quantize:
        nested = reference.evaluate("nf4_double_quantize", {"absmax": stored["absmax"]}, {})
        stored["absmax"] = reference.evaluate("nf4_double_dequantize", nested, {})["absmax"]
    return reference.evaluate("nf4_dequantize", stored, {"rows": rows, "columns": columns, "block_size": 64})["weight"]


def counts(work: Workload) -> dict[str, int]:
    """Numbers of each tensor."""
    return {name: math.prod(shape) for name, shape in parameter_shapes(work.scalars).items()}


def split(work: Workload, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of the base, and those that are trained."""
    trained = set(trainable_names(work.scalars))
    return tuple({name: value for name, value in tensors.items() if (name in trained) == part} for part in (False, True))  # type: ignore[return-value]  # two


def drawn(rng: Generator, work: Workload) -> dict[str, Array]:
    """Weights in float32 of which none is zero: norms about one, all else about zero."""
    shapes = parameter_shapes(work.scalars)
    return {name: (name.endswith("norm.weight") + 0.05 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
