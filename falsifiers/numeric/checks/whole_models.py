"""Whole classifiers, layer by layer: hidden states, logits, loss and every gradient against float64."""

from dataclasses import replace
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.attack import FEW_ELEMENTS, Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare, value_at_most
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.numeric.whole_model import (
    WholeModel,
    WholeModelReference,
    chosen,
    dtypes,
    in_order,
    in_true_shape,
    of_the_reference,
)
from blackswan.reference.table import Array, Arrays

REPLAYS, THOROUGH_REPLAYS, THOROUGH_REPLAYS_OF_SMALL = 2, 4, 48
"""Each replay runs the whole model. In a true shape most tensors have many elements, whose errors are not small by luck; a small model has
tensors of few, such as the gradient of the head's bias, and runs in milliseconds."""

DROWNED = 0.1
"""The share of outputs that may prove nothing: late gradients of queries and keys, which are small differences."""

FLOAT64 = 1e-9
"""Relative; the two float64 computations of a block differ by 1e-13, and one that rounds to float32 anywhere by 1e-8 at least."""


def whole_model_follows_the_reference(attack: Attack, case: Case) -> list[Comparison]:
    """Every output against the reference, with plain base weights and with NF4, up to the first that is outside."""
    found = []
    for whole in _chosen(attack, case):
        with attack.watch.on("reference"):
            known = of_the_reference(whole, attack.dtype)
        found += _judged(attack, case, known)
    return found


def whole_model_follows_float64(attack: Attack, case: Case) -> list[Comparison]:
    """Every output against the subject's own float64 and its own noise, both held to the reference's on one block of the true size.

    Of a small model the float64 of all layers is held to the reference's, and the noise is the reference's.
    """
    found = []
    for whole in _chosen(attack, case):
        held = _held(attack, case, whole)
        found += held
        if all(each.held for each in held):
            found += _judged(attack, case, _oracle(attack, case, whole) if _true_size(attack) else of_the_reference(whole, attack.dtype))
    return found


def _held(attack: Attack, case: Case, whole: WholeModel) -> list[Comparison]:
    """What the subject's answer will be compared with, held to the reference, up to the first that is outside."""
    if not _true_size(attack):
        return _float64_held(attack, case, whole)
    block = replace(whole, layers=1)
    found = _float64_held(attack, case, block)
    return found + _noise_held(attack, case, block) if all(each.held for each in found) else found


def _true_size(attack: Attack) -> bool:
    return in_true_shape(attack.subject.device)


def _chosen(attack: Attack, case: Case) -> list[WholeModel]:
    """The claim's model, plain and with NF4."""
    whole = chosen(attack.claim, case.seed, attack.subject.device)
    return [replace(whole, nf4=nf4) for nf4 in (False, True)]


def _asked(attack: Attack, case: Case, whole: WholeModel, dtype: str, **rounding: Any) -> dict[str, Array]:
    """The subject's outputs; for float64, and under rounding, by torch, which alone has both."""
    exact = {"path": "torch"} if dtype == "float64" or rounding else {}
    return attack.answer(case, scalars={**whole.scalars, "dtype": dtype, **rounding, **exact})


def _oracle(attack: Attack, case: Case, whole: WholeModel) -> WholeModelReference:
    """The oracle of a true size by the subject alone, kept for the other claims: mutants are tried on small ones, which need none."""
    key = (whole, attack.dtype, attack.subject.device)
    if key in _kept:
        return _kept[key]

    def rounded(replay: int | None) -> dict[str, Array]:
        return _asked(attack, case, whole, "float32", rounded=attack.dtype, replay=replay)

    whole.parameters().make(codes=False)
    known = WholeModelReference(whole, attack.dtype, _asked(attack, case, whole, "float64"), rounded)
    _kept[key] = known
    return known


_kept: dict[tuple[WholeModel, str, str], WholeModelReference] = {}


def _float64_held(attack: Attack, case: Case, whole: WholeModel) -> list[Comparison]:
    """The subject's float64 against the reference's, up to the first output that is outside."""
    with attack.watch.on("reference"):
        expected = of_the_reference(whole, attack.dtype).expected
    answer, odd = _ordered(expected, whole, _asked(attack, case, whole, "float64"))
    if odd:
        return odd
    found = []
    for name, value in expected.items():
        limit = Errors.flat(FLOAT64 * float(np.abs(value).max()))
        found.append(compare(f"float64-{_label(whole)} {name}", value, answer[name], limit, UNIT_ROUNDOFF["float64"]))
    return _up_to_the_first(found)


def _noise_held(attack: Attack, case: Case, whole: WholeModel) -> list[Comparison]:
    """The subject's rounded runs against the reference, up to the first output that is outside.

    Rounded to nearest it is an answer in this dtype, and is held as one. A replay may also err by the noise that is put into it, which is
    that of the reference's replays: one floor more, by the triangle inequality. Over few elements a floor is small by luck now and then:
    those get one floor more when rounded to nearest, and their replays tell nothing.
    """
    known = of_the_reference(whole, attack.dtype)
    with attack.watch.on("noise"):
        floors = known.floors(_thorough_replays(attack))
    found: list[Comparison] = []
    for replay in (None, *range(REPLAYS)):
        answer, odd = _ordered(known.expected, whole, _asked(attack, case, whole, "float32", rounded=attack.dtype, replay=replay))
        if odd:
            return found + odd
        for name, value in known.expected.items():
            few = value.size <= FEW_ELEMENTS
            if replay is None or not few:
                limit = floors[name].times(attack.factors().plus(Errors.flat(0.0 if replay is None and not few else 1.0)))
                found.append(compare(f"rounded-{_label(whole)} {name}", value, answer[name], limit, UNIT_ROUNDOFF["float32"]))
    return _up_to_the_first(found)


def _thorough_replays(attack: Attack) -> int:
    return THOROUGH_REPLAYS if _true_size(attack) else THOROUGH_REPLAYS_OF_SMALL


def _judged(attack: Attack, case: Case, known: WholeModelReference) -> list[Comparison]:
    """The outputs against the oracle's, up to the first that is outside; one whose noise drowns it proves nothing of a whole model."""

    def floors() -> dict[str, Errors]:
        with attack.watch.on("noise"):
            return known.floors(_thorough_replays(attack) if attack.thorough else REPLAYS)

    answer, odd = _ordered(known.expected, known.whole, _asked(attack, case, known.whole, attack.dtype))
    if odd:
        return odd
    found = attack.judge(known.expected, answer, floors, dtypes(known.expected, attack.dtype))
    drowned = sum(each.rejected for each in found) / len(found)
    found = [*_up_to_the_first(found), value_at_most("share of outputs that noise drowns", drowned, DROWNED)]
    return [replace(each, tensor=f"{_label(known.whole)} {each.tensor}") for each in found]


def _label(whole: WholeModel) -> str:
    return "NF4" if whole.nf4 else "plain"


def _ordered(expected: Arrays, whole: WholeModel, answer: Arrays) -> tuple[dict[str, Array], list[Comparison]]:
    """The answer in the order of the computation; or what is odd about its names and shapes."""
    odd = [broken(name, "missing from the answer") for name in expected if name not in answer]
    odd += [broken(name, "not asked for: an extra result") for name in answer if name not in expected]
    states = {name: value.shape for name, value in answer.items() if name.startswith("hidden/")}
    shape = (whole.batch, whole.seq, whole.hidden)
    odd += [broken(name, "shape", str(shape), str(given)) for name, given in states.items() if given != shape]
    return ({}, odd) if odd else (in_order(whole, answer), [])


def _up_to_the_first(found: list[Comparison]) -> list[Comparison]:
    """What comes after the first failure fails because of it."""
    first = next((index for index, each in enumerate(found) if not each.held), len(found))
    return found[: first + 1]
