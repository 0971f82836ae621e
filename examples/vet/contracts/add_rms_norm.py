"""`add_rms_norm` in NumPy, forward and backward, and wrong versions of it that the claims must catch."""

from dataclasses import replace

import numpy as np

import blackswan
from blackswan.reference import Operation
from blackswan.reference.table import Array


def inverse_rms(total: Array, eps: float) -> Array:
    """[rows, hidden] → [rows, 1]."""
    inverse: Array = 1 / np.sqrt(np.mean(total * total, axis=-1, keepdims=True) + eps)
    return inverse


def backward(dy: Array, dtotal: Array, x: Array, residual: Array, weight: Array, eps: float) -> dict[str, Array]:
    """The gradients of x, residual and weight; dy and dtotal [rows, hidden]."""
    inverse = inverse_rms(x + residual, eps)
    normalised = (x + residual) * inverse
    projection = np.mean(dy * weight * normalised, axis=-1, keepdims=True)
    of_total = inverse * (dy * weight - normalised * projection) + dtotal
    return {"x": of_total, "residual": of_total, "weight": np.sum(dy * normalised, axis=0)}


@blackswan.reference_operation("add_rms_norm", backward, outputs=("y", "total"))
def forward(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """x, residual [rows, hidden], weight [hidden] → the norm of the sum and the sum, both [rows, hidden]."""
    total = x + residual
    return total * inverse_rms(total, eps) * weight, total


@blackswan.mutant("add_rms_norm")
def add_rms_norm_eps_outside_root(correct: Operation) -> Operation:
    """The sum over (its root mean square + ε)."""

    def wrong(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        total = x + residual
        return total / (1 / inverse_rms(total, 0.0) + eps) * weight, total

    return replace(correct, forward=wrong)


@blackswan.mutant("add_rms_norm")
def add_rms_norm_residual_dropped(correct: Operation) -> Operation:
    """The norm of x alone."""

    def wrong(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        return x * inverse_rms(x, eps) * weight, x + residual

    return replace(correct, forward=wrong)


@blackswan.mutant("add_rms_norm")
def add_rms_norm_total_not_added_to(correct: Operation) -> Operation:
    """The residual handed on without x."""

    def wrong(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        return forward(x, residual, weight, eps)[0], residual

    return replace(correct, forward=wrong)


@blackswan.mutant("add_rms_norm")
def add_rms_norm_gradient_of_total_dropped(correct: Operation) -> Operation:
    """The gradient that reaches the sum by the next residual is left out."""

    def wrong(dy: Array, dtotal: Array, x: Array, residual: Array, weight: Array, eps: float) -> dict[str, Array]:
        return backward(dy, 0 * dtotal, x, residual, weight, eps)

    return replace(correct, backward=wrong)
