"""The logistic function σ(x) = 1 / (1 + e^(−x)), from exponentials that do not overflow.

Of a = e^min(x, 0) and b = e^−max(x, 0) one is 1 and the other e^(−|x|), so that σ(x) = a / (1 + a b) and σ(−x) = b / (1 + a b).
"""

import numpy as np

from reference.table import Array


def sigmoid(x: Array) -> Array:
    """σ(x), of x in any shape but []."""
    y = np.exp(np.minimum(x, 0.0))
    y /= 1.0 + np.exp(-np.abs(x))
    return y


def sigmoid_and_complement(x: Array) -> tuple[Array, Array]:
    """σ(x) and 1 − σ(x), the latter as σ(−x), which does not cancel; two new arrays."""
    positive, negative = np.minimum(x, 0.0), -np.maximum(x, 0.0)
    np.exp(positive, out=positive)
    np.exp(negative, out=negative)
    total = positive * negative
    total += 1.0
    positive /= total
    negative /= total
    return positive, negative
