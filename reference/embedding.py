"""Token embedding: y[b, s] = weight[input_ids[b, s]].

Derivation of the gradient: a row of the weight is used once for every occurrence of its token, so its gradient is the sum of the cotangents
of those occurrences.
"""

import numpy as np

from blackswan.reference.table import Array


def forward(input_ids: Array, weight: Array) -> Array:
    """Rows of `weight` [vocab, hidden] for `input_ids` [batch, seq] → [batch, seq, hidden]; ValueError for an id outside the vocabulary."""
    vocab = weight.shape[0]
    outside = (input_ids < 0) | (input_ids >= vocab)
    if outside.any():
        where = tuple(int(i) for i in np.argwhere(outside)[0])
        raise ValueError(f"input_ids{list(where)} is {int(input_ids[where])}; expected 0 to {vocab - 1}")
    return weight[input_ids]


def backward(dy: Array, input_ids: Array, weight: Array) -> dict[str, Array]:
    """Gradient of `weight`; dy [batch, seq, hidden]."""
    dweight = np.zeros_like(weight)  # [vocab, hidden]
    np.add.at(dweight, input_ids, dy)
    return {"weight": dweight}
