"""SwiGLU: y = gate · σ(gate) · up (Shazeer 2020, arXiv:2002.05202, eq. 6).

Derivation: with σ' = σ (1 − σ), d(g σ(g))/dg = σ (1 + g (1 − σ)); 1 − σ(g) is σ(−g), which does not cancel.
"""

from blackswan.reference.rows import by_rows
from blackswan.reference.sigmoid import complement, sigmoid
from blackswan.reference.table import Array


def forward(gate: Array, up: Array) -> Array:
    """gate and up [..., intermediate] → [..., intermediate]."""
    (y,) = by_rows(_product, gate, up)
    return y


def backward(dy: Array, gate: Array, up: Array) -> dict[str, Array]:
    """Gradients of gate and up; dy [..., intermediate]."""
    dgate, dup = by_rows(_gradients, dy, gate, up)
    return {"gate": dgate, "up": dup}


def _product(gate: Array, up: Array) -> tuple[Array]:
    y = sigmoid(gate)
    y *= gate
    y *= up
    return (y,)


def _gradients(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    opening, slope = sigmoid(gate), complement(gate)
    slope *= gate
    slope += 1.0
    slope *= opening  # d(g σ(g))/dg
    slope *= up
    slope *= dy
    opening *= gate
    opening *= dy
    return slope, opening
