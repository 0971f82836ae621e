"""Residual connection: y = x + branch; both gradients are the cotangent."""

from blackswan.reference.table import Array


def forward(x: Array, branch: Array) -> Array:
    """x [..., hidden] + branch [..., hidden]."""
    return x + branch


def backward(dy: Array, x: Array, branch: Array) -> dict[str, Array]:  # noqa: ARG001  the signature of every backward
    """Gradients of x and branch; dy [..., hidden]."""
    return {"x": dy, "branch": dy}
