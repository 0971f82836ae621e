"""Pooling over the real tokens of each sample: their mean, the last one, or the first one, on whichever side the padding is.

Derivation: y is linear in x, so dx is dy times the weight that a token has in y.
"""

import numpy as np

from blackswan.reference.table import Array


def _weights(x: Array, mask: Array, mode: str) -> Array:
    """The weight of each token in its sample's vector, [batch, seq]."""
    empty = np.flatnonzero(~mask.any(axis=1))
    if empty.size:
        raise ValueError(f"sample {int(empty[0])} has no real token, so there is nothing to pool; its mask must be true somewhere")
    seq = mask.shape[1]
    tokens = np.arange(seq)[None, :]  # [1, seq]
    if mode == "mean":
        pooled = mask
    elif mode == "first":
        pooled = tokens == mask.argmax(axis=1)[:, None]
    elif mode == "last":
        pooled = tokens == seq - 1 - mask[:, ::-1].argmax(axis=1)[:, None]
    else:
        raise ValueError(f"pooling mode is {mode!r}; expected mean, last or first")
    weights: Array = pooled.astype(x.dtype) / pooled.sum(axis=1, keepdims=True).astype(x.dtype)
    return weights


def forward(x: Array, mask: Array, mode: str) -> Array:
    """x [batch, seq, hidden], mask [batch, seq] → [batch, hidden]; ValueError names a sample without real tokens."""
    weights = _weights(x, mask, mode)[:, :, None]  # [batch, seq, 1]
    # A padding row may hold anything, even NaN, and zero times NaN is NaN.
    y: Array = np.where(weights > 0, weights * x, 0.0).sum(axis=1)
    return y


def backward(dy: Array, x: Array, mask: Array, mode: str) -> dict[str, Array]:
    """Gradient of x; dy [batch, hidden]."""
    weights = _weights(x, mask, mode)[:, :, None]  # [batch, seq, 1]
    return {"x": weights * dy[:, None, :]}
