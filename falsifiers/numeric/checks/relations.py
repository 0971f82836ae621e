"""Relations between two runs of the subject: determinism, batches, padding, causality, shifts.

The second run is held to the first within the noise floor of the case, so an error common to both does not show here: that is what parity
is for.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare_exactly
from blackswan.falsifiers.numeric.generators import generator_for
from blackswan.falsifiers.numeric.precision import STORAGE, round_to
from blackswan.reference.table import Array, Table

Arrays = Mapping[str, Array]
View = Callable[[Arrays], dict[str, Array]]
"""The part of the outputs that a relation speaks of."""

_PER_SAMPLE = ("input_ids", "mask", "labels", "logits", "targets")


def related(attack: Attack, case: Case, first: Arrays, second: Arrays, view: View, other: Case | None = None) -> list[Comparison]:
    """Compares two answers of the subject, both seen through `view`, within the sum of their noise floors.

    The second answer's floor is that of `other` where it is the answer to a case whose noise is of another size, else as the first's.
    """
    expected = view({name: np.asarray(value, np.float64) for name, value in attack.expect(case).items()})
    seen_first, seen_second = view(first), view(second)

    def rounded(inputs: Arrays, table: Table) -> dict[str, Array]:
        return view(reference.evaluate(case.operation, inputs, case.scalars, table))

    def floors() -> dict[str, Errors]:
        own = attack.floor(case, rounded, expected)
        added = own if other is None else attack.floor(other, rounded, expected)
        return {name: floor.plus(added[name]) for name, floor in own.items()}

    wanted = {name: np.asarray(value, np.float64) for name, value in seen_first.items()}
    dtypes = {name: value.dtype for name, value in seen_first.items()}
    return attack.judge(wanted, seen_second, floors, dtypes, attack.reach(case))


def twice_the_same(attack: Attack, case: Case) -> list[Comparison]:
    """The same answer twice; that the inputs are as they were holds for every answer."""
    first, second = attack.answer(case), attack.answer(case)
    if set(first) != set(second):
        return [broken("(names)", "the second run has other outputs", sorted(first), sorted(second))]
    return [compare_exactly(name, first[name], second[name]) for name in first]


def batch_equals_samples(attack: Attack, case: Case) -> list[Comparison]:
    """Row i of the batch's answer against sample i alone; losses against the samples' mean, by weight where that is declared."""
    whole = attack.answer(case)
    names = [name for name in _PER_SAMPLE if name in case.inputs]
    count = case.inputs[names[0]].shape[0]
    alone = [attack.answer(case, inputs={name: case.inputs[name][i : i + 1] for name in names}) for i in range(count)]
    by_weight = attack.follows("reduction", "weights") and "class_weights" in case.inputs
    weights = case.inputs["class_weights"][case.inputs["labels"]] if by_weight else None
    joined = {
        name: np.concatenate([part[name] for part in alone])
        if value.ndim
        else np.asarray(np.average([float(part[name]) for part in alone], weights=weights), value.dtype)
        for name, value in whole.items()
    }
    return related(attack, case, whole, joined, dict)


def padding_changes_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Three columns of padding on the left, then on the right, holding random tokens."""
    ids, mask = case.inputs["input_ids"], case.inputs["mask"]
    rng = generator_for(case.seed, "padding tokens")
    columns = rng.integers(0, case.scalars["vocab"], (ids.shape[0], 3))
    off = np.zeros(columns.shape, dtype=bool)
    plain = attack.answer(case)
    found = []
    for side, position in (("left", slice(3, None)), ("right", slice(None, -3))):
        order = (columns, ids) if side == "left" else (ids, columns)
        masks = (off, mask) if side == "left" else (mask, off)
        padded = attack.answer(case, inputs={"input_ids": np.concatenate(order, 1), "mask": np.concatenate(masks, 1)})
        second = {name: value[:, position] if value.ndim == 3 else value for name, value in padded.items()}
        found += related(attack, case, plain, second, dict)
    return found


def padding_content_changes_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Keys and values of padding replaced by values of a hundred."""
    padding = ~case.inputs["mask"][:, :, None, None]
    changed = {name: np.where(padding, 100.0, case.inputs[name]) for name in ("k", "v")}
    return related(attack, case, attack.answer(case), attack.answer(case, inputs=changed), dict)


def future_changes_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Everything from the middle of the sequence on replaced; compared before it."""
    cut = max(1, case.inputs["mask"].shape[1] // 2)
    rng = generator_for(case.seed, "another future")
    changed: dict[str, Array] = {}
    for name in ("q", "k", "v", "input_ids"):
        if name in case.inputs:
            value = case.inputs[name].copy()
            other = rng.integers(0, case.scalars["vocab"], value.shape) if name == "input_ids" else 3 * rng.standard_normal(value.shape)
            other = other if name == "input_ids" else round_to(other, attack.dtype)
            value[:, cut:] = other[:, cut:]
            changed[name] = value
    return related(
        attack,
        case,
        attack.answer(case),
        attack.answer(case, inputs=changed),
        lambda outputs: {name: value[:, :cut] for name, value in outputs.items()},
    )


def shift_changes_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Scores x against x + c, where x is what (x + c) − c leaves, so that the shift is exact in the dtype.

    exp(c) overflows, so that nothing gets through which does not subtract the maximum. Both answers carry the noise of their own scores.
    """
    name = "x" if "x" in case.inputs else "logits"
    shift = 128.0
    shifted = np.asarray(round_to(case.inputs[name] + shift, attack.dtype), np.float64)
    plain = np.asarray((shifted - shift).astype(STORAGE[attack.dtype]), np.float64)
    base = replace(case, inputs={**case.inputs, name: plain})
    other = replace(case, inputs={**case.inputs, name: shifted})
    return related(attack, base, attack.answer(base), attack.answer(other), dict, other)
