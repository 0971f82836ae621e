"""Parameters that rounding alone moves one way or the other: after a step of Adam they are within its reach, and no more can be asked."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from blackswan.contracts.model import Signature
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.reference.table import Array

NOISES = 4.0
"""A moment this many noise floors from zero, of which a claim's factor allows about two, has a sign and keeps half of its size."""

LARGEST_MOVE = (1 - 0.9) / (1 - 0.999) ** 0.5
"""The most that Adam's first moment over the root of its second can be after the first step, at its betas (Kingma and Ba 2015, §2.1)."""
SLACK = 1.01
"""For the rounding of the parameter itself."""


def reach(signature: Signature, scalars: Mapping[str, Any]) -> float:
    """The distance of two answers that moved a parameter in opposite directions at every step; 0 where nothing is moved."""
    if not any(output.moved_by for output in signature.outputs.values()):
        return 0.0
    steps, rate = int(scalars["steps"]), float(scalars["learning_rate"])
    return SLACK * 2 * rate * (1 + (steps - 1) * LARGEST_MOVE)


def moved(signature: Signature, names: Iterable[str]) -> dict[str, str]:
    """The tensors among `names` that an optimiser moves by moments which are among them too: name → name of the first moment."""
    present = list(names)
    pairs = {
        name: f"{output.moved_by}/{name.removeprefix(f'{group}/')}"
        for group, output in signature.outputs.items()
        for name in present
        if output.moved_by and name.startswith(f"{group}/")
    }
    return {name: moment for name, moment in pairs.items() if moment in present}


def sign_ambiguity(signature: Signature, expected: Mapping[str, Array], noise: Mapping[str, Errors]) -> dict[str, Array]:
    """Marks the elements of `expected` that cannot be compared as others are: name → booleans of the tensor's shape.

    Adam divides the first moment by the root of the second (Kingma and Ba 2015, algorithm 1): its first step moves each number by the
    learning rate towards the sign of its gradient, however small that is. Where the gradient is noise so is the sign, and an honest answer
    errs by up to twice the rate. That says nothing about the elements around it, whose noise is a small share of the rate, nor about those
    whose moment is exactly zero, like the embedding of a token that does not occur: those are held to the noise of the replays.
    """
    pairs = moved(signature, expected).items()
    return {name: (expected[moment] != 0) & (np.abs(expected[moment]) < NOISES * noise[moment].max) for name, moment in pairs}


def mask_ambiguous(expected: Array, actual: Array, left_open: Array, reach: float) -> Array:
    """The expected tensor, with the answer's own numbers where they are left open and within reach."""
    with np.errstate(invalid="ignore"):
        within = np.abs(np.asarray(actual, np.float64) - expected) <= reach  # never of a NaN
    return np.where(left_open & within, actual, expected)
