"""The logistic function σ(x) = 1 / (1 + e^(−x)).

No digit cancels in it, so it is as exact as its exponential, on both sides. Where the exponential overflows σ(x) is below the least normal
number, and comes out as zero.
"""

import numpy as np

from blackswan.reference.table import Array


def sigmoid(x: Array) -> Array:
    """σ(x), of x in any shape but []; a new array."""
    return _of_exponent(np.negative(x))


def complement(x: Array) -> Array:
    """1 − σ(x) as σ(−x), which does not cancel, of x in any shape but []; a new array."""
    return _of_exponent(x)


def _of_exponent(exponent: Array) -> Array:
    with np.errstate(over="ignore"):
        y: Array = np.exp(exponent)
    y += 1.0
    return np.divide(1.0, y, out=y)
