"""SwiGLU: y = gate · σ(gate) · up (Shazeer 2020, arXiv:2002.05202, eq. 6).

Derivation: with σ' = σ (1 − σ), d(g σ(g))/dg = σ (1 + g (1 − σ)); 1 − σ(g) is σ(−g), which does not cancel.
"""

from reference.sigmoid import sigmoid, sigmoid_and_complement
from reference.table import Array


def forward(gate: Array, up: Array) -> Array:
    """gate and up [..., intermediate] → [..., intermediate]."""
    return gate * sigmoid(gate) * up


def backward(dy: Array, gate: Array, up: Array) -> dict[str, Array]:
    """Gradients of gate and up; dy [..., intermediate]."""
    opening, slope = sigmoid_and_complement(gate)
    slope *= gate  # in place: large temporaries cost more than the arithmetic
    slope += 1.0
    slope *= opening
    return {"gate": dy * up * slope, "up": dy * gate * opening}
