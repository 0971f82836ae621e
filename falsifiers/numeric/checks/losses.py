"""Bounds on losses and their gradients."""

import fnmatch

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, compare_exactly, value_at_most, value_within
from blackswan.falsifiers.numeric.generators import generator_for
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF, round_to

SLACK = 2.0**-20
"""Relative slack of bounds that hold exactly in real arithmetic: a loss in float32 carries a few roundings of 2^-24."""


def gradient_rows_sum_to_zero(attack: Attack, case: Case) -> list[Comparison]:
    """|Σ_c dz| ≤ (C + 2) u Σ_c |dz| + (C + 2 + max_c |z|) u₃₂ |dloss| w / B for each row.

    Every entry is rounded once to the storage dtype; before that p − 1 carries the rounding of p, which is of the order of one however
    small the difference is, and of p = exp(z − logsumexp(z)) that of the logarithm, which is of the order of the logits.
    """
    gradient = np.asarray(attack.answer_gradients(case, ["logits"])["logits"], np.float64)
    unit = UNIT_ROUNDOFF[attack.dtype]
    weights = case.inputs["class_weights"][case.inputs["labels"]] if "class_weights" in case.inputs else 1.0
    probabilities = UNIT_ROUNDOFF[attack.dtype if attack.follows("intermediates", "storage") else "float32"]
    softmax = (
        probabilities
        * abs(float(case.cotangents["loss"]))
        * weights
        / (np.sum(weights) if attack.follows("reduction", "weights") else len(gradient))
    )
    terms = gradient.shape[-1] + 2
    bound = terms * unit * np.abs(gradient).sum(axis=-1) + (terms + np.abs(case.inputs["logits"]).max(axis=-1)) * softmax
    ratio = np.abs(gradient.sum(axis=-1)) / bound
    return [value_at_most("row sum / bound", float(ratio.max()), 1.0)]


def zero_logits_give_log_classes(attack: Attack, case: Case) -> list[Comparison]:
    """ln C within the tolerance's ulps of float32, or of the dtype in which the loss is declared to come."""
    loss = float(attack.answer(case)["loss"])
    classes = case.inputs["logits"].shape[-1]
    unit = UNIT_ROUNDOFF[attack.dtype if attack.follows("loss_dtype", "storage") else "float32"]
    width = float(attack.tolerance.value or 0) * 2 * unit * np.log(classes)
    return [value_within("loss", loss, float(np.log(classes) - width), float(np.log(classes) + width))]


def loss_within_bounds(attack: Attack, case: Case) -> list[Comparison]:
    """0 ≤ loss ≤ ln C + 2 max|logit|."""
    loss = float(attack.answer(case)["loss"])
    logits = case.inputs["logits"]
    bound = float(np.log(logits.shape[-1]) + 2 * np.abs(logits).max())
    return [value_at_most("loss", loss, bound * (1 + SLACK))]


def loss_is_lipschitz(attack: Attack, case: Case) -> list[Comparison]:
    """|L(a) − L(b)| ≤ 2 max|a − b|, with moves that push each label's logit down."""
    rng = generator_for(case.seed, "move")
    logits = case.inputs["logits"]
    move = rng.uniform(0.5, 1.0, logits.shape)
    np.put_along_axis(move, case.inputs["labels"][:, None], -1.0, axis=1)
    moved = np.asarray(round_to(logits + move, attack.dtype), np.float64)
    change = abs(float(attack.answer(case, inputs={"logits": moved})["loss"]) - float(attack.answer(case)["loss"]))
    scale = np.abs(logits).max() + 1
    return [value_at_most("move of the loss", change, float(2 * np.abs(moved - logits).max() + SLACK * scale))]


def weights_scale_the_loss(attack: Attack, case: Case) -> list[Comparison]:
    """With class weights four times as large the loss is exactly four times as large: a power of two rounds nothing.

    One that is declared to be divided by the sum of the weights stays the same.
    """
    loss = attack.answer(case)["loss"]
    scaled = attack.answer(case, inputs={"class_weights": 4.0 * case.inputs["class_weights"]})["loss"]
    return [compare_exactly("loss", loss if attack.follows("reduction", "weights") else 4.0 * loss, scaled)]


def loss_near_log_vocabulary(attack: Attack, case: Case) -> list[Comparison]:
    """|loss − ln V| ≤ 2 max|logit| once the parameters named are scaled down. The logits are the reference's."""
    arguments = attack.claim.arguments
    scaled = {
        key: np.asarray(round_to(value * float(arguments["scale"]), attack.dtype), np.float64)
        for key, value in case.inputs.items()
        if fnmatch.fnmatchcase(key.removeprefix("parameters/"), str(arguments["parameters"]))
    }
    loss = float(attack.answer(case, inputs=scaled)["loss"])
    logits = attack.expect(case, operation="decoder_forward", inputs=scaled)["logits"]
    bound = float(2 * np.abs(logits).max()) * (1 + 4 * UNIT_ROUNDOFF[attack.dtype] * 16)
    middle = float(np.log(case.scalars["vocab"]))
    return [value_within("loss", loss, middle - bound, middle + bound)]


def held_out_loss_below_share_of_log_vocabulary(attack: Attack, case: Case) -> list[Comparison]:
    """loss < share · ln V, and at least 0."""
    loss = float(attack.answer(case)["loss"])
    bound = float(attack.claim.arguments["share"]) * float(np.log(case.scalars["vocab"]))
    return [value_at_most("held-out loss", loss, float(np.nextafter(bound, 0)))]
