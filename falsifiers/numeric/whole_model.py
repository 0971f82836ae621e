"""Whole classifiers, in the shapes of published models and in small ones: weights and samples follow from a seed, the same for both sides.

What the reference answers, and the noise that honest arithmetic makes on the way, is kept for all claims that ask for it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, Protocol, TypeVar

import ml_dtypes
import numpy as np

from blackswan import reference
from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.falsifiers.numeric.generators import generator_for, model_parameter
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF, Declared, compute_dtype, is_real, rounded_table
from blackswan.reference import memory
from blackswan.reference.by_layer import ByLayer
from blackswan.reference.classifier import NF4_BLOCK, TARGETS, parameter_shapes, trainable_names
from blackswan.reference.nf4 import quantize
from blackswan.reference.table import Array, Arrays, Table

ARCHITECTURE = ("family", "vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "theta")
SHAPES: Mapping[str, dict[str, Any]] = {
    "qwen2.5-0.5b": dict(zip(ARCHITECTURE, ("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, 1e6), strict=True)),
    "qwen3-4b": dict(zip(ARCHITECTURE, ("qwen3", 151_936, 2560, 9728, 36, 32, 8, 128, 1e6), strict=True)),
}
"""The published configurations (Qwen2.5-0.5B and Qwen3-4B, config.json), both with tied embeddings."""


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
    double_quantize: bool = False
    eps: float = 1e-6

    @property
    def scalars(self) -> dict[str, Any]:
        """Everything by name, as operations take their scalars."""
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
        return _stored(replace(self, nf4=False, double_quantize=False, batch=1, seq=1))


SMALL: Mapping[str, Any] = dict(zip(ARCHITECTURE[1:], (96, 64, 128, 3, 4, 2, 48, 2e5), strict=True))
"""The sizes that stand for a shape where the true one would take minutes: they keep its family and its depth, not its width.

No number is the one that a program would have by mistake: θ is no family's, and heads · head_dim is not the hidden size. As in published
models every projection has columns of whole NF4 blocks: bitsandbytes' kernel for the CPU computes others wrongly (FINDINGS.md).
"""

SMALL_SEQ = 16
"""Long enough for RoPE to tell queries from keys, whose norms' weights only count by their product where positions are the same."""


def model(name: str, seed: int, *, true_size: bool, layers: int | None = None) -> WholeModel:
    """The model of that name, in its own shape or a small one of its family, cut to its first `layers`.

    There is one model of a true shape, whatever the seed: claims share the reference's answers to it, which take a minute.
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
            if kind:
                codes, absmax = quantize(self[weight].astype(np.float32), NF4_BLOCK)
                made = {f"{weight}.nf4.codes": codes, f"{weight}.nf4.absmax": absmax}
            else:
                value = model_parameter(name, self.shapes[name], "normal", generator_for(self.seed, name))
                made = {name: value.astype(np.float32 if name in self.trainable else ml_dtypes.bfloat16)}
            for value in made.values():
                value.flags.writeable = False
            self._made |= made
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the parameters, those of the codes left out."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """The number of parameters."""
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


_stored = lru_cache(maxsize=2)(Stored)

Outputs = dict[str, Array]
AT_ONCE = 5
"""Runs of a large model in threads. A small one is Python's work more than NumPy's, and threads would wait for one another."""
MASTERS = ("loss", "gradient/")
"""Outputs that are float32 in every storage dtype: the loss, and the gradients of float32 masters."""


def in_order(whole: "Asked", outputs: Arrays) -> Outputs:
    """The outputs in the order of the computation, forward and then backward; of what is of each token the real ones, [tokens, …]."""
    states = [f"hidden/{path}" for path in ("model.embed_tokens", *whole.blocks, "model.norm")]
    slopes = sorted((name for name in outputs if name.startswith("gradient/")), key=_arrival)
    mask = whole.inputs["mask"]

    def of_tokens(name: str) -> bool:
        return name.startswith("hidden/") or (name == "logits" and outputs[name].ndim > 2)

    return {name: outputs[name][mask] if of_tokens(name) else outputs[name] for name in [*states, "logits", "loss", *slopes]}


def _arrival(name: str) -> float:
    """When the backward pass comes to a gradient: the head first, the last layer before the others, the embedding at the end."""
    if name.startswith("gradient/model.layers."):
        return -int(name.split(".")[2])
    return 1 if name.startswith("gradient/model.embed_tokens.") else -np.inf


def dtypes(names: Mapping[str, Any], dtype: str, declared: Declared | None = None) -> "dict[str, np.dtype[Any]]":
    """The dtype that each output comes back in."""
    stored = (declared or {}).get("weighted_cross_entropy", {}).get("loss_dtype") == "storage"
    wide = {name for name in names if name.startswith(MASTERS) and not (stored and name == "loss")}
    return {name: compute_dtype(dtype) if name in wide else STORAGE[dtype] for name in names}


class Asked(Protocol):
    """A batch and the paths of the blocks that it goes through."""

    @property
    def inputs(self) -> dict[str, Array]:
        """input_ids and mask [batch, seq]; labels [batch] of a classifier."""

    @property
    def blocks(self) -> list[str]:
        """The paths of the blocks."""


W = TypeVar("W", bound=Asked)


class WholeModelReference(Generic[W]):
    """Expected outputs of a model, in order, and the errors of runs of it under the rounding of a dtype.

    `rounded` gives the outputs of such a run: None for rounding to nearest, else the number of a random replay; `at_once` of them may run
    in threads.
    """

    def __init__(self, whole: W, dtype: str, expected: Arrays, rounded: Callable[[int | None], Arrays], at_once: int = 1) -> None:
        self.whole, self.dtype, self._rounded, self._at_once = whole, dtype, rounded, at_once
        self.expected = in_order(whole, expected)
        self._errors: list[dict[str, Errors]] = []

    def floors(self, replays: int) -> dict[str, Errors]:
        """The noise floor of each output: the largest error of rounding to nearest, of so many replays, and of half an ulp."""
        missing = range(len(self._errors), replays + 1)
        with memory.kept(), ThreadPoolExecutor(self._at_once) as pool:
            self._errors += pool.map(self._run, missing)
        held = dtypes(self.expected, self.dtype)
        floors = {name: Errors.of(value).times(UNIT_ROUNDOFF[str(held[name])]) for name, value in self.expected.items()}
        for errors in self._errors[: replays + 1]:
            floors = {name: floor.at_least(errors[name]) for name, floor in floors.items()}
        return floors | {"loss": floors["loss"].at_least(self._passed_on(floors["logits"]))}

    def _run(self, number: int) -> dict[str, Errors]:
        """The errors of one run: the first rounds to nearest."""
        found = in_order(self.whole, self._rounded(number - 1 if number else None))
        return {name: Errors.of(np.asarray(value, np.float64) - self.expected[name]) for name, value in found.items()}

    def _passed_on(self, logits: Errors) -> Errors:
        """The error of the loss that independent errors of the logits make: the loss is one number, whose errors may be small by luck."""
        expected, inputs = self.expected["logits"], self.whole.inputs
        if "labels" in inputs:
            operation, given = "weighted_cross_entropy", {"logits": expected, "labels": inputs["labels"]}
        else:
            every = np.zeros((*inputs["mask"].shape, expected.shape[-1]))
            every[inputs["mask"]] = expected
            operation, given = "lm_cross_entropy", {"logits": every, **inputs}
        slope = reference.differentiate(operation, given, {}, {"loss": np.ones(())}, ["logits"])["logits"]
        return Errors.flat(logits.rms * float(np.linalg.norm(slope)))


def under_rounding(
    dtype: str, seed: int, replay: int | None, declared: Declared | None = None
) -> tuple[Callable[[str], Table], Callable[[Array], Array]]:
    """The operations of each part of a model under the rounding of a dtype, and its parameters as they are computed with."""
    table = reference.table_of(declared or {})

    def table_of(part: str) -> Table:
        generator = None if replay is None else np.random.default_rng([seed, replay, *part.encode()])
        return rounded_table(table, dtype, generator, dither=True, declared=declared)

    def held(stored: Array) -> Array:
        return np.asarray(stored, compute_dtype(dtype)) if is_real(stored) else stored

    return table_of, held


def by_layer(whole: WholeModel, dtype: str = "float64", replay: int | None = None, declared: Declared | None = None) -> ByLayer:
    """The model's reference: in float64, or under the rounding of a dtype, to nearest or in a random replay; as declared of operations."""
    if dtype == "float64":
        table = reference.table_of(declared or {})
        return ByLayer(whole.inputs, whole.parameters(), whole.scalars, lambda _: table)
    return ByLayer(whole.inputs, whole.parameters(), whole.scalars, *under_rounding(dtype, whole.seed, replay, declared))


def of_the_reference(whole: WholeModel, dtype: str, declared: Declared | None = None) -> WholeModelReference[WholeModel]:
    """The answers and noise by the reference alone, which follows what is declared of operations."""
    return _of_the_reference(whole, dtype, tuple((name, tuple(sorted(own.items()))) for name, own in sorted((declared or {}).items())))


_Frozen = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""What is declared of operations, as a key."""


@lru_cache(maxsize=4)
def _of_the_reference(whole: WholeModel, dtype: str, declared: _Frozen) -> WholeModelReference[WholeModel]:
    whole.parameters().make(whole.nf4)
    given = {name: dict(own) for name, own in declared}

    def rounded(replay: int | None) -> Outputs:
        return by_layer(whole, dtype, replay, given).run()

    expected = by_layer(whole, declared=given).run()
    return WholeModelReference(whole, dtype, expected, rounded, at_once=1 if whole.hidden <= SMALL["hidden"] else AT_ONCE)
