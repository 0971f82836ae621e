"""Linear layer: y = x Wᵀ + b.

Derivation: y_o = Σ_i x_i W_oi + b_o, so dx = dy W, dW = Σ_rows dyᵀ x, db = Σ_rows dy.
"""

from collections.abc import Collection

from blackswan.reference.rows import outer, over_rows
from blackswan.reference.table import Array


def forward(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [..., in], weight [out, in], bias [out] → [..., out]."""
    y: Array = x @ weight.T
    return y if bias is None else y + bias


def backward(
    dy: Array, x: Array, weight: Array, bias: Array | None = None, needs: Collection[str] = ("x", "weight", "bias")
) -> dict[str, Array]:
    """Gradients of those of x, weight and bias that are in `needs`; dy [..., out]."""
    gradients = {}
    if "x" in needs:
        gradients["x"] = dy @ weight  # [..., in]
    if "weight" in needs:
        gradients["weight"] = outer(dy, x)  # [out, in]
    if "bias" in needs and bias is not None:
        gradients["bias"] = over_rows(dy)  # [out]
    return gradients
