"""Checks on NF4 codes: error bounds on both sides, zero, stability, size."""

from collections.abc import Mapping

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, compare_exactly, value_at_most, value_inside, value_within
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.reference.table import Array

HALF_WIDEST_GAP = (1.0 - 0.6961928009986877) / 2
"""Half the distance between the codebook's first two entries (Dettmers et al. 2023, appendix E)."""


def _codes(attack: Attack, case: Case, weight: Array | None = None) -> Mapping[str, Array]:
    return attack.answer(case) if weight is None else attack.answer(case, inputs={"weight": weight})


def _dequantised(attack: Attack, case: Case, answer: Mapping[str, Array]) -> Array:
    inputs = {"codes": answer["codes"], "absmax": np.asarray(answer["absmax"], np.float64)}
    rows, columns = case.inputs["weight"].shape
    scalars = {"rows": rows, "columns": columns, "block_size": case.scalars["block_size"]}
    back = Case("nf4_dequantize", case.dtype, case.sizes, scalars, case.seed, case.flavour, inputs)
    return np.asarray(attack.answer(back)["weight"], np.float64)


def _roundtrip(attack: Attack, case: Case) -> tuple[Mapping[str, Array], Array]:
    answer = _codes(attack, case)
    return answer, _dequantised(attack, case, answer)


def nf4_error_within_half_a_gap(attack: Attack, case: Case) -> list[Comparison]:
    """|w − dq(q(w))| ≤ (half the widest gap + 4u) · absmax, with the block's true absmax."""
    _, back = _roundtrip(attack, case)
    weight, block = case.inputs["weight"].reshape(-1), case.scalars["block_size"]
    blocks = np.pad(np.abs(weight), (0, -weight.size % block)).reshape(-1, block)
    absmax = np.repeat(blocks.max(axis=1), block)[: weight.size]
    bound = (HALF_WIDEST_GAP + 4 * UNIT_ROUNDOFF[attack.dtype]) * absmax
    error = np.abs(back.reshape(-1) - weight)
    ratio = np.where(bound > 0, error / np.where(bound > 0, bound, 1), np.where(error == 0, 0.0, np.inf))
    return [value_at_most("error / bound", float(ratio.max()), 1.0)]


def nf4_mean_error_in_band(attack: Attack, case: Case) -> list[Comparison]:
    """Mean absolute error between the tolerance's low and high."""
    _, back = _roundtrip(attack, case)
    error = float(np.abs(back - case.inputs["weight"]).mean())
    tolerance = attack.tolerance
    return [value_within("mean |error|", error, float(tolerance.low or 0), float(tolerance.high or 0))]


def nf4_requantises_to_itself(attack: Attack, case: Case) -> list[Comparison]:
    """Codes and absmax of the dequantised weight are the same."""
    first, back = _roundtrip(attack, case)
    second = _codes(attack, case, back)
    return [compare_exactly(name, np.asarray(first[name]), np.asarray(second[name])) for name in ("codes", "absmax")]


def nf4_keeps_zero(attack: Attack, case: Case) -> list[Comparison]:
    """Zero elements come back as exactly zero; a case without a zero proves nothing."""
    weight = case.inputs["weight"]
    _, back = _roundtrip(attack, case)
    zero = weight == 0
    return [compare_exactly("elements that were zero", weight[zero], back[zero])] if zero.any() else []


def nf4_mostly_not_zero(attack: Attack, case: Case) -> list[Comparison]:
    """More than half of the elements are numbers other than zero."""
    _, back = _roundtrip(attack, case)
    return [value_inside("share of non-zero elements", float((np.isfinite(back) & (back != 0)).mean()), float(np.nextafter(0.5, 1)), 1.0)]


def nf4_takes_half_a_byte(attack: Attack, case: Case) -> list[Comparison]:
    """Bytes of codes and absmax together."""
    answer = _codes(attack, case)
    size, block = case.inputs["weight"].size, case.scalars["block_size"]
    expected = (size + 1) // 2 + 4 * ((size + block - 1) // block)
    return [compare_exactly("bytes", np.asarray(expected), np.asarray(answer["codes"].nbytes + answer["absmax"].nbytes))]
