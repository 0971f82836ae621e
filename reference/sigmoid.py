"""The logistic function."""

import numpy as np

from reference.table import Array


def sigmoid(x: Array) -> Array:
    """σ(x) = 1 / (1 + e^(−x)), from e^(−|x|), which does not overflow."""
    decay = np.exp(-np.abs(x))
    y: Array = np.where(x >= 0, 1.0, decay) / (1.0 + decay)
    return y
