"""Grouped-query causal attention (Vaswani et al. 2017, §3.2.1; Ainslie et al. 2023, arXiv:2305.13245).

    scores = q kᵀ / sqrt(head_dim),   p = softmax(scores over the keys j ≤ i with mask[j]),   y = p v.

Query head h reads key head h // groups. A query that sees no key (left padding) gives zero, and has zero gradient.

Derivation: dv = pᵀ dy, dp = dy vᵀ, dscores = p (dp − Σ_j dp_j p_j), dq = dscores k / sqrt(head_dim), dk = dscoresᵀ q / sqrt(head_dim); dk
and dv are summed over the query heads of a group. The groups are stacked along the query axis, so that these sums are part of the products.

The sum is also dy · y, since Σ_j p_j (dy · v_j) = dy · Σ_j p_j v_j (Dao 2023, arXiv:2307.08691, §3.1). Implementations read y as the
forward pass stored it, so that its rounding enters their gradient; given that y, so does this one.
"""

import math

import numpy as np

from reference.rows import by_rows
from reference.table import Array


def _stack_groups(q: Array, kv_heads: int) -> Array:
    """[batch, seq, heads, head_dim] → [batch, kv_heads, groups·seq, head_dim]."""
    batch, seq, heads, head_dim = q.shape
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    return grouped.reshape(batch, kv_heads, -1, head_dim)


def _unstack_groups(stacked: Array, seq: int) -> Array:
    """[batch, kv_heads, groups·seq, head_dim] → [batch, seq, heads, head_dim]."""
    batch, kv_heads, _, head_dim = stacked.shape
    grouped = stacked.reshape(batch, kv_heads, -1, seq, head_dim).transpose(0, 3, 1, 2, 4)
    return grouped.reshape(batch, seq, -1, head_dim)


def _by_head(x: Array) -> Array:
    """[batch, seq, kv_heads, head_dim] ↔ [batch, kv_heads, seq, head_dim]."""
    return x.transpose(0, 2, 1, 3)


def _probabilities(queries: Array, keys: Array, mask: Array) -> Array:
    """Masked softmax of the scaled scores [batch, kv_heads, groups·seq, seq]; a row that sees no key is zero."""
    batch, kv_heads, rows, head_dim = queries.shape
    seq = keys.shape[2]
    causal = np.tri(seq, dtype=bool)  # [query, key]
    visible = (causal & mask[:, None, :])[:, None, None]  # [batch, 1, 1, seq, seq]
    of_all_heads = np.broadcast_to(visible, (batch, kv_heads, rows // seq, seq, seq)).reshape(batch, kv_heads, rows, seq)
    products = queries @ keys.swapaxes(-1, -2)  # [batch, kv_heads, groups·seq, seq]
    (p,) = by_rows(lambda product, visible: (_masked_softmax(product / math.sqrt(head_dim), visible),), products, of_all_heads)
    return p


def _masked_softmax(scores: Array, visible: Array) -> Array:
    """Over the visible keys; scores and visible [rows, seq]."""
    sees_a_key = visible.any(axis=-1, keepdims=True)
    shift = np.where(sees_a_key, np.where(visible, scores, -math.inf).max(axis=-1, keepdims=True), 0.0)
    exponential = np.exp(np.where(visible, scores - shift, 0.0))  # not of -inf, which takes NumPy three times as long
    exponential *= visible
    total = np.where(sees_a_key, exponential.sum(axis=-1, keepdims=True), 1.0)
    p: Array = exponential / total
    return p


def forward(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """q [batch, seq, heads, head_dim], k and v [batch, seq, kv_heads, head_dim], mask [batch, seq] → as q."""
    probabilities = _probabilities(_stack_groups(q, k.shape[2]), _by_head(k), mask)
    return _unstack_groups(probabilities @ _by_head(v), q.shape[1])


def backward(dy: Array, q: Array, k: Array, v: Array, mask: Array, y: Array | None = None) -> dict[str, Array]:
    """Gradients of q, k and v; dy as q. `y` is the result as the forward pass stored it, where it is given."""
    kv_heads, seq, head_dim = k.shape[2], q.shape[1], q.shape[3]
    queries, keys, values = _stack_groups(q, kv_heads), _by_head(k), _by_head(v)
    dout = _stack_groups(dy, kv_heads)  # [batch, kv_heads, groups·seq, head_dim]
    probabilities = _probabilities(queries, keys, mask)  # [batch, kv_heads, groups·seq, seq]
    dvalues = probabilities.swapaxes(-1, -2) @ dout  # [batch, kv_heads, seq, head_dim]
    dprobabilities = dout @ values.swapaxes(-1, -2)  # [batch, kv_heads, groups·seq, seq]

    def of_scores(dp: Array, p: Array, projection: Array | None = None) -> tuple[Array]:
        # Without a stored y, the sum over keys: where one key has all the weight, its gradient is then exactly zero.
        projection = (dp * p).sum(axis=-1, keepdims=True) if projection is None else projection  # [rows, 1]
        return (p * (dp - projection) / math.sqrt(head_dim),)

    of_y = () if y is None else ((dout * _stack_groups(y, kv_heads)).sum(axis=-1, keepdims=True),)
    (dscores,) = by_rows(of_scores, dprobabilities, probabilities, *of_y)
    dqueries = dscores @ keys  # [batch, kv_heads, groups·seq, head_dim]
    dkeys = dscores.swapaxes(-1, -2) @ queries  # [batch, kv_heads, seq, head_dim]
    return {"q": _unstack_groups(dqueries, seq), "k": _by_head(dkeys), "v": _by_head(dvalues)}
