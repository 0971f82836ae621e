"""Causal grouped-query attention within packed sequences after FlashAttention-2 (Dao 2023), for many short sequences.

The gradients of k and v are summed over the query heads of their group in registers, one program a key block, so nothing is expanded,
added up afterwards or left to the order of atomic additions: equal input gives equal bits.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blackswan.impl.kernels import interpreted
from blackswan.impl.kernels.launch import buffer, launch, require_contiguous_rows, require_same_shape, require_storage

WIDEST = 256
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Blocks(NamedTuple):
    """Tokens of a program's query and key tiles (powers of two from 16), its warps and loads in flight.

    `long_first` starts the programs with the most work first, of whatever sequence; else the programs of a sequence stay together.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    long_first: bool = False


FORWARD = {64: Blocks(64, 64, 4, 2, True), 128: Blocks(64, 32, 4, 3), 256: Blocks(64, 32, 4, 2)}
QUERY_GRADIENT = {64: Blocks(64, 64, 4, 2, True), 128: Blocks(64, 64, 4, 2), 256: Blocks(64, 32, 8, 1)}
KEY_GRADIENT = {64: Blocks(64, 64, 4, 3, True), 128: Blocks(32, 64, 4, 3, True), 256: Blocks(32, 32, 8, 1, True)}
"""By the power of two, from 64, that holds a head; for 64 and 128 the fastest on an H200 (benchmarks/attention.py)."""
FLOAT32 = Blocks(32, 32, 8, 1)
"""Products of float32 do not use the tensor cores, and their tiles take twice the memory."""

if interpreted():

    def _bound(value: tl.tensor) -> int:
        """A loop's bound as a number: with NumPy 2.4 the interpreter of Triton 3.6 cannot make one of a tensor."""
        return int(value.handle.data.item())

    def _dot(left: tl.tensor, right: tl.tensor, added: tl.tensor | None = None) -> tl.tensor:
        """The interpreter multiplies the bits of bfloat16 as integers; products of two are exact in float32."""
        return tl.dot(left.to(tl.float32), right.to(tl.float32), added, input_precision="ieee")
else:

    @triton.jit
    def _bound(value):
        return value

    @triton.jit
    def _dot(left, right, added=None):
        return tl.dot(left, right, added, input_precision="ieee")


@triton.jit
def _place(bounds, sequences, heads, blocks, LONG_FIRST: tl.constexpr, LAST_FIRST: tl.constexpr):
    """This program's head and block, and the first token and length of its sequence."""
    program = tl.program_id(0)
    head, rest = program % heads, program // heads
    if LONG_FIRST:
        sequence, block = rest % sequences, rest // sequences
    else:
        sequence, block = rest // blocks, rest % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    first = tl.load(bounds + sequence)
    return head.to(tl.int64), block, first.to(tl.int64), tl.load(bounds + sequence + 1) - first


@triton.jit
def _tile(base, row, rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Addresses [tile, BLOCK_D] and which of them lie in the sequence."""
    column = tl.arange(0, BLOCK_D)[None, :]
    there = row[:, None] < rows
    if D < BLOCK_D:
        there = there & (column < D)
    return base + row[:, None] * stride + column, there


@triton.jit
def _read(base, row, rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    at, there = _tile(base, row, rows, stride, D, BLOCK_D)
    # Zeros, not neighbours: what is hidden has weight zero, but zero times a neighbour's infinity is none.
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def _write(base, row, rows, stride, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    at, there = _tile(base, row, rows, stride, D, BLOCK_D)
    tl.store(at, value.to(base.dtype.element_ty), mask=there)


@triton.jit
def _attention(
    q, k, v, bounds, y, lse, sequences, heads, blocks, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, y_token, y_head, lse_head,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, LONG_FIRST: tl.constexpr,
):  # fmt: skip
    head, block, first, length = _place(bounds, sequences, heads, blocks, LONG_FIRST, True)
    if block * QUERIES >= length:
        return
    query = block * QUERIES + tl.arange(0, QUERIES)
    asked = _read(q + first * q_token + head * q_head, query, length, q_token, D, BLOCK_D)
    keys, values = k + first * k_token + head // GROUP * k_head, v + first * v_token + head // GROUP * v_head
    top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, BLOCK_D), dtype=tl.float32)
    for start in range(0, _bound(tl.minimum((block + 1) * QUERIES, length)), KEYS):
        key = start + tl.arange(0, KEYS)
        scores = _dot(asked, tl.trans(_read(keys, key, length, k_token, D, BLOCK_D)))
        scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
        power = tl.exp2(scores * scale - higher[:, None])
        shrunk = tl.exp2(top - higher)
        total = total * shrunk + tl.sum(power, axis=1)
        value = _read(values, key, length, v_token, D, BLOCK_D)
        mixed = _dot(power.to(value.dtype), value, mixed * shrunk[:, None])
        top = higher
    _write(y + first * y_token + head * y_head, query, length, y_token, mixed / total[:, None], D, BLOCK_D)
    tl.store(lse + head * lse_head + first + query, (top + tl.log2(total)) * LN_2, mask=query < length)


@triton.jit
def _query_gradient(
    dy, q, k, v, y, lse, bounds, dq, delta, sequences, heads, blocks, scale,
    dy_token, dy_head, q_token, q_head, k_token, k_head, v_token, v_head, y_token, y_head, dq_token, dq_head, lse_head, delta_head,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, LONG_FIRST: tl.constexpr,
):  # fmt: skip
    head, block, first, length = _place(bounds, sequences, heads, blocks, LONG_FIRST, True)
    if block * QUERIES >= length:
        return
    query = block * QUERIES + tl.arange(0, QUERIES)
    upstream = _read(dy + first * dy_token + head * dy_head, query, length, dy_token, D, BLOCK_D)
    result = _read(y + first * y_token + head * y_head, query, length, y_token, D, BLOCK_D)
    product = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), axis=1)
    tl.store(delta + head * delta_head + first + query, product, mask=query < length)
    asked = _read(q + first * q_token + head * q_head, query, length, q_token, D, BLOCK_D)
    sums = tl.load(lse + head * lse_head + first + query, mask=query < length, other=0.0) * LOG2_E
    keys, values = k + first * k_token + head // GROUP * k_head, v + first * v_token + head // GROUP * v_head
    gradient = tl.zeros((QUERIES, BLOCK_D), dtype=tl.float32)
    for start in range(0, _bound(tl.minimum((block + 1) * QUERIES, length)), KEYS):
        key = start + tl.arange(0, KEYS)
        held = _read(keys, key, length, k_token, D, BLOCK_D)
        value = _read(values, key, length, v_token, D, BLOCK_D)
        scores = tl.where(key[None, :] <= query[:, None], _dot(asked, tl.trans(held)), float("-inf"))
        power = tl.exp2(scores * (scale * LOG2_E) - sums[:, None])
        slope = power * (_dot(upstream, tl.trans(value)) - product[:, None])
        gradient = _dot(slope.to(held.dtype), held, gradient)
    _write(dq + first * dq_token + head * dq_head, query, length, dq_token, gradient * scale, D, BLOCK_D)


@triton.jit
def _key_gradient(
    dy, q, k, v, lse, delta, bounds, dk, dv, sequences, kv_heads, blocks, scale,
    dy_token, dy_head, q_token, q_head, k_token, k_head, v_token, v_head, dk_token, dk_head, dv_token, dv_head, lse_head, delta_head,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, LONG_FIRST: tl.constexpr,
):  # fmt: skip
    kv_head, block, first, length = _place(bounds, sequences, kv_heads, blocks, LONG_FIRST, False)
    if block * KEYS >= length:
        return
    key = block * KEYS + tl.arange(0, KEYS)
    held = _read(k + first * k_token + kv_head * k_head, key, length, k_token, D, BLOCK_D)
    value = _read(v + first * v_token + kv_head * v_head, key, length, v_token, D, BLOCK_D)
    key_gradient = tl.zeros((KEYS, BLOCK_D), dtype=tl.float32)
    value_gradient = tl.zeros((KEYS, BLOCK_D), dtype=tl.float32)
    nearest = block * KEYS // QUERIES
    seeing = tl.cdiv(length, QUERIES) - nearest
    # One loop over heads and query blocks: with short sequences, a loop a head would be over before its loads overlap.
    for step in range(0, _bound(GROUP * seeing)):
        head = kv_head * GROUP + step // seeing
        query = (nearest + step % seeing) * QUERIES + tl.arange(0, QUERIES)
        asked = _read(q + first * q_token + head * q_head, query, length, q_token, D, BLOCK_D)
        upstream = _read(dy + first * dy_token + head * dy_head, query, length, dy_token, D, BLOCK_D)
        sums = tl.load(lse + head * lse_head + first + query, mask=query < length, other=0.0) * LOG2_E
        product = tl.load(delta + head * delta_head + first + query, mask=query < length, other=0.0)
        # Keys by queries: both results are left factors of the products below as they are.
        scores = tl.where(key[:, None] <= query[None, :], _dot(held, tl.trans(asked)), float("-inf"))
        power = tl.exp2(scores * (scale * LOG2_E) - sums[None, :])
        value_gradient = _dot(power.to(upstream.dtype), upstream, value_gradient)
        slope = power * (_dot(value, tl.trans(upstream)) - product[None, :])
        key_gradient = _dot(slope.to(asked.dtype), asked, key_gradient)
    _write(dk + first * dk_token + kv_head * dk_head, key, length, dk_token, key_gradient * scale, D, BLOCK_D)
    _write(dv + first * dv_token + kv_head * dv_head, key, length, dv_token, value_gradient, D, BLOCK_D)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """y = softmax(scale · q kᵀ) v, each token seeing itself and those before it in its sequence, and the logarithms of the softmax's sums.

    q [tokens, heads, d], k and v [tokens, kv_heads, d], tokens and heads may be strided → (y [tokens, heads, d], lse float32
    [heads, tokens]). bounds int32 [sequences + 1] are the sequences' first tokens and the end of the last; sequences may be empty, none
    may be longer than `longest`, and tokens outside of them are not written. scale is positive, 1 / √d by default. Softmax in float32,
    weights rounded to the dtype of v before the product. Raises a ValueError for sizes, dtypes or a scale that do not fit.
    """
    scale = _check(q, k, v, bounds, longest, scale)
    tokens, heads, _ = q.shape
    out, lse = buffer("out", out, q.shape, q), buffer("lse", lse, (heads, tokens), q, torch.float32)
    blocks = blocks or _blocks(FORWARD, q)
    sequences, count = bounds.numel() - 1, triton.cdiv(longest, blocks.queries)
    if q.numel() and sequences * count:
        launch(
            _attention, (heads * sequences * count,),
            q, k, v, bounds, out, lse, sequences, heads, count, scale * LOG2_E.value,
            *_strides(q, k, v, out), lse.stride(0),
            *_constants(q, k, blocks), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return out, lse


def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    delta: Tensor | None = None,
    *,
    query_blocks: Blocks | None = None,
    key_blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attention_forward`, whose results are y and lse, for dy [tokens, heads, d].

    dq, dk and dv may be slices of one buffer, and none may share memory with an input. `delta` float32 [heads, tokens] is scratch: the
    rows' sums of dy · y. Errors as for `attention_forward`.
    """
    scale = _check(q, k, v, bounds, longest, scale)
    tokens, heads, _ = q.shape
    require_same_shape("dy", dy, "q", q)
    require_same_shape("y", y, "q", q)
    lse, delta = (buffer(name, given, (heads, tokens), q, torch.float32) for name, given in (("lse", lse), ("delta", delta)))
    dq, dk, dv = buffer("dq", dq, q.shape, q), buffer("dk", dk, k.shape, k), buffer("dv", dv, v.shape, v)
    query_gradient(dy, q, k, v, y, lse, bounds, longest, dq, delta, scale, blocks=query_blocks)
    key_gradient(dy, q, k, v, lse, delta, bounds, longest, dk, dv, scale, blocks=key_blocks)
    return dq, dk, dv


def query_gradient(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: int,
    dq: Tensor,
    delta: Tensor,
    scale: float | None = None,
    *,
    blocks: Blocks | None = None,
) -> None:
    """The first half of `attention_backward`, which checks the arguments: writes dq, and delta for the second half."""
    blocks = blocks or _blocks(QUERY_GRADIENT, q)
    sequences, heads, count = bounds.numel() - 1, q.shape[1], triton.cdiv(longest, blocks.queries)
    if q.numel() and sequences * count:
        launch(
            _query_gradient, (heads * sequences * count,),
            dy, q, k, v, y, lse, bounds, dq, delta, sequences, heads, count, _scale(q, scale),
            *_strides(dy, q, k, v, y, dq), lse.stride(0), delta.stride(0),
            *_constants(q, k, blocks), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


def key_gradient(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    bounds: Tensor,
    longest: int,
    dk: Tensor,
    dv: Tensor,
    scale: float | None = None,
    *,
    blocks: Blocks | None = None,
) -> None:
    """The second half of `attention_backward`: writes dk and dv."""
    blocks = blocks or _blocks(KEY_GRADIENT, q)
    sequences, heads, count = bounds.numel() - 1, k.shape[1], triton.cdiv(longest, blocks.keys)
    if q.numel() and sequences * count:
        launch(
            _key_gradient, (heads * sequences * count,),
            dy, q, k, v, lse, delta, bounds, dk, dv, sequences, heads, count, _scale(q, scale),
            *_strides(dy, q, k, v, dk, dv), lse.stride(0), delta.stride(0),
            *_constants(q, k, blocks), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[2] ** -0.5 if scale is None else scale


def _strides(*values: Tensor) -> tuple[int, ...]:
    """Elements from token to token and from head to head."""
    return tuple(stride for value in values for stride in value.stride()[:2])


def _blocks(table: dict[int, Blocks], q: Tensor) -> Blocks:
    if q.dtype == torch.float32:
        return FLOAT32
    return table[max(64, triton.next_power_of_2(q.shape[2]))]


def _constants(q: Tensor, k: Tensor, blocks: Blocks) -> tuple[int, ...]:
    """Query heads a group, a head's size and that of its tile, and those of the tokens' tiles."""
    head_dim = q.shape[2]
    # The tensor cores' products take 16 along every axis.
    return q.shape[1] // k.shape[1], head_dim, max(16, triton.next_power_of_2(head_dim)), blocks.queries, blocks.keys, blocks.long_first


def _check(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None) -> float:
    """The scale. Raises a ValueError for what does not fit."""
    require_storage("q", q.dtype)
    if q.dim() != 3 or k.dim() != 3 or k.shape[::2] != q.shape[::2] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}: expected [tokens, heads, d] and [tokens, kv_heads, d], with heads a "
            "multiple of kv_heads"
        )
    if not 0 < q.shape[2] <= WIDEST:
        raise ValueError(f"head_dim {q.shape[2]}: a head is held in registers, which takes 1 to {WIDEST}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: expected one dtype")
    require_contiguous_rows("q", q)
    require_contiguous_rows("k", k)
    require_same_shape("v", v, "k", k)
    if bounds.dim() != 1 or not bounds.numel() or bounds.dtype != torch.int32 or not bounds.is_contiguous():
        raise ValueError(f"bounds are {bounds.dtype} {list(bounds.shape)}: expected contiguous torch.int32 [sequences + 1]")
    if longest < 0:
        raise ValueError(f"longest is {longest}: expected the most tokens that a sequence may have")
    scale = _scale(q, scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}: expected a positive number")
    return scale
