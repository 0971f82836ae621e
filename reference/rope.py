"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, §3.2), in the half-split layout of Hugging Face models.

Coordinates i and i + d/2 form a pair, rotated by φ = position · θ^(−2i/d):

    y_i = x_i cos φ − x_{i+d/2} sin φ,   y_{i+d/2} = x_{i+d/2} cos φ + x_i sin φ.

Llama 3.1 divides the frequencies of long waves by a factor (transformers 5.23, rope_type llama3). A pair that turns n times in the
context of pre-training, n = positions / wavelength, keeps its frequency for n above `high_freq_factor`, has it divided by `factor` for n
below `low_freq_factor`, and a linear mixture of the two in n between. A factor of 1 changes nothing.

A rotation is orthogonal: its transpose, which carries the gradient back, is the rotation by −φ.
"""

from dataclasses import dataclass

import numpy as np

from blackswan.reference.table import Array


@dataclass(frozen=True)
class Scaling:
    """What Llama 3.1 divides frequencies by, the turns between which it mixes, and the positions of pre-training."""

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: float = 8192.0

    def scaled(self, frequency: Array) -> Array:
        """Radians a position, [half_dim] → [half_dim]."""
        if self.factor == 1.0:
            return frequency
        turns = self.original_positions * frequency / (2.0 * np.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return np.asarray((1.0 - kept) * frequency / self.factor + kept * frequency)


def _angles(x: Array, positions: Array, theta: float, scaling: Scaling) -> Array:
    head_dim = x.shape[-1]
    pair = np.arange(head_dim // 2).astype(x.dtype)  # [half_dim]
    frequency = scaling.scaled(theta ** (pair * (-2.0 / head_dim)))  # [half_dim]
    angle: Array = positions.astype(x.dtype)[..., None, None] * frequency  # [batch, seq, 1, half_dim]
    return angle


def _rotate(x: Array, angle: Array) -> Array:
    half = x.shape[-1] // 2
    cos, sin = np.cos(angle), np.sin(angle)  # [batch, seq, 1, half_dim]
    first, second = x[..., :half], x[..., half:]  # [batch, seq, heads, half_dim]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def forward(
    x: Array,
    positions: Array,
    theta: float,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_positions: float = 8192.0,
) -> Array:
    """x [batch, seq, heads, head_dim], positions [batch, seq] → the same shape as x; the last four are those of `Scaling`."""
    scaling = Scaling(factor, low_freq_factor, high_freq_factor, original_positions)
    return _rotate(x, _angles(x, positions, theta, scaling))


def backward(dy: Array, x: Array, positions: Array, theta: float, **scaling: float) -> dict[str, Array]:
    """Gradient of x; dy as x."""
    return {"x": _rotate(dy, -_angles(x, positions, theta, Scaling(**scaling)))}
