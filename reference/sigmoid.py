"""The logistic function σ(x) = 1 / (1 + e^(−x)), from an exponential that does not overflow.

With b = e^(−|x|) it is 1 / (1 + b) where x ≥ 0 and b / (1 + b) elsewhere; σ(−x) is the other of the two.
"""

import numpy as np

from reference.table import Array


def sigmoid(x: Array) -> Array:
    """σ(x), of x in any shape but []."""
    b = _exponential(x)
    y: Array = np.maximum(b, x >= 0.0)  # b is at most 1
    b += 1.0
    y /= b
    return y


def sigmoid_and_complement(x: Array) -> tuple[Array, Array]:
    """σ(x) and 1 − σ(x), the latter as σ(−x), which does not cancel; two new arrays."""
    b = _exponential(x)
    opening, complement = np.maximum(b, x >= 0.0), np.maximum(b, x <= 0.0)
    b += 1.0
    opening /= b
    complement /= b
    return opening, complement


def _exponential(x: Array) -> Array:
    """e^(−|x|), a new array."""
    b: Array = np.abs(x)
    np.negative(b, out=b)
    np.exp(b, out=b)
    return b
