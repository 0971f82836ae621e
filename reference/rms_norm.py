"""Root mean square layer normalisation: y = x / sqrt(mean(x²) + ε) · w (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

Derivation: with r = (mean(x²) + ε)^(−1/2) and x̂ = r x, y = w x̂. Since ∂r/∂x_j = −r³ x_j / n,

    dx_j = Σ_i dx̂_i ∂(r x_i)/∂x_j = r dx̂_j − r³ x_j / n · Σ_i dx̂_i x_i = r (dx̂_j − x̂_j · mean(dx̂ x̂)),   dx̂ = dy w,
    dw = Σ_rows dy x̂.

`qk_norm` is the same formula over head_dim, with one weight for all heads (Qwen3).
"""

from collections.abc import Collection

import numpy as np

from blackswan.reference.rows import by_rows, over_rows
from blackswan.reference.table import Array


def _inverse_rms(x: Array, eps: float) -> Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)  # [..., 1]
    inverse: Array = 1.0 / np.sqrt(mean_square + eps)
    return inverse


def forward(x: Array, weight: Array, eps: float) -> Array:
    """x [..., hidden], weight [hidden] → [..., hidden]."""
    (y,) = by_rows(lambda x: (x * _inverse_rms(x, eps) * weight,), x)
    return y


def backward(dy: Array, x: Array, weight: Array, eps: float, needs: Collection[str] = ("x", "weight")) -> dict[str, Array]:
    """Gradients of those of x and weight that are in `needs`; dy [..., hidden]."""

    def of_x(dy: Array, x: Array) -> tuple[Array]:
        inverse_rms = _inverse_rms(x, eps)  # [rows, 1]
        normalised = x * inverse_rms  # [rows, hidden]
        dx = dy * weight  # [rows, hidden], the gradient of normalised
        projection = np.mean(dx * normalised, axis=-1, keepdims=True)  # [rows, 1]
        normalised *= projection
        dx -= normalised
        dx *= inverse_rms
        return (dx,)

    gradients = {}
    if "x" in needs:
        (gradients["x"],) = by_rows(of_x, dy, x)
    if "weight" in needs:
        gradients["weight"] = over_rows(dy * (x * _inverse_rms(x, eps)))
    return gradients
