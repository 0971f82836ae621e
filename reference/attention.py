"""Grouped-query causal attention (Vaswani et al. 2017, §3.2.1; Ainslie et al. 2023, arXiv:2305.13245).

    scores = q kᵀ / sqrt(head_dim),   p = softmax(scores over the keys j ≤ i with mask[j]),   y = p v.

Query head h reads key head h // groups. A query that sees no key (left padding) gives zero, and has zero gradient.

Derivation: dv = pᵀ dy, dp = dy vᵀ, dscores = p (dp − Σ_j dp_j p_j), dq = dscores k / sqrt(head_dim), dk = dscoresᵀ q / sqrt(head_dim); dk
and dv are summed over the query heads of a group. The groups are stacked along the query axis, so that these sums are part of the products.

The sum is also dy · y, since Σ_j p_j (dy · v_j) = dy · Σ_j p_j v_j (Dao 2023, arXiv:2307.08691, §3.1). Implementations read y as the
forward pass stored it, so that its rounding enters their gradient; given that y, so does this one.

A block of queries at a time meets the keys up to its last one: what no query of it may see is never scored.
"""

import math
from collections.abc import Sequence

import numpy as np

from blackswan.reference.table import Array

QUERIES = 64
"""Of a block, for each head."""


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


def _blocks(mask: Array) -> list[tuple[slice, Array]]:
    """Blocks of queries, and which of the keys up to the block's last each of them sees: [batch, block, keys]."""
    starts = range(0, mask.shape[1], QUERIES)
    blocks = [slice(start, min(start + QUERIES, mask.shape[1])) for start in starts]
    causal = (np.tri(block.stop - block.start, block.stop, block.start, dtype=bool) for block in blocks)  # [block, keys]
    return [(block, before & mask[:, None, : block.stop]) for block, before in zip(blocks, causal, strict=True)]


def _joined(parts: Sequence[Array], like: Array) -> Array:
    """What blocks of queries give, [batch, block, …], one after the other; in their own dtype."""
    whole = np.empty_like(parts[0] if parts else like, shape=like.shape)
    start = 0
    for part in parts:
        whole[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    return whole


def _probabilities(queries: Array, keys: Array, visible: Array) -> Array:
    """Masked softmax of the scaled scores; a row that sees no key is zero.

    queries [batch, kv_heads, groups·block, head_dim], keys [batch, kv_heads, keys, head_dim], visible [batch, block, keys]
    → [batch, kv_heads, groups·block, keys].
    """
    batch, kv_heads, rows, head_dim = queries.shape
    block, seen = visible.shape[1:]
    products = queries @ keys.swapaxes(-1, -2)  # [batch, kv_heads, groups·block, keys]
    scores = products.reshape(batch, kv_heads, rows // block, block, seen)
    scores /= math.sqrt(head_dim)
    hidden = np.logical_not(visible)[:, None, None]  # [batch, 1, 1, block, keys]
    sees_no_key = hidden.all(axis=-1, keepdims=True)
    np.copyto(scores, -math.inf, where=hidden)
    shift = scores.max(axis=-1, keepdims=True)
    np.copyto(shift, 0.0, where=sees_no_key)
    scores -= shift
    np.copyto(scores, 0.0, where=hidden)  # for the exponential of -inf takes NumPy three times as long
    np.exp(scores, out=scores)
    np.copyto(scores, 0.0, where=hidden)
    total = scores.sum(axis=-1, keepdims=True)
    np.copyto(total, 1.0, where=sees_no_key)
    scores /= total
    return scores.reshape(products.shape)


def forward(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """q [batch, seq, heads, head_dim], k and v [batch, seq, kv_heads, head_dim], mask [batch, seq] → as q."""
    keys, values, parts = _by_head(k), _by_head(v), []
    for block, visible in _blocks(mask):
        seen = slice(block.stop)
        probabilities = _probabilities(_stack_groups(q[:, block], k.shape[2]), keys[:, :, seen], visible)
        parts.append(_unstack_groups(probabilities @ values[:, :, seen], visible.shape[1]))
    return _joined(parts, q)


def backward(dy: Array, q: Array, k: Array, v: Array, mask: Array, y: Array | None = None) -> dict[str, Array]:
    """Gradients of q, k and v; dy as q. `y` is the result as the forward pass stored it, where it is given."""
    parts: list[Array] = []
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for block, visible in reversed(_blocks(mask)):
        seen = slice(block.stop)
        stored = None if y is None else y[:, block]
        dqueries, dkeys, dvalues = _of_block(dy[:, block], q[:, block], k[:, seen], v[:, seen], visible, stored)
        if not parts:  # the last block has met every key
            dk, dv = dkeys, dvalues
        else:
            dk[:, seen] += dkeys
            dv[:, seen] += dvalues
        parts.append(dqueries)
    return {"q": _joined(parts[::-1], q), "k": dk, "v": dv}


def _of_block(dy: Array, q: Array, k: Array, v: Array, visible: Array, y: Array | None) -> tuple[Array, Array, Array]:
    """What a block of queries adds to the gradients of q, k and v; k and v up to its last query."""
    kv_heads, block, head_dim = k.shape[2], q.shape[1], q.shape[3]
    queries, keys, values = _stack_groups(q, kv_heads), _by_head(k), _by_head(v)
    dout = _stack_groups(dy, kv_heads)  # [batch, kv_heads, groups·block, head_dim]
    probabilities = _probabilities(queries, keys, visible)  # [batch, kv_heads, groups·block, keys]
    dvalues = probabilities.swapaxes(-1, -2) @ dout  # [batch, kv_heads, keys, head_dim]
    dprobabilities = dout @ values.swapaxes(-1, -2)  # [batch, kv_heads, groups·block, keys]

    if y is None:  # the sum over keys: where one key has all the weight, its gradient is then exactly zero
        projection = (dprobabilities * probabilities).sum(axis=-1, keepdims=True)  # [batch, kv_heads, groups·block, 1]
    else:
        projection = (dout * _stack_groups(y, kv_heads)).sum(axis=-1, keepdims=True)
    dscores = dprobabilities
    dscores -= projection
    dscores *= probabilities
    dscores /= math.sqrt(head_dim)
    dqueries = dscores @ keys  # [batch, kv_heads, groups·block, head_dim]
    dkeys = dscores.swapaxes(-1, -2) @ queries  # [batch, kv_heads, keys, head_dim]
    return _unstack_groups(dqueries, block), _by_head(dkeys), _by_head(dvalues)
