"""Root mean square layer normalisation: y = x / sqrt(mean(x²) + ε) · w (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

Derivation: with r = (mean(x²) + ε)^(−1/2) and x̂ = r x, y = w x̂. Since ∂r/∂x_j = −r³ x_j / n,

    dx_j = Σ_i dx̂_i ∂(r x_i)/∂x_j = r dx̂_j − r³ x_j / n · Σ_i dx̂_i x_i = r (dx̂_j − x̂_j · mean(dx̂ x̂)),   dx̂ = dy w,
    dw = Σ_rows dy x̂.

`qk_norm` is the same formula over head_dim, with one weight for all heads (Qwen3).
"""

import numpy as np

from reference.rows import over_rows
from reference.table import Array


def _inverse_rms(x: Array, eps: float) -> Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)  # [..., 1]
    inverse: Array = 1.0 / np.sqrt(mean_square + eps)
    return inverse


def forward(x: Array, weight: Array, eps: float) -> Array:
    """x [..., hidden], weight [hidden] → [..., hidden]."""
    normalised = x * _inverse_rms(x, eps)  # [..., hidden]
    return normalised * weight


def backward(dy: Array, x: Array, weight: Array, eps: float) -> dict[str, Array]:
    """Gradients of x and weight; dy [..., hidden]."""
    inverse_rms = _inverse_rms(x, eps)  # [..., 1]
    normalised = x * inverse_rms  # [..., hidden]
    dnormalised = dy * weight  # [..., hidden]
    projection = np.mean(dnormalised * normalised, axis=-1, keepdims=True)  # [..., 1]
    return {"x": inverse_rms * (dnormalised - normalised * projection), "weight": over_rows(dy * normalised)}
