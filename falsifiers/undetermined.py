"""Parameters that rounding alone moves one way or the other: nothing can be asked of where they are after a step of Adam."""

from collections.abc import Iterable, Mapping

import numpy as np

from contracts.model import Signature
from falsifiers.comparison import Errors
from reference.table import Array

NOISES = 4.0
"""A moment this many noise floors from zero, of which a claim's factor allows about two, has a sign and keeps half of its size."""


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


def undetermined(signature: Signature, expected: Mapping[str, Array], noise: Mapping[str, Errors]) -> dict[str, Array]:
    """Where tensors of `expected` cannot be compared: name → booleans of the tensor's shape.

    Adam divides the first moment by the root of the second (Kingma and Ba 2015, algorithm 1): its first step moves each number by the
    learning rate towards the sign of its gradient, however small that is. Where the gradient is noise so is the sign, and an honest answer
    errs by up to twice the rate. That says nothing about the elements around it, whose noise is a small share of the rate.
    """
    pairs = moved(signature, expected).items()
    return {name: np.abs(expected[moment]) < NOISES * noise[moment].max for name, moment in pairs}


def settled(expected: Array, actual: Array, left_open: Array) -> Array:
    """The expected tensor, with the answer's own numbers where they are left open; never its NaN or infinities."""
    return np.where(left_open & np.isfinite(actual), actual, expected)
