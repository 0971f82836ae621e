"""Checks on AdamW, clipping and the schedule."""

import math
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare, compare_exactly, value_at_most, value_inside
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF, round_to
from blackswan.reference.decoder import parameter_shapes
from blackswan.reference.nf4_double import CODEBOOK, GROUP, UNSIGNED
from blackswan.reference.table import Array

U = UNIT_ROUNDOFF["float32"]


def _stepped(attack: Attack, case: Case, inputs: dict[str, Array], **scalars: Any) -> Array:
    return np.asarray(attack.answer(case, inputs=inputs, scalars=scalars)["parameter"], np.float64)


def decay_is_decoupled(attack: Attack, case: Case) -> list[Comparison]:
    """θ'(λ) − θ'(0) = −lr λ θ; the bound is six roundings of the parameter and the step."""
    theta, rate, decay = case.inputs["parameter"], case.scalars["learning_rate"], case.scalars["weight_decay"]
    with_decay, without = _stepped(attack, case, {}), _stepped(attack, case, {}, weight_decay=0.0)
    scale = 6 * U * (np.abs(theta) + np.abs(without))
    scale = np.maximum(scale, 2.0**-120)
    return [compare("(θ'(λ) − θ'(0)) / bound", -rate * decay * theta / scale, (with_decay - without) / scale, Errors.flat(1.0), U)]


def first_step_is_the_learning_rate(attack: Attack, case: Case) -> list[Comparison]:
    """θ' − θ = −lr g / (|g| + ε) from zero moments, within the roundings of θ' and a few of the step."""
    theta, gradient, rate = case.inputs["parameter"], case.inputs["gradient"], case.scalars["learning_rate"]
    zero = np.zeros_like(theta)
    moved = _stepped(attack, case, {"exp_avg": zero, "exp_avg_sq": zero}) - theta
    eps = case.scalars.get("eps", 1e-8)
    expected = -rate * gradient / (np.abs(gradient) + eps)
    scale = 2 * U * (np.abs(theta) + rate) + 64 * U * rate
    return [compare("(θ' − θ) / bound", expected / scale, moved / scale, Errors.flat(1.0), U)]


def scale_of_gradients_is_irrelevant(attack: Attack, case: Case) -> list[Comparison]:
    """Gradient and first moment times 2⁶, second moment times 2¹²: the same parameters, bit for bit."""
    inputs = case.inputs
    positive = np.maximum(inputs["exp_avg_sq"], round_to(np.asarray(0.1), "float32"))
    scaled = {"gradient": inputs["gradient"] * 64, "exp_avg": inputs["exp_avg"] * 64, "exp_avg_sq": positive * 4096}
    first = _stepped(attack, case, {"exp_avg_sq": positive})
    return [compare_exactly("parameter", first, _stepped(attack, case, scaled))]


def converges_on_a_quadratic(attack: Attack, case: Case) -> list[Comparison]:
    """|θ| ≤ 10 lr after 400 steps with gradient θ, from |θ| ≤ 1."""
    theta = np.clip(case.inputs["parameter"], -1, 1)
    state = {"parameter": theta, "exp_avg": np.zeros_like(theta), "exp_avg_sq": np.zeros_like(theta)}
    for step in range(1, 401):
        answer = attack.answer(case, inputs={**state, "gradient": state["parameter"]}, scalars={"step": step})
        state = {name: np.asarray(answer[name], np.float64) for name in state}
    return [value_at_most("max|θ| / lr", float(np.abs(state["parameter"]).max() / case.scalars["learning_rate"]), 10.0)]


def decay_reaches_matrices_only(attack: Attack, case: Case) -> list[Comparison]:
    """One step with decay and without: θ'(λ) − θ'(0) = −lr λ θ for a matrix, within rounding; vectors bit for bit the same."""
    rate, decay = float(case.scalars["learning_rate"]), float(case.scalars["weight_decay"])
    with_decay, without = attack.answer(case), attack.answer(case, scalars={"weight_decay": 0.0})
    found = []
    for name in parameter_shapes(case.scalars):
        start, key = case.inputs[f"parameters/{name}"], f"trainable/{name}"
        moved = np.asarray(with_decay[key], np.float64) - np.asarray(without[key], np.float64)
        if start.ndim == 1:
            found.append(compare_exactly(name, without[key], with_decay[key]))
        else:
            # Each of the two parameters carries the rounding of its products, of θ and of the step, which is at most the rate.
            limit = 8 * U * (float(np.abs(start).max()) + rate)
            found.append(compare(name, -rate * decay * start, moved, Errors.flat(limit), U))
    return found


def eight_bit_step_is_adamw(attack: Attack, case: Case) -> list[Comparison]:
    """|θ' − exact| ≤ 16 u (|θ| + lr (β₁ |m| + (1 − β₁) |g|) / (1 − β₁ᵗ) / (sqrt(v̂) + ε)): m and g may cancel."""
    rate, step = float(case.scalars["learning_rate"]), int(case.scalars["step"])
    beta1, beta2, eps = (float(case.scalars[name]) for name in ("beta1", "beta2", "eps"))
    expected, theta, gradient = attack.expect(case), case.inputs["parameter"], case.inputs["gradient"]
    terms = np.abs(expected["exp_avg"]) + 2 * (1 - beta1) * np.abs(gradient)
    size = rate * terms / (1 - beta1**step) / (np.sqrt(expected["exp_avg_sq"] / (1 - beta2**step)) + eps)
    scale = 16 * U * (np.abs(theta) + size)
    found = np.asarray(attack.answer(case)["parameter"], np.float64)
    return [compare("θ' / bound", expected["parameter"] / scale, found / scale, Errors.flat(1.0), U)]


def eight_bit_moments_keep_their_code(attack: Attack, case: Case) -> list[Comparison]:
    """|held − m| ≤ half a gap of the dynamic type times the block's absmax; a whole one next to zero, where the sign may be kept."""
    expected, answer = attack.expect(case), attack.answer(case)
    found = []
    for name, codebook in (("exp_avg", CODEBOOK), ("exp_avg_sq", UNSIGNED)):
        moment, book = expected[name], codebook.astype(np.float64)
        blocks = np.pad(np.abs(moment), (0, -moment.size % GROUP)).reshape(-1, GROUP)
        absmax = np.repeat(np.maximum(blocks.max(axis=1), np.finfo(np.float32).tiny), GROUP)[: moment.size]
        above = np.clip(np.searchsorted(book, moment / absmax), 1, book.size - 1)
        lower, upper = book[above - 1], book[above]
        gap = (upper - lower) * np.where((lower == 0) | (upper == 0), 1.0, 0.5)
        error = np.abs(np.asarray(answer[name], np.float64) - moment)
        found.append(value_at_most(f"{name}: error / bound", float((error / ((gap + 8 * U) * absmax)).max()), 1.0))
    return found


def clipped_norm_is_bounded(attack: Attack, case: Case) -> list[Comparison]:
    """‖clip(g)‖ ≤ max_norm (1 + (n + 4)u), and gradients whose norm is below max_norm come back unchanged."""
    gradients, bound = case.inputs["gradients"], float(case.scalars["max_norm"])
    clipped = np.asarray(attack.answer(case)["gradients"], np.float64)
    slack = 1 + (gradients.size + 4) * U
    found = [value_inside("norm after clipping / max_norm", float(np.linalg.norm(clipped)) / bound, 0.0, slack)]
    if np.linalg.norm(gradients) < bound / slack:
        found.append(compare_exactly("gradients below max_norm", gradients, clipped))
    return found


def schedule_reaches_its_peak(attack: Attack, case: Case) -> list[Comparison]:
    """Rates in [0, peak]; 0 at step 0 of a warm-up; the peak at step W."""
    rates = np.asarray(attack.answer(case)["rates"], np.float64)
    peak, total = float(case.scalars["peak"]), len(rates)
    warmup = math.ceil(case.scalars["warmup_fraction"] * total)
    found = [
        value_inside("lowest / peak", float(rates.min() / peak), 0.0, 1.0),
        value_inside("highest / peak", float(rates.max() / peak), 0.0, 1.0),
    ]
    if warmup:
        found.append(compare_exactly("rate of step 0", np.asarray(0.0), rates[0]))
    if warmup < total:
        found.append(compare_exactly("rate at the end of warm-up", np.asarray(peak), rates[warmup]))
    return found
