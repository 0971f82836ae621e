"""Wrong adapters, and wrong merging of them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import Arguments, call, dropped, in_bfloat16, pull, scaled_input, with_arguments, with_gradients
from blackswan.falsifiers.mutants.patches import step_mutant
from blackswan.falsifiers.mutants.registry import mutant
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


@mutant("lora_scale_alpha")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, alpha=lambda a: a["alpha"] * _rank(a))


@mutant("lora_scale_one")
def _(correct: Operation) -> Operation:
    return _scale_one(correct)


@mutant("lora_scale_sqrt_rank")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, alpha=lambda a: a["alpha"] * math.sqrt(_rank(a)))


@mutant("lora_adapter_dropped")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, alpha=lambda _: 0.0)


@mutant("lora_bias_dropped")
def _(correct: Operation) -> Operation:
    return dropped(correct, "bias")


@mutant("lora_bias_scaled")
def _(correct: Operation) -> Operation:
    return scaled_input(correct, "bias", _scale)


@mutant("lora_input_rounded")
def _(correct: Operation) -> Operation:
    def forward(**a: Any) -> Array:
        adapter = call(correct, {**a, "x": in_bfloat16(a["x"])}) - call(correct, {**a, "x": in_bfloat16(a["x"]), "alpha": 0.0})
        return np.asarray(call(correct, {**a, "alpha": 0.0}) + adapter)

    return Operation(forward, correct.backward)


@mutant("lora_b_gradient_unscaled")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda g, _, a: {"lora_b": g["lora_b"] / _scale(a)})


@mutant("lora_a_gradient_zero")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda g, *_: {"lora_a": np.zeros_like(g["lora_a"])})


@mutant("lora_input_gradient_without_adapter")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda _, dy, a: {"x": pull(correct, dy, {**a, "alpha": 0.0})["x"]})


@mutant("lora_factors_swapped_gradient")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda _, dy, a: {"lora_a": outer(_scale(a) * (dy @ a["lora_b"]), as_rows(a["x"])[:, ::-1])})


@mutant("lora_merge_scale_one")
def _(correct: Operation) -> Operation:
    return _scale_one(correct)


@mutant("lora_merge_subtracts")
def _(correct: Operation) -> Operation:
    return _negated(correct)


@mutant("lora_merge_low_precision")
def _(_: Operation) -> Operation:
    def forward(weight: Array, lora_a: Array, lora_b: Array, alpha: float) -> Array:
        return weight + in_bfloat16(alpha / len(lora_a) * (lora_b @ lora_a))

    return Operation(forward)


@mutant("lora_merge_full_rank")
def _(correct: Operation) -> Operation:
    def forward(**a: Any) -> Array:
        return np.asarray(call(correct, a) + 0.5 * np.eye(*a["weight"].shape, dtype=a["weight"].dtype))

    return Operation(forward)


@mutant("lora_unmerge_adds")
def _(correct: Operation) -> Operation:
    return _negated(correct)


@mutant("lora_unmerge_scale_one")
def _(correct: Operation) -> Operation:
    return _scale_one(correct)


def _starting(change: Callable[[Any, bool, Any], Any]) -> Callable[[Any], Any]:
    """Another start of a factor: (the right one, whether it is A, the generator after it was drawn)."""
    return lambda initial: lambda name, shape, generator: change(initial(name, shape, generator), "lora_A" in name, generator)


def _bound(factor: Any) -> float:
    return 1 / math.sqrt(factor.shape[-1])


FACTOR = ("blackswan.impl.classifier", "initial_factor")
step_mutant("lora_initial_all_zero", *FACTOR)(_starting(lambda factor, *_: 0 * factor))
step_mutant("lora_initial_b_not_zero", *FACTOR)(_starting(lambda factor, is_a, _: factor if is_a else factor + 0.05))
step_mutant("lora_initial_a_constant", *FACTOR)(
    _starting(lambda factor, is_a, _: factor.new_full(factor.shape, _bound(factor) / 2) if is_a else factor)
)
step_mutant("lora_initial_a_normal", *FACTOR)(
    _starting(lambda factor, is_a, generator: factor.normal_(0, _bound(factor) / math.sqrt(3), generator=generator) if is_a else factor)
)
step_mutant("lora_initial_a_positive", *FACTOR)(_starting(lambda factor, *_: factor.abs()))
step_mutant("lora_initial_a_narrow", *FACTOR)(_starting(lambda factor, *_: factor / 2))
step_mutant("lora_initial_a_by_rank", *FACTOR)(
    _starting(lambda factor, is_a, _: factor * math.sqrt(factor.shape[1] / factor.shape[0]) if is_a else factor)
)
step_mutant("lora_initial_a_repeated", *FACTOR)(
    lambda initial: lambda name, shape, generator: initial(name, shape, generator.manual_seed(generator.initial_seed()))
)
step_mutant("lora_initial_seed_ignored", "blackswan.impl.pipeline", "initial_trainable")(
    lambda initial: lambda config, adaptation, _: initial(config, adaptation, 0)
)


@step_mutant("lora_initial_from_global_state", *FACTOR)
def _(initial: Any) -> Any:
    import torch

    return lambda name, shape, _: initial(name, shape, torch.default_generator)
