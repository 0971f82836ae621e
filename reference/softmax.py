"""Softmax over the last axis: p = exp(x − max x) / Σ exp(x − max x).

Subtracting the maximum changes nothing in exact arithmetic and keeps every exponential in (0, 1] (Higham, Accuracy and Stability, 2nd ed.,
§1; Blanchard, Higham & Higham 2021).

Derivation: ∂p_i/∂x_j = p_i (δ_ij − p_j), so dx_j = p_j (dp_j − Σ_i dp_i p_i).
"""

import numpy as np

from blackswan.reference.table import Array


def forward(x: Array) -> Array:
    """x [..., classes] → probabilities [..., classes]."""
    shifted = x - x.max(axis=-1, keepdims=True)  # [..., classes]
    exponential = np.exp(shifted)  # [..., classes]
    y: Array = exponential / exponential.sum(axis=-1, keepdims=True)
    return y


def backward(dy: Array, x: Array) -> dict[str, Array]:
    """Gradient of x; dy [..., classes]."""
    return {"x": backward_from_probabilities(dy, forward(x))}


def backward_from_probabilities(dp: Array, p: Array) -> Array:
    """Gradient of the scores, from the probabilities p [..., classes] and their cotangent."""
    expected = (dp * p).sum(axis=-1, keepdims=True)  # [..., 1]
    dx: Array = p * (dp - expected)
    return dx
