"""Checks on softmax and rotary embedding."""

from collections.abc import Callable

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare, value_inside, value_within
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.reference.table import Array, Arrays, Table


def rows_form_a_simplex(attack: Attack, case: Case) -> list[Comparison]:
    """Non-negative, and a sum within u_storage + (n + 2) u_float32 of one (Higham 2002, §4.2)."""
    answer = np.asarray(attack.answer(case)["y"], np.float64)
    width = UNIT_ROUNDOFF[attack.dtype] + (answer.shape[-1] + 2) * UNIT_ROUNDOFF["float32"]
    with attack.watch.on("comparison"):
        sums = answer.sum(axis=-1)
        worst = float(sums.reshape(-1)[np.argmax(np.abs(sums - 1))]) if np.isfinite(sums).all() else np.nan
        return [value_inside("smallest entry", float(answer.min()), 0.0, np.inf), value_within("row sum", worst, 1 - width, 1 + width)]


def rotation_keeps_pair_norms(attack: Attack, case: Case) -> list[Comparison]:
    """Squared lengths of the pairs, each within what four roundings of its elements make of it."""
    after = np.asarray(attack.answer(case)["y"], np.float64)
    with attack.watch.on("comparison"):
        expected, actual = (np.hypot(*np.split(value, 2, axis=-1)) for value in (case.inputs["x"], after))
        scale = np.where(expected > 0, expected, 1.0)
        unit = UNIT_ROUNDOFF[attack.dtype]
        return [compare("pair length / before", expected / scale, actual / scale, Errors.flat(4 * unit), unit)]


def scores_depend_on_distance(attack: Attack, case: Case) -> list[Comparison]:
    """q(p) · k(p') against q(p + s) · k(p' + s), in float64 from the rotated vectors; x serves as query and, reversed, as key."""
    positions = case.inputs["positions"]
    shifted = positions + 37

    def scores(rotate: Callable[[Array, Array], Array], where: Array) -> Array:
        q, k = rotate(case.inputs["x"], where), rotate(case.inputs["x"][..., ::-1].copy(), where)
        return np.asarray(np.einsum("bqhd,bkhd->bhqk", np.asarray(q, np.float64), np.asarray(k, np.float64)))

    def subject(x: Array, where: Array) -> Array:
        return attack.answer(case, inputs={"x": x, "positions": where})["y"]

    def rounded(_: Arrays, table: Table) -> dict[str, Array]:
        def rotate(x: Array, where: Array) -> Array:
            run = reference.evaluate("rope", {"x": x, "positions": where}, case.scalars, table)["y"]
            return np.asarray(run)

        return {"scores": scores(rotate, shifted)}

    def exactly(x: Array, where: Array) -> Array:
        return attack.expect(case, inputs={"x": x, "positions": where})["y"]

    expected = {"scores": scores(exactly, positions)}
    actual = {"scores": scores(subject, shifted)}
    return attack.judge(expected, actual, lambda: attack.floor(case, rounded, expected), {"scores": np.dtype(np.float64)})
