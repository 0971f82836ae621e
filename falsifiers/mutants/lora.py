"""Wrong adapters, and wrong merging of them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import Arguments, call, dropped, in_bfloat16, pull, scaled_input, with_arguments, with_gradients
from blackswan.falsifiers.mutants.registry import mutant, wrong_step
from blackswan.reference.rows import as_rows, outer
from blackswan.reference.table import Array, Operation


def _rank(a: Arguments) -> int:
    return int(a["lora_a"].shape[0])


def _scale(a: Arguments) -> float:
    return float(a["alpha"]) / _rank(a)


def _scale_one(correct: Operation) -> Operation:
    return with_arguments(correct, alpha=lambda a: float(_rank(a)))


def _negated(correct: Operation) -> Operation:
    return with_arguments(correct, alpha=lambda a: -a["alpha"])


@mutant("lora_linear", "P23")
def lora_scale_alpha(correct: Operation) -> Operation:
    """Scale alpha instead of alpha/rank."""
    return with_arguments(correct, alpha=lambda a: a["alpha"] * _rank(a))


@mutant("lora_linear", "P24")
def lora_scale_one(correct: Operation) -> Operation:
    """Scale 1."""
    return _scale_one(correct)


@mutant("lora_linear", "own")
def lora_scale_sqrt_rank(correct: Operation) -> Operation:
    """alpha/sqrt(rank)."""
    return with_arguments(correct, alpha=lambda a: a["alpha"] * math.sqrt(_rank(a)))


@mutant("lora_linear", "own")
def lora_adapter_dropped(correct: Operation) -> Operation:
    """Adapter not applied."""
    return with_arguments(correct, alpha=lambda _: 0.0)


@mutant("lora_linear", "S1")
def lora_bias_dropped(correct: Operation) -> Operation:
    """Bias of the adapted projection dropped."""
    return dropped(correct, "bias")


@mutant("lora_linear", "own")
def lora_bias_scaled(correct: Operation) -> Operation:
    """The scale applied to bias as well."""
    return scaled_input(correct, "bias", _scale)


@mutant("lora_linear", "P28", hidden_in=("bfloat16",))
def lora_input_rounded(correct: Operation) -> Operation:
    """The adapter sees the input in bfloat16."""

    def forward(**a: Any) -> Array:
        adapter = call(correct, {**a, "x": in_bfloat16(a["x"])}) - call(correct, {**a, "x": in_bfloat16(a["x"]), "alpha": 0.0})
        return np.asarray(call(correct, {**a, "alpha": 0.0}) + adapter)

    return Operation(forward, correct.backward)


@mutant("lora_linear", "S14")
def lora_b_gradient_unscaled(correct: Operation) -> Operation:
    """Gradient of B without alpha/rank, as if B were stored multiplied."""
    return with_gradients(correct, lambda g, _, a: {"lora_b": g["lora_b"] / _scale(a)})


@mutant("lora_linear", "P25", "P26")
def lora_a_gradient_zero(correct: Operation) -> Operation:
    """Gradient of A lands on a copy."""
    return with_gradients(correct, lambda g, *_: {"lora_a": np.zeros_like(g["lora_a"])})


@mutant("lora_linear", "own")
def lora_input_gradient_without_adapter(correct: Operation) -> Operation:
    """Input gradient from W alone."""
    return with_gradients(correct, lambda _, dy, a: {"x": pull(correct, dy, {**a, "alpha": 0.0})["x"]})


@mutant("lora_linear", "own")
def lora_factors_swapped_gradient(correct: Operation) -> Operation:
    """Gradient of A from the input with its features reversed."""
    return with_gradients(correct, lambda _, dy, a: {"lora_a": outer(_scale(a) * (dy @ a["lora_b"]), as_rows(a["x"])[:, ::-1])})


@mutant("lora_merge", "P24")
def lora_merge_scale_one(correct: Operation) -> Operation:
    """Merge with scale 1."""
    return _scale_one(correct)


@mutant("lora_merge", "own")
def lora_merge_subtracts(correct: Operation) -> Operation:
    """Merge with the wrong sign."""
    return _negated(correct)


@mutant("lora_merge", "P28", hidden_in=("bfloat16",))
def lora_merge_low_precision(_: Operation) -> Operation:
    """The product B A rounded to bfloat16 before it is added."""

    def forward(weight: Array, lora_a: Array, lora_b: Array, alpha: float) -> Array:
        return weight + in_bfloat16(alpha / len(lora_a) * (lora_b @ lora_a))

    return Operation(forward)


@mutant("lora_merge", "own")
def lora_merge_full_rank(correct: Operation) -> Operation:
    """A diagonal of 0.5 added to the update."""

    def forward(**a: Any) -> Array:
        return np.asarray(call(correct, a) + 0.5 * np.eye(*a["weight"].shape, dtype=a["weight"].dtype))

    return Operation(forward)


@mutant("lora_unmerge", "own")
def lora_unmerge_adds(correct: Operation) -> Operation:
    """Unmerge adds once more."""
    return _negated(correct)


@mutant("lora_unmerge", "P24")
def lora_unmerge_scale_one(correct: Operation) -> Operation:
    """Unmerge with scale 1."""
    return _scale_one(correct)


_factor = partial(wrong_step, "blackswan.impl.classifier", "initial_factor", "own")


def _starting(name: str, doc: str, change: Callable[[Any, bool], Any]) -> None:
    """Another start of a factor: (the right one, whether it is A)."""
    _factor(name=name, doc=doc)(lambda initial, path, *given: change(initial(path, *given), "lora_A" in path))


def _bound(factor: Any) -> float:
    return 1 / math.sqrt(factor.shape[-1])


_starting("lora_initial_all_zero", "A and B start at zero, where neither has a gradient: LoRA never moves.", lambda factor, _: 0 * factor)
_starting("lora_initial_b_not_zero", "B starts at 0.05: a fresh adapter changes the base.", lambda factor, is_a: factor + 0.05 * (not is_a))
_starting(
    "lora_initial_a_constant",
    "All of A is half its bound: rank 1.",
    lambda factor, is_a: factor.new_full(factor.shape, _bound(factor) / 2) if is_a else factor,
)
_starting("lora_initial_a_positive", "A uniform in 0 … 1/√in.", lambda factor, _: factor.abs())
_starting("lora_initial_a_narrow", "A within half its bound.", lambda factor, _: factor / 2)
_starting(
    "lora_initial_a_by_rank",
    "A within ±1/√rank, the fan of B.",
    lambda factor, is_a: factor * math.sqrt(factor.shape[1] / factor.shape[0]) if is_a else factor,
)


@_factor()
def lora_initial_a_normal(initial: Any, path: str, shape: Any, generator: Any) -> Any:
    """A normal, of the same variance."""
    factor = initial(path, shape, generator)
    return factor.normal_(0, _bound(factor) / math.sqrt(3), generator=generator) if "lora_A" in path else factor


@_factor()
def lora_initial_a_repeated(initial: Any, path: str, shape: Any, generator: Any) -> Any:
    """Every factor from the beginning of the seed's numbers."""
    return initial(path, shape, generator.manual_seed(generator.initial_seed()))


@wrong_step("blackswan.impl.pipeline", "initial_trainable", "own")
def lora_initial_seed_ignored(initial: Any, config: Any, adaptation: Any, _: int) -> Any:
    """The same start for every seed."""
    return initial(config, adaptation, 0)


@_factor()
def lora_initial_from_global_state(initial: Any, path: str, shape: Any, _: Any) -> Any:
    """The start depends on what drew random numbers before."""
    import torch

    return initial(path, shape, torch.default_generator)
