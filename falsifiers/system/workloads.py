"""Small classifiers whose sizes, weights and batch a check draws, and their tensors by the reference's account."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.reference.classifier import parameter_shapes, trainable_names
from blackswan.reference.table import Array

FAMILIES = ("llama", "qwen2", "qwen3")
BYTES = {"bfloat16": 2, "float32": 4}


def small(rng: Generator, seed: int, nf4: bool) -> Workload:
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
        batch=4,
        seq=6,
        seed=seed % 2**31,
    )


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
