"""Whole classifiers, layer by layer: hidden states, logits, loss and every gradient against float64."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from blackswan.falsifiers.numeric import whole_model
from blackswan.falsifiers.numeric.attack import FEW_ELEMENTS
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare, value_at_most
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.numeric.whole_model import (
    WholeModel,
    WholeModelReference,
    dtypes,
    in_order,
    in_true_shape,
    of_the_reference,
)
from blackswan.falsifiers.subjects.doors.models import Rounded
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array, Arrays

REPLAYS, THOROUGH_REPLAYS, THOROUGH_REPLAYS_OF_SMALL = 2, 4, 48
"""Each replay runs the whole model. In a true shape most tensors have many elements, whose errors are not small by luck; a small model has
tensors of few, such as the gradient of the head's bias, and runs in milliseconds."""

DROWNED = 0.1
"""The share of outputs that may prove nothing: late gradients of queries and keys, which are small differences."""

FLOAT64 = 1e-9
"""Relative; the two float64 computations of a block differ by 1e-13, and one that rounds to float32 anywhere by 1e-8 at least."""


def follows_the_reference(trial: Trial, *, model: str, layers: int | None = None) -> list[Comparison]:
    """Every output is the reference's within noise, with plain base weights and with NF4; the first that is outside ends the list.

    The claim's `model` is in its true shape on a GPU, and a small one of its family elsewhere; it is cut to `layers`.
    """
    return [each for whole in _chosen(trial, model, layers) for each in _judged(trial, _of_the_reference(trial, whole))]


def follows_float64(trial: Trial, *, model: str, layers: int | None = None) -> Iterator[Comparison]:
    """Every output against the subject's own float64 and its own noise, both held to the reference's on one block of the true size.

    Of a small model the float64 of all layers is held to the reference's, and the noise is the reference's.
    """
    for whole in _chosen(trial, model, layers):
        held = _held(trial, whole)
        yield from held
        if all(each.held for each in held):
            yield from _judged(trial, _oracle(trial, whole) if _judged_alone(trial) else _of_the_reference(trial, whole))


def _held(trial: Trial, whole: WholeModel) -> list[Comparison]:
    """Holds the expected answer to the reference, up to the first output that is outside."""
    if not _judged_alone(trial):
        return _float64_held(trial, whole)
    block = replace(whole, layers=1)
    found = _float64_held(trial, block)
    return found + _noise_held(trial, block) if all(each.held for each in found) else found


def _judged_alone(trial: Trial) -> bool:
    """Whether the model is too large for the reference, so that the subject's own float64 and noise judge it."""
    return in_true_shape(trial.subject.device)


def _chosen(trial: Trial, name: str, layers: int | None) -> list[WholeModel]:
    """The model of that name, plain and with NF4."""
    whole = whole_model.model(name, trial.seed, true_size=in_true_shape(trial.subject.device), layers=layers)
    return [replace(whole, nf4=nf4) for nf4 in (False, True)]


def _asked(trial: Trial, whole: WholeModel, dtype: str, rounded: Rounded | None = None) -> dict[str, Array]:
    """The subject's outputs by the names that the reference gives them."""
    with trial.attack.watch.on("subject"):
        answer = trial.models.outputs(whole, dtype, rounded)
    states = {f"hidden/{path}": value for path, value in answer.hidden.items()}
    slopes = {f"gradient/{name}": value for name, value in answer.gradients.items()}
    return {**states, "logits": answer.logits, "loss": answer.loss, **slopes}


def _of_the_reference(trial: Trial, whole: WholeModel) -> WholeModelReference[WholeModel]:
    with trial.attack.watch.on("reference"):
        return of_the_reference(whole, trial.dtype, trial.attack.declared)


def _oracle(trial: Trial, whole: WholeModel) -> WholeModelReference[WholeModel]:
    """The oracle of a true size by the subject alone, kept for the other claims: mutants are tried on small ones, which need none."""
    key = (whole, trial.dtype, trial.subject.device)
    if key not in _kept:
        whole.parameters().make(codes=False)
        float64 = _asked(trial, whole, "float64")
        _kept[key] = WholeModelReference(
            whole, trial.dtype, float64, lambda replay: _asked(trial, whole, "float32", Rounded(trial.dtype, replay))
        )
    return _kept[key]


_kept: dict[tuple[WholeModel, str, str], WholeModelReference[WholeModel]] = {}


def _float64_held(trial: Trial, whole: WholeModel) -> list[Comparison]:
    """The subject's float64 against the reference's, up to the first output that is outside."""
    expected = _of_the_reference(trial, whole).expected
    answer, odd = _ordered(expected, whole, _asked(trial, whole, "float64"))
    if odd:
        return odd
    found = []
    for name, value in expected.items():
        limit = Errors.flat(FLOAT64 * float(np.abs(value).max()))
        found.append(compare(f"float64-{_label(whole)} {name}", value, answer[name], limit, UNIT_ROUNDOFF["float64"]))
    return up_to_the_first(found)


def _noise_held(trial: Trial, whole: WholeModel) -> list[Comparison]:
    """The subject's rounded runs against the reference, up to the first output that is outside.

    Rounded to nearest it is an answer in this dtype, and is held as one. A replay may also err by the noise that is put into it, which is
    that of the reference's replays: one floor more, by the triangle inequality. Over few elements a floor is small by luck now and then:
    those get one floor more when rounded to nearest, and their replays tell nothing.
    """
    oracle = _of_the_reference(trial, whole)
    floors = _floors(trial, oracle, thorough=True)
    found: list[Comparison] = []
    for replay in (None, *range(REPLAYS)):
        answer, odd = _ordered(oracle.expected, whole, _asked(trial, whole, "float32", Rounded(trial.dtype, replay)))
        if odd:
            return found + odd
        for name, value in oracle.expected.items():
            few = value.size <= FEW_ELEMENTS
            if replay is None or not few:
                limit = floors[name].times(trial.attack.factors().plus(Errors.flat(0.0 if replay is None and not few else 1.0)))
                found.append(compare(f"rounded-{_label(whole)} {name}", value, answer[name], limit, UNIT_ROUNDOFF["float32"]))
    return up_to_the_first(found)


def _floors(trial: Trial, oracle: WholeModelReference[WholeModel], thorough: bool) -> dict[str, Errors]:
    replays = (THOROUGH_REPLAYS if _judged_alone(trial) else THOROUGH_REPLAYS_OF_SMALL) if thorough else REPLAYS
    with trial.attack.watch.on("noise"):
        return oracle.floors(replays)


def _judged(trial: Trial, oracle: WholeModelReference[WholeModel]) -> list[Comparison]:
    """The outputs against the oracle's, up to the first that is outside; one whose noise drowns it proves nothing of a whole model."""
    answer, odd = _ordered(oracle.expected, oracle.whole, _asked(trial, oracle.whole, trial.dtype))
    if odd:
        return odd
    attack = trial.attack
    held = dtypes(oracle.expected, trial.dtype, attack.declared)
    found = attack.judge(oracle.expected, answer, lambda: _floors(trial, oracle, attack.thorough), held)
    drowned = sum(each.rejected for each in found) / len(found)
    found = [*up_to_the_first(found), value_at_most("share of outputs that noise drowns", drowned, DROWNED)]
    return [replace(each, tensor=f"{_label(oracle.whole)} {each.tensor}") for each in found]


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


def up_to_the_first(found: list[Comparison]) -> list[Comparison]:
    """Leaves out what comes after the first failure, which fails because of it."""
    first = next((index for index, each in enumerate(found) if not each.held), len(found))
    return found[: first + 1]
