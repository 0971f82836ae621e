"""Whole classifiers of the true shapes and of small ones: weights and samples that follow from a seed, the same for both sides."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.generators import generator_for, model_parameter
from blackswan.falsifiers.numeric.shapes import SHAPES
from blackswan.reference.classifier import NF4_BLOCK, TARGETS, parameter_shapes, trainable_names
from blackswan.reference.nf4 import quantize
from blackswan.reference.table import Array


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """A classifier and a batch: base weights in bfloat16, as checkpoints are published, trainable tensors in float32."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    batch: int
    seq: int
    rank: int
    alpha: float
    seed: int = 0
    classes: int = 8
    targets: str = "all"
    pooling: str = "mean"
    nf4: bool = False
    eps: float = 1e-6

    @property
    def scalars(self) -> dict[str, Any]:
        """Everything by name, as operations take their scalars and procedures their request."""
        return asdict(self)

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """input_ids and mask [batch, seq], labels [batch]: samples of half to the whole length, padded on the right."""
        random = generator_for(self.seed, "samples")
        lengths = random.integers((self.seq + 1) // 2, self.seq + 1, (self.batch, 1))
        lengths[0] = self.seq
        ids = random.integers(0, self.vocab, (self.batch, self.seq))
        return {"input_ids": ids, "mask": np.arange(self.seq) < lengths, "labels": random.integers(0, self.classes, self.batch)}

    @property
    def blocks(self) -> list[str]:
        """The paths of the blocks."""
        return [f"model.layers.{index}" for index in range(self.layers)]

    def parameters(self) -> "Stored":
        """The parameters; those of one model are kept, for both sides and with NF4 or without."""
        return _stored(replace(self, nf4=False, batch=1, seq=1))


SMALL: Mapping[str, Any] = {
    "vocab": 96,
    "hidden": 64,
    "intermediate": 96,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 24,
    "theta": 2e5,
}
"""What stands for a shape where the true one would take minutes: its family and its depth, not its width.

No number is the one that a program would have by mistake: θ is no family's, and heads · head_dim is not the hidden size.
"""

SMALL_SEQ = 16
"""Long enough for RoPE to tell queries from keys, whose norms' weights only count by their product where positions are the same."""

KEPT = 2
"""Models whose parameters are kept."""


def model(name: str, seed: int, *, true_size: bool, layers: int | None = None) -> WholeModel:
    """The model of that name, in its own shape or a small one of its family, cut to its first `layers`.

    Of a true shape there is one, whatever the seed: claims share the reference's answers to it, which take a minute.
    """
    if not true_size:
        random = generator_for(seed, f"small {name}")
        family, targets = SHAPES[name]["family"], str(random.choice([*TARGETS]))
        small = {**SMALL, "family": family, "targets": targets, "layers": layers or SMALL["layers"]}
        return WholeModel(**small, batch=3, seq=SMALL_SEQ, rank=4, alpha=2.0, seed=seed)
    shape = {**SHAPES[name], "layers": layers or SHAPES[name]["layers"]}
    return WholeModel(**shape, batch=2, seq=32, rank=16, alpha=8.0)


def in_true_shape(device: str) -> bool:
    """Whether claims attack a subject there with models of their true shapes, and not with small ones."""
    return device.startswith("cuda")


def chosen(claim: Claim, seed: int, device: str) -> WholeModel:
    """The model that a claim's arguments name."""
    return model(claim.arguments["model"], seed, true_size=in_true_shape(device), layers=claim.arguments.get("layers"))


class Stored(Mapping[str, Array]):
    """A model's parameters by Hugging Face name, each made when it is first asked for; and the NF4 codes and scales of its projections.

    Arrays are read-only: both sides read the same ones.
    """

    def __init__(self, whole: WholeModel) -> None:
        self.seed, self.shapes = whole.seed, parameter_shapes(whole.scalars)
        self.trainable = frozenset(trainable_names(whole.scalars))
        self._made: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        """The array; KeyError for a name that the model has not."""
        if name not in self._made:
            weight, _, kind = name.partition(".nf4.")
            if weight not in self.shapes:
                raise KeyError(name)
            if kind:
                self._made |= self._quantised(weight)
            else:
                self._made[name] = _fixed(self._made_anew(name))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the parameters, those of the codes left out."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """How many parameters there are."""
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a parameter, or a projection with such codes; makes none."""
        weight, _, kind = str(name).partition(".nf4.")
        return weight in self.shapes and (not kind or weight.endswith("_proj.weight"))

    def make(self, codes: bool) -> None:
        """Makes all, several at a time."""
        names = list(self.shapes)
        if codes:
            names += [f"{name}.nf4.codes" for name in names if name.endswith("_proj.weight")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.__getitem__, names))

    def _made_anew(self, name: str) -> Array:
        value = model_parameter(name, self.shapes[name], "normal", generator_for(self.seed, name))
        return value.astype(np.float32 if name in self.trainable else ml_dtypes.bfloat16)

    def _quantised(self, weight: str) -> dict[str, Array]:
        codes, absmax = quantize(self[weight].astype(np.float32), NF4_BLOCK)
        return {f"{weight}.nf4.codes": _fixed(codes), f"{weight}.nf4.absmax": _fixed(absmax)}


def _fixed(value: Array) -> Array:
    value.flags.writeable = False
    return value


@lru_cache(maxsize=KEPT)
def _stored(whole: WholeModel) -> Stored:
    return Stored(whole)
