"""Rotary position embedding and grouped-query attention."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from blackswan.impl.config import RopeScaling
from blackswan.impl.host import available_memory
from blackswan.impl.operations.precision import compute_dtype, widen
from blackswan.impl.validation import require_integers, require_shape

BYTES_A_SCORE, LITTLE = 8, 2**30
"""Bytes for each pair of tokens: the mask as truth values, three times, and as a number of the scores; and what is not worth a look."""


def rope(x: Tensor, positions: Tensor, theta: float, **scaling: Any) -> Tensor:
    """Rotates the pairs (i, i + d/2) of x [batch, seq, heads, d] by position · θ^(−2i/d) (Su et al. 2021).

    positions [batch, seq] are integers, a ValueError otherwise and for another shape; `scaling` has all fields of
    `impl.config.RopeScaling`, or none. Angles, cosines and sines are float64 and rounded once, because float32 angles lose whole digits
    at positions in the thousands.
    """
    require_integers("positions", positions)
    require_shape("positions", positions, x.shape[:2])
    half = x.shape[-1] // 2
    angle = positions[..., None].to(torch.float64) * frequencies(half, theta, RopeScaling(**scaling) if scaling else None, x.device)
    table_dtype = compute_dtype(x.dtype)
    cos, sin = (table[:, :, None, :].to(table_dtype) for table in (angle.cos(), angle.sin()))
    first, second = torch.split(widen(x), half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def frequencies(half: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians a position of each pair, float64 [half]: θ^(−i/half), as Llama 3.1 scales them where there is a scaling."""
    plain = theta ** -(torch.arange(half, dtype=torch.float64, device=device) / half)
    if scaling is None:
        return plain
    turns, low, high = plain * (scaling.original_positions / (2.0 * math.pi)), scaling.low_freq_factor, scaling.high_freq_factor
    kept = (turns - low) / (high - low)
    mixed = (1.0 - kept) * (plain / scaling.factor) + kept * plain
    return torch.where(turns < low, plain / scaling.factor, torch.where(turns > high, plain, mixed))


_unfused, _inside, _lock = ExitStack(), [0], Lock()
"""Torch's choice before the first thread came in, how many threads are inside, and who may change either."""


@contextmanager
def _exact_products(q: Tensor) -> Iterator[None]:
    """In float32 on CUDA the unfused backend: with the default one small query gradients were 36 noise floors off on an H200.

    Torch's choice is one for the whole process: where blocks of several threads overlap it comes back when the last of them ends.
    """
    if not (q.is_cuda and q.dtype == torch.float32):
        yield
        return
    with _lock:
        if not _inside[0]:
            _unfused.enter_context(sdpa_kernel(SDPBackend.MATH))
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                _unfused.close()


def _require_room(q: Tensor) -> None:
    """MemoryError before the host's memory is taken for a mask and its scores [batch, seq, seq] that it cannot hold."""
    needed = q.shape[0] * q.shape[1] ** 2 * BYTES_A_SCORE
    if q.is_cpu and needed > LITTLE and needed > (free := available_memory()):
        raise MemoryError(
            f"{q.shape[0]} texts of {q.shape[1]} tokens need {needed / 2**30:.1f} GiB for attention, and {free / 2**30:.1f} GiB are "
            "available; choose a smaller max_seq_len or batch_size"
        )


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Causal grouped-query attention: q [batch, seq, heads, d], k and v [batch, seq, kv_heads, d], mask [batch, seq] true at real tokens.

    A query that sees no real key gives exactly zero, and no gradient. Such a row is let see itself and its result is then cleared:
    a row of masked scores only is 0/0 in some of the library's backends. Raises a ValueError for other shapes.
    """
    _require_room(q)
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads and {k.shape[2]} key heads: expected a multiple")
    for name, value, shape in (("k", k, (*q.shape[:2], k.shape[2], q.shape[3])), ("v", v, k.shape), ("mask", mask, q.shape[:2])):
        require_shape(name, value, shape)
    seq, groups = q.shape[1], q.shape[2] // k.shape[2]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
    allowed = causal & mask[:, None, :]
    blind = ~allowed.any(dim=-1)
    allowed = allowed | torch.diag_embed(blind)
    # Not enable_gqa: with a mask it leaves CUDA only the unfused backend.
    queries, keys, values = (
        q.transpose(1, 2),
        k.repeat_interleave(groups, dim=2).transpose(1, 2),
        v.repeat_interleave(groups, dim=2).transpose(1, 2),
    )
    with _exact_products(q):
        y = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed[:, None], scale=q.shape[-1] ** -0.5)
    return y.transpose(1, 2).masked_fill(blind[:, :, None, None], 0)
