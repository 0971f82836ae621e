"""A model as somebody has it, against the reference on its own weights: hidden states, logits, loss and gradients, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken
from blackswan.falsifiers.numeric.generators import generator_for
from blackswan.falsifiers.numeric.precision import STORAGE, Declared
from blackswan.falsifiers.numeric.whole_model import WholeModelReference, in_order, under_rounding
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.falsifiers.system.checkpoint_parity import SMALL, attacks
from blackswan.falsifiers.system.whole_models import DROWNED, REPLAYS, THOROUGH_REPLAYS, THOROUGH_REPLAYS_OF_SMALL, up_to_the_first
from blackswan.reference import table_of
from blackswan.reference.by_layer import ByLayer
from blackswan.reference.classifier import ClassifierConfig, parameter_shapes
from blackswan.reference.decoder import nearest_name
from blackswan.reference.table import Array


@dataclass(frozen=True)
class Handed:
    """A model by what `HandedModel.described` says of it. ValueError, by name, for parameters that its configuration does not have."""

    scalars: Mapping[str, Any]
    parameters: Mapping[str, Array]
    trained: Mapping[str, str]
    dtype: str
    causal: bool
    pad: int | None
    batch: int = 3
    seq: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks names and shapes."""
        ClassifierConfig.from_scalars(self.scalars)
        shapes = parameter_shapes(self.scalars)
        if self.causal:
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("score.")}
        plain = dict.fromkeys(name.removesuffix(".nf4.codes") for name in self.parameters if not name.endswith(".nf4.absmax"))
        for name in shapes:
            if name not in plain:
                raise ValueError(
                    f"the model has no parameter {name}{nearest_name(name, plain)}; expected one, or a name of its own in `names`"
                )
        for name in plain:
            if name not in shapes:
                raise ValueError(
                    f"the model's parameter {name} belongs to no such model{nearest_name(name, shapes)}; say its name in `names`"
                )
            if name in self.parameters and self.parameters[name].shape != shapes[name]:
                raise ValueError(
                    f"{name} has the shape {list(self.parameters[name].shape)}; expected {list(shapes[name])} by the configuration"
                )

    @property
    def blocks(self) -> list[str]:
        """The paths of the blocks."""
        return [f"model.layers.{index}" for index in range(self.scalars["layers"])]

    @property
    def inputs(self) -> dict[str, Array]:
        """A batch: samples of half to the whole length, padded on the right, with labels where there are classes."""
        random, vocab = generator_for(self.seed, "samples"), self.scalars["vocab"]
        lengths = random.integers((self.seq + 1) // 2, self.seq + 1, (self.batch, 1))
        lengths[0] = self.seq
        mask, ids = np.arange(self.seq) < lengths, random.integers(0, vocab, (self.batch, self.seq))
        if self.pad is not None:  # which a head of classes takes for the end of a sample
            ids = np.where(mask, np.where(ids == self.pad, (ids + 1) % vocab, ids), self.pad)
        labels = {} if self.causal else {"labels": random.integers(0, self.scalars["classes"], self.batch)}
        return {"input_ids": ids, "mask": mask, **labels}

    def compare(self, answer: Mapping[str, Array], subject: Subject) -> list[Comparison]:
        """Every output in order, up to the first that leaves its noise."""
        judges = attacks(subject, self.dtype)
        oracle = self._oracle(judges["states"].declared)
        if odd := self._odd(answer, oracle):
            return odd
        ordered = in_order(self, answer)
        found: list[Comparison] = []
        for kind, attack in judges.items():
            names = [name for name in oracle.expected if _kind(name) == kind]
            expected, given = ({name: every[name] for name in names} for every in (oracle.expected, ordered))
            floors = partial(self._floors, oracle, attack)
            found += attack.judge(expected, given, floors, self._dtypes(given, attack.declared))
        order = list(oracle.expected)
        return up_to_the_first(sorted(found, key=lambda one: order.index(one.tensor)))

    def _oracle(self, declared: Declared) -> WholeModelReference["Handed"]:
        def run(*how: Any) -> dict[str, Array]:
            given = ByLayer(self.inputs, self.parameters, self.scalars, *how)
            return replace(given, trained=frozenset(self.trained), causal=self.causal).run()

        def rounded(replay: int | None) -> dict[str, Array]:
            return run(*under_rounding(self.dtype, self.seed, replay, declared))

        return WholeModelReference(self, self.dtype, run(lambda _: table_of(declared)), rounded)

    def _odd(self, answer: Mapping[str, Array], oracle: WholeModelReference["Handed"]) -> list[Comparison]:
        """What is missing from the answer, or has another shape than the tokens."""
        shape = self.batch, self.seq
        for name in oracle.expected:
            if name not in answer:
                return [broken(name, "missing from the answer")]
            if name.startswith("hidden/") and answer[name].shape[:2] != shape:
                return [broken(name, "shape", f"{list(shape)} and so on", str(list(answer[name].shape)))]
        return []

    def _dtypes(self, given: Mapping[str, Array], declared: Declared) -> dict[str, Any]:
        """The dtype of outputs: a gradient's is its parameter's, the loss's float32 unless declared, a state's the model's, or wider."""
        found: dict[str, Any] = {}
        for name, value in given.items():
            if name.startswith("gradient/"):
                found[name] = STORAGE[self.trained[name.removeprefix("gradient/")]]
            elif value.dtype in (np.float32, np.float64):
                found[name] = value.dtype
            else:
                stored = name != "loss" or declared.get(self._loss, {}).get("loss_dtype") == "storage"
                found[name] = STORAGE[self.dtype] if stored else np.dtype(np.float32)
        return found

    @property
    def _loss(self) -> str:
        return "lm_cross_entropy" if self.causal else "weighted_cross_entropy"

    def _floors(self, oracle: WholeModelReference["Handed"], attack: Attack) -> dict[str, Errors]:
        if not attack.thorough:
            return oracle.floors(REPLAYS)
        size = sum(int(np.prod(shape)) for shape in parameter_shapes(self.scalars).values())
        return oracle.floors(THOROUGH_REPLAYS_OF_SMALL if size <= SMALL else THOROUGH_REPLAYS)


def held(comparisons: list[Comparison]) -> bool:
    """Whether all outputs are within their noise, and not many drowned by it."""
    drowned = sum(one.rejected for one in comparisons)
    return all(one.held for one in comparisons) and drowned <= DROWNED * len(comparisons)


def _kind(name: str) -> str:
    return "loss" if name == "loss" else "gradients" if name.startswith("gradient/") else "states"
