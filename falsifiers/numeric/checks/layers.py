"""Checks on single layers: softmax, rotary embedding, and adapters (identity, merging, rank)."""

from collections.abc import Callable

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare, value_at_most, value_inside, value_within
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF
from blackswan.reference.table import Array, Arrays, Table


def rows_form_a_simplex(attack: Attack, case: Case) -> list[Comparison]:
    """Non-negative, and a sum within u_storage + (n + 2) u_float32 of one (Higham 2002, §4.2)."""
    answer = np.asarray(attack.answer(case)["y"], np.float64)
    width = UNIT_ROUNDOFF[attack.dtype] + (answer.shape[-1] + 2) * UNIT_ROUNDOFF["float32"]
    sums = answer.sum(axis=-1)
    worst = float(sums.reshape(-1)[np.argmax(np.abs(sums - 1))]) if np.isfinite(sums).all() else np.nan
    return [value_inside("smallest entry", float(answer.min()), 0.0, np.inf), value_within("row sum", worst, 1 - width, 1 + width)]


def rotation_keeps_pair_norms(attack: Attack, case: Case) -> list[Comparison]:
    """Squared lengths of the pairs, each within what four roundings of its elements make of it."""
    after = np.asarray(attack.answer(case)["y"], np.float64)
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


def zero_b_is_the_plain_layer(attack: Attack, case: Case) -> list[Comparison]:
    """lora_linear with B = 0 against linear, within the rounding of linear."""
    adapted = attack.answer(case, inputs={"lora_b": np.zeros_like(case.inputs["lora_b"])})
    inputs = {name: case.inputs[name] for name in ("x", "weight", "bias") if name in case.inputs}
    plain = Case("linear", case.dtype, case.sizes, {}, case.seed, case.flavour, inputs)
    first = {"y": np.asarray(attack.answer(plain)["y"], np.float64)}
    expected = attack.expect(plain)

    def rounded(run: Arrays, table: Table) -> dict[str, Array]:
        return reference.evaluate("linear", run, {}, table)

    return attack.judge(first, adapted, lambda: attack.floor(plain, rounded, expected), {"y": STORAGE[attack.dtype]})


def merged_equals_unmerged(attack: Attack, case: Case) -> list[Comparison]:
    """linear with merge(W) against lora_linear, within the noise of merging, rounding and multiplying."""
    unmerged = {"y": np.asarray(attack.answer(case)["y"], np.float64)}
    factors = {name: case.inputs[name] for name in ("weight", "lora_a", "lora_b")}
    merge = Case("lora_merge", case.dtype, case.sizes, case.scalars, case.seed, case.flavour, factors)
    weight = np.asarray(attack.answer(merge)["y"], np.float64)
    inputs = {name: case.inputs[name] for name in ("x", "bias") if name in case.inputs} | {"weight": weight}
    merged = attack.answer(Case("linear", case.dtype, case.sizes, {}, case.seed, case.flavour, inputs))
    expected = attack.expect(case)

    def rounded(run: Arrays, table: Table) -> dict[str, Array]:
        parts = {name: run[name] for name in ("weight", "lora_a", "lora_b")}
        low = reference.evaluate("lora_merge", parts, case.scalars, table)["y"]
        plain = {name: run[name] for name in ("x", "bias") if name in run}
        return reference.evaluate("linear", {**plain, "weight": low}, {}, table)

    return attack.judge(unmerged, merged, lambda: attack.floor(case, rounded, expected), {"y": STORAGE[attack.dtype]})


def unmerge_undoes_merge(attack: Attack, case: Case) -> list[Comparison]:
    """|unmerge(merge(W)) − W| ≤ 2u(|W + ΔW| + |W|) + 4γ|ΔW|, elementwise; compared as a share of that bound."""
    merged = np.asarray(attack.answer(case)["y"], np.float64)
    back = attack.answer(
        Case("lora_unmerge", case.dtype, case.sizes, case.scalars, case.seed, case.flavour, {**case.inputs, "weight": merged})
    )["y"]
    weight, unit = case.inputs["weight"], UNIT_ROUNDOFF[attack.dtype]
    rank = case.inputs["lora_a"].shape[0]
    product = case.scalars["alpha"] / rank * (np.abs(case.inputs["lora_b"]) @ np.abs(case.inputs["lora_a"]))
    bound = 2 * unit * (np.abs(merged) + np.abs(weight)) + 4 * (rank + 2) * UNIT_ROUNDOFF["float32"] * product
    bound = np.maximum(bound, 2.0**-120)
    return [compare("back / bound", weight / bound, np.asarray(back, np.float64) / bound, Errors.flat(1.0), unit)]


def update_has_low_rank(attack: Attack, case: Case) -> list[Comparison]:
    """σ_{r+1} of merge(W) − W against the Frobenius norm of the rounding of merge(W) (Weyl's inequality)."""
    merged = np.asarray(attack.answer(case)["y"], np.float64)
    if not np.isfinite(merged).all():
        return [value_at_most("σ beyond the rank / rounding", np.nan, 1.0)]
    update = merged - case.inputs["weight"]
    rank = case.inputs["lora_a"].shape[0]
    values = np.linalg.svd(update, compute_uv=False)
    beyond = float(values[rank]) if rank < len(values) else 0.0
    product = case.scalars["alpha"] / rank * (np.abs(case.inputs["lora_b"]) @ np.abs(case.inputs["lora_a"]))
    rounding = UNIT_ROUNDOFF[attack.dtype] * np.linalg.norm(merged) + (rank + 2) * UNIT_ROUNDOFF["float32"] * np.linalg.norm(product)
    return [value_at_most("σ beyond the rank / rounding", beyond / float(rounding), 1.0)]
