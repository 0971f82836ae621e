"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, §3.2), in the half-split layout of Hugging Face models.

Coordinates i and i + d/2 form a pair, rotated by φ = position · θ^(−2i/d):

    y_i = x_i cos φ − x_{i+d/2} sin φ,   y_{i+d/2} = x_{i+d/2} cos φ + x_i sin φ.

A rotation is orthogonal: its transpose, which carries the gradient back, is the rotation by −φ.
"""

import numpy as np

from blackswan.reference.table import Array


def _angles(x: Array, positions: Array, theta: float) -> Array:
    head_dim = x.shape[-1]
    pair = np.arange(head_dim // 2).astype(x.dtype)  # [half_dim]
    frequency = theta ** (pair * (-2.0 / head_dim))  # [half_dim]
    angle: Array = positions.astype(x.dtype)[..., None, None] * frequency  # [batch, seq, 1, half_dim]
    return angle


def _rotate(x: Array, angle: Array) -> Array:
    half = x.shape[-1] // 2
    cos, sin = np.cos(angle), np.sin(angle)  # [batch, seq, 1, half_dim]
    first, second = x[..., :half], x[..., half:]  # [batch, seq, heads, half_dim]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def forward(x: Array, positions: Array, theta: float) -> Array:
    """x [batch, seq, heads, head_dim], positions [batch, seq] → the same shape as x."""
    return _rotate(x, _angles(x, positions, theta))


def backward(dy: Array, x: Array, positions: Array, theta: float) -> dict[str, Array]:
    """Gradient of x; dy as x."""
    return {"x": _rotate(dy, -_angles(x, positions, theta))}
