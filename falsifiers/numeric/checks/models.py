"""Checks on whole models and training: ablation, gradient flow, accumulation, frozen weights, logits of a trained checkpoint."""

import fnmatch
from dataclasses import replace

import numpy as np

from blackswan.falsifiers.numeric.attack import SIGNAL_SHARE, Attack, rounded_gradients, rounded_outputs
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.relations import related
from blackswan.falsifiers.numeric.comparison import (
    METRICS,
    Comparison,
    Errors,
    broken,
    compare_exactly,
    rejected,
    same_structure,
    value_at_least,
    value_at_most,
    value_within_factor,
)
from blackswan.falsifiers.numeric.precision import STORAGE
from blackswan.falsifiers.numeric.sign_ambiguity import sign_ambiguity
from blackswan.reference.classifier import trainable_names
from blackswan.reference.table import Array, Arrays

NOISE_OF_A_MOVE = 0.25
"""A move whose noise floor is a larger share of it says nothing: an error of twice the floor would halve it."""


def ablation_shows(attack: Attack, case: Case) -> list[Comparison]:
    """The output moves by at least three tolerances in some measure, wherever the reference's moves by six in it."""
    inputs, scalars = _zeroed(attack, case), dict(attack.claim.arguments.get("scalars", {}))
    expected, ablated = attack.expect(case), attack.expect(case, inputs=inputs, scalars=scalars)
    actual, without = attack.answer(case), attack.answer(case, inputs=inputs, scalars=scalars)

    floors = attack.floor(case, rounded_outputs(case), expected)
    found = []
    for name, floor in floors.items():
        limit = floor.times(attack.factors())
        wanted = Errors.of(ablated[name] - expected[name])
        moved = Errors.of(np.asarray(without[name], np.float64) - np.asarray(actual[name], np.float64))
        shares = [getattr(moved, m) / max(getattr(limit, m), 1e-300) for m in METRICS if getattr(wanted, m) >= 6 * getattr(limit, m)]
        if shares:
            found.append(value_at_least(f"{name}: change / tolerance", max(shares), 3.0))
    return found


def _zeroed(attack: Attack, case: Case) -> dict[str, Array]:
    patterns = attack.claim.arguments.get("zero", [])
    return {
        name: np.zeros_like(value)
        for name, value in case.inputs.items()
        if any(fnmatch.fnmatchcase(name.removeprefix("parameters/"), str(pattern)) for pattern in patterns)
    }


def both_factors_receive_gradients(attack: Attack, case: Case) -> list[Comparison]:
    """At B = 0 every B has a gradient where the reference has one and every A has none; with the case's own B both have.

    A gradient that honest arithmetic drowns in noise proves nothing.
    """
    wrt = [f"parameters/{name}" for name in trainable_names(case.scalars) if "lora_" in name]
    zero_b = {name: np.zeros_like(case.inputs[name]) for name in wrt if name.endswith("lora_B.weight")}
    found = []
    for label, changes in (("B = 0", zero_b), ("B ≠ 0", {})):
        here = replace(case, inputs={**case.inputs, **changes})
        expected, actual = attack.expect_gradients(here, wrt), attack.answer_gradients(here, wrt)
        floors = attack.floor(here, rounded_gradients(case, wrt), expected)
        found += [_flows(f"{name} at {label}", expected[name], actual[name], floors[name]) for name in wrt]
    return found


def _flows(name: str, expected: Array, actual: Array, floor: Errors) -> Comparison:
    wanted, got = float(np.linalg.norm(expected)), float(np.linalg.norm(np.asarray(actual, np.float64)))
    if wanted == 0.0 and "lora_A" in name and name.endswith("B = 0"):
        return compare_exactly(name, np.zeros_like(expected), actual)
    if wanted == 0.0 or floor.rms > SIGNAL_SHARE * Errors.of(expected).rms:
        return rejected(name)
    return value_within_factor(f"norm of the gradient of {name} / reference's", got / wanted, 2.0)


def accumulation_changes_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Micro-batches of one and of `micro` against the whole batch at once."""
    whole = case.scalars["batch"]
    base = Case(case.operation, case.dtype, case.sizes, {**case.scalars, "micro": whole}, case.seed, case.flavour, case.inputs)
    first = attack.answer(base)
    found = []
    for micro in sorted({1, case.scalars["micro"]}):
        if micro < whole:
            found += related(attack, base, first, attack.answer(base, scalars={"micro": micro}), dict)
    return found


def every_trainable_tensor_moves(attack: Attack, case: Case) -> list[Comparison]:
    """The norm of θ' − θ of each trainable tensor against the reference's.

    Adam moves a tensor whose gradient is noise by the learning rate all the same, in directions that prove nothing; and where it was noise
    at one of the steps, that one goes either way, of which the moment says nothing that later gradients made. No further than Adam's steps
    reach it may move even so.
    """
    expected, answer = attack.expect(case), attack.answer(case)
    wanted, given = _trainable(expected), _trainable(answer)
    unlike = same_structure(wanted, given, attack.dtypes(wanted))
    if unlike:
        return unlike

    few, reach = attack.floor(case, rounded_outputs(case), expected), attack.reach(case)

    def judged() -> list[Comparison]:
        noise = attack.floor(case, rounded_outputs(case), expected) if attack.thorough else few
        left_open, found = sign_ambiguity(attack.signature, expected, noise), []
        for name in trainable_names(case.scalars):
            key, moment, start = f"trainable/{name}", f"exp_avg/{name}", case.inputs[f"parameters/{name}"]
            move, sure = expected[key] - start, ~left_open[key]
            drowned = few[moment].rms > SIGNAL_SHARE * Errors.of(expected[moment]).rms
            if drowned or noise[key].rms > NOISE_OF_A_MOVE * Errors.of(move[sure]).rms or not move[sure].any():
                sure = np.zeros_like(sure)
            found.append(_moves(name, given[key], start, move, sure, reach))
        return found

    return attack.judge_with_retry(judged)


def _trainable(outputs: Arrays) -> dict[str, Array]:
    return {name: value for name, value in outputs.items() if name.startswith("trainable/")}


def _moves(name: str, answer: Array, start: Array, move: Array, sure: Array, reach: float) -> Comparison:
    """The norms of two moves where they are sure; elsewhere no element may have moved beyond reach."""
    moved = np.asarray(answer, np.float64) - start
    furthest = float(np.abs(moved[~sure]).max(initial=0.0))
    if not furthest <= reach:
        return value_at_most(f"furthest move in {name}, where noise decides which way", furthest, reach)
    if not sure.any():
        return rejected(f"trainable/{name}")
    return value_within_factor(f"move of {name} / reference's", float(np.linalg.norm(moved[sure]) / np.linalg.norm(move[sure])), 2.0)


def base_weights_unchanged(attack: Attack, case: Case) -> list[Comparison]:
    """`frozen/…` of the outputs against the parameters that went in."""
    answer = attack.answer(case)
    trainable = set(trainable_names(case.scalars))
    found = []
    for key, value in case.inputs.items():
        name = key.removeprefix("parameters/")
        if name == key or name in trainable:
            continue
        if f"frozen/{name}" not in answer:
            found.append(broken(name, "missing from the answer's frozen parameters"))
            continue
        found.append(compare_exactly(name, value.astype(STORAGE[attack.dtype]), answer[f"frozen/{name}"]))
    return found


def logits_are_not_flat(attack: Attack, case: Case) -> list[Comparison]:
    """Over the vocabulary, at every real token: deviation, and (peak − mean) / deviation."""
    logits = np.asarray(attack.answer(case)["logits"], np.float64)[case.inputs["mask"]]
    arguments = attack.claim.arguments
    deviation = logits.std(axis=-1)
    peak = (logits.max(axis=-1) - logits.mean(axis=-1)) / np.where(deviation > 0, deviation, 1.0)
    low, high = float(arguments["deviation"]), float(arguments["peak"])
    return [
        value_at_least("least deviation of the logits", float(deviation.min()), low),
        value_at_least("least peak over deviation", float(peak.min()), high),
    ]
