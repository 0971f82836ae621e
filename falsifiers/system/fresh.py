"""The update that a run starts from is zero, and its random factor follows from the seed alone."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_at_most, value_inside
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.system.config_files import SCALED
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import FAMILIES
from blackswan.reference.table import Array

FURTHER, LARGE = (1, 2**16, 2**32, 2**62), 2**62
"""Differences between two seeds, some of them beyond 32 bits; and a seed that float64 cannot tell from the next one."""
DEFAULTS = ("bfloat16", "float64", "float16")
"""What libraries make torch's default dtype, float32 without them."""
FACTORS = {"q_v": 2, "all": 7}
"""Adapted projections of a layer."""
EARLIER = {0: -0.00748682, 2**32: -0.7097993}
"""The first number of FIRST, times √in, that earlier versions drew of each seed: whose run is made again gets the same."""
FIRST = "model.layers.0.self_attn.q_proj.lora_A.weight"
RANK = 16
LOG = math.log(2 / 1e-12)
"""ln(2/δ), where δ = 10⁻¹² is the probability that the mean of independent numbers lies outside Hoeffding's interval."""


def update_is_zero_and_random(trial: Trial) -> Iterator[Comparison]:
    """B and the head's bias zero, and the logits those without an update, bit for bit; A within ±1/√in and the head's weight within
    ±√(6/(in + classes)), spread as uniform distributions; the same again.

    Numbers t in [−1, 1] have t² in [0, 1], so that Hoeffding's inequality bounds the mean of n of them by √(2 ln(2/δ)/n) around its
    expectation, and that of their squares by half of it. Two factors, of one seed or two, are held to be independent by the mean of the
    products of their elements, of which 1/3 would be left if they were the same: n is at least 1024, so that the bound is below 1/4.
    """
    rng = trial.rng("fresh")
    for place, (family, targets) in enumerate(product(FAMILIES, FACTORS)):
        further = FURTHER[place % len(FURTHER)]
        yield from _fresh(trial, f"{family}, {targets}", _architecture(rng, family), _settings(rng, targets), further)
    targets = list(FACTORS)[trial.seed % 2]
    large = _settings(rng, targets)
    yield from _fresh(trial, "a large seed", _architecture(rng, FAMILIES[0]), {**large, "seed": LARGE + large["seed"]})
    for further, seed in ((2**32, 0), (1, LARGE + large["seed"])):
        yield from _fresh(trial, f"checkpoint, {targets}, the seed {seed}", CHECKPOINT, {**_settings(rng, targets), "seed": seed}, further)
    yield from _quantised(trial, _architecture(rng, FAMILIES[-1]), {**_settings(rng, targets), "quantize_nf4": True})


def _quantised(trial: Trial, model: Mapping[str, Any], settings: dict[str, Any]) -> Iterator[Comparison]:
    """Weights in NF4, doubly quantised or not, are the same whatever torch's default dtype is when the first of them is quantised."""
    asked = {**settings, "double_quantize": bool(trial.seed % 2)}
    first, *others = (trial.classifiers.fresh(model, asked, ["rm -rf"], default=default) for default in ("float32", *DEFAULTS))
    for default, again in zip(DEFAULTS, others, strict=True):
        yield from same(f"in NF4, where torch's default dtype is {default}", first, again)


def _fresh(trial: Trial, name: str, model: Path | Mapping[str, Any], settings: dict[str, Any], further: int = 1) -> list[Comparison]:
    default = DEFAULTS[settings["seed"] % len(DEFAULTS)]
    first, again, other = (
        trial.classifiers.fresh(model, {**settings, "seed": settings["seed"] + step}, ["rm -rf", "date +%s"], merge=merge, default=dtype)
        for step, merge, dtype in ((0, False, "float32"), (0, True, default), (further, False, "float32"))
    )
    found = [*same("logits", first.plain, first.logits), *same("opened again", first.logits, first.opened)]
    found += same(f"again, where torch's default dtype is {default}", first, again)
    found += same("random numbers of the process that were drawn or seeded", [], sorted({*first.drawn, *again.drawn, *other.drawn}))
    scaled: list[Array] = []
    for label, part in (("", first), (f" of the seed {further} further", other)):
        for tensor, value in part.trainable.items():
            if tensor.endswith(("lora_B.weight", ".bias")):
                found += same(f"{tensor}{label}", np.zeros_like(value), value)
            elif ".lora_" in tensor:
                found += _uniform(f"{tensor}{label}", value, _scaled(value))
                scaled.append(_scaled(value))
            else:
                found += _uniform(f"{tensor}{label}", value, value / math.sqrt(6.0 / sum(value.shape)))
        if len(scaled) % FACTORS[settings["lora_targets"]] or not scaled:
            found.append(broken(f"factors{label}", "their number", FACTORS[settings["lora_targets"]], len(scaled)))
    found += _unlike(scaled)
    for seed, part in ((settings["seed"], first), (settings["seed"] + further, other)):
        if seed in EARLIER:
            off = float(abs(_scaled(part.trainable[FIRST]).flat[0] - EARLIER[seed]))
            found.append(value_at_most(f"first number of the seed {seed} less that of earlier versions", off, 1e-6))
    return [replace(each, tensor=f"{name}: {each.tensor}") for each in found]


def _uniform(name: str, factor: Array, scaled: Array) -> list[Comparison]:
    """A [rank, in], or the head's weight [classes, in], as a sample of a uniform distribution, by `scaled` on ±1, without a row twice."""
    bound = math.sqrt(2 * LOG / factor.size)
    return [
        value_inside(f"{name} / bound, largest", float(np.abs(scaled).max()), 0.0, 1.0 + UNIT_ROUNDOFF["float32"]),
        value_inside(f"{name} / bound, mean", float(scaled.mean()), -bound, bound),
        value_inside(f"{name} / bound, variance", float(np.square(scaled).mean()), 1 / 3 - bound / 2, 1 / 3 + bound / 2),
        value_at_most(f"{name}, rows that are there twice", len(factor) - len(np.unique(factor, axis=0)), 0),
    ]


def _unlike(factors: list[Array]) -> list[Comparison]:
    """The largest mean product of two factors' elements in a row, in the order in which they were drawn."""
    count = min((each.size for each in factors), default=1)
    drawn = np.stack([each.ravel()[:count] for each in factors]) if factors else np.zeros((1, 1))
    products = np.abs(drawn @ drawn.T / count)[np.triu_indices(len(drawn), 1)]
    bound = math.sqrt(2 * LOG / count)
    return [value_inside("mean product of two factors", float(products.max(initial=0.0)), 0.0, bound)]


def _scaled(factor: Array) -> Array:
    return np.asarray(factor, np.float64) * math.sqrt(factor.shape[1])


def _architecture(rng: Generator, family: str) -> dict[str, Any]:
    kv_heads, groups = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    sizes = {
        "vocab": 260,
        "hidden": int(rng.integers(64, 97)),
        "intermediate": int(rng.integers(64, 129)),
        "layers": int(rng.integers(1, 3)),
    }
    heads = {"heads": kv_heads * groups, "kv_heads": kv_heads, "head_dim": 64}
    return {**sizes, **heads, "family": family, "eps": 1e-6, "theta": 1e4, "tied": bool(rng.integers(2)), "max_positions": 64, **SCALED}


def _settings(rng: Generator, targets: str) -> dict[str, Any]:
    return {
        "seed": int(rng.integers(0, 2**31)),
        "num_classes": int(rng.integers(2, 6)),
        "lora_rank": RANK,
        "lora_alpha": 2.0 * RANK,
        "lora_targets": targets,
        "max_seq_len": 16,
        "quantize_nf4": False,
        "dtype": "float32",
    }
