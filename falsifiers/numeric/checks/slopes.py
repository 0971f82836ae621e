"""The gradient against the loss that it belongs to: the subject's own central differences, and the change of its loss over one step."""

from itertools import pairwise

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case, differentiable
from blackswan.falsifiers.numeric.comparison import Comparison, rejected, value_at_most
from blackswan.falsifiers.numeric.generators import generator_for
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF, signatures
from blackswan.reference.table import Array, Arrays

STEP = 2.0**-12
"""The step is about u^(1/4) in float64: the estimate of the truncation error below is then well above the rounding of the loss."""


def slope_matches_gradient(attack: Attack, case: Case) -> list[Comparison]:
    """g · d against (L(θ + hd) − L(θ − hd)) / 2h for a random direction d of unit length.

    The difference quotient D(h) errs by h² L‴/6 and by rounding. D(2h) − D(h) is three times the first, so the bound is its double, plus
    64 roundings of the loss over h: no number is chosen but h.
    """
    wrt, direction, gradient = _direction(attack, case, "a random direction")
    slope = sum(float(np.vdot(gradient[name], direction[name])) for name in wrt)
    near, far = (_quotient(attack, case, direction, step) for step in (STEP, 2 * STEP))
    rounding = 64 * UNIT_ROUNDOFF[attack.dtype] * max(1.0, abs(_loss(attack, case, {}))) / STEP
    bound = 2 * abs(far - near) + rounding
    if bound > 0.1 * np.sqrt(sum(float(np.square(gradient[name]).sum()) for name in wrt)):
        return [rejected("slope")]
    return [value_at_most("(g · d − difference quotient) / bound", abs(slope - near) / bound, 1.0)]


def step_changes_loss_as_predicted(attack: Attack, case: Case) -> list[Comparison]:
    """(L(θ − ηg/|g|) − L(θ)) / η against −|g| as η goes to 0, extrapolated from η to η/8.

    The rest is aη + bη² + …; two Richardson steps remove a and b. The bound is the change by the last two steps, plus
    rounding; a case whose bound is more than a tenth of |g| proves nothing.
    """
    wrt, _, gradient = _direction(attack, case, "none")
    norm = float(np.sqrt(sum(float(np.square(gradient[name]).sum()) for name in wrt)))
    if norm == 0.0:
        return [rejected("left over")]
    down = {name: -gradient[name] / norm for name in wrt}
    start, step = _loss(attack, case, {}), 2.0**-8
    over = [(_loss(attack, case, down, step / part) - start) / (step / part) + norm for part in (1, 2, 4, 8)]
    linear = [2 * fine - coarse for coarse, fine in pairwise(over)]
    quadratic = [(4 * fine - coarse) / 3 for coarse, fine in pairwise(linear)]
    rounding = 64 * UNIT_ROUNDOFF[attack.dtype] * max(1.0, abs(start)) / (step / 8)
    bound = abs(quadratic[1] - quadratic[0]) + abs(linear[2] - linear[1]) + rounding
    if bound > 0.1 * norm:
        return [rejected("left over")]
    return [value_at_most("|left over at first order| / bound", abs(quadratic[1]) / bound, 1.0)]


def _direction(attack: Attack, case: Case, name: str) -> tuple[list[str], dict[str, Array], dict[str, Array]]:
    """The parameters, a random direction of unit length over all of them, and the subject's gradient of the loss itself."""
    wrt = differentiable(signatures()[case.operation], case)
    drawn = {key: generator_for(case.seed, f"{name} {key}").standard_normal(case.inputs[key].shape) for key in wrt}
    length = float(np.sqrt(sum(float(np.square(value).sum()) for value in drawn.values())))
    gradient, upstream = attack.answer_gradients(case, wrt), float(case.cotangents["loss"])
    return (
        wrt,
        {key: value / length for key, value in drawn.items()},
        {key: np.asarray(gradient[key], np.float64) / upstream for key in wrt},
    )


def _quotient(attack: Attack, case: Case, direction: Arrays, step: float) -> float:
    return (_loss(attack, case, direction, step) - _loss(attack, case, direction, -step)) / (2 * step)


def _loss(attack: Attack, case: Case, direction: Arrays, step: float = 0.0) -> float:
    moved = {name: case.inputs[name] + step * value for name, value in direction.items()}
    return float(attack.answer(case, inputs=moved)["loss"])
