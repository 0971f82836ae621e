"""RMSNorm of each head (Qwen3) and rotary position embedding (Su et al. 2021) in one pass, and their gradient."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blackswan.impl.config import RopeScaling
from blackswan.impl.kernels.launch import buffer, launch, require_contiguous_rows, require_same_shape, require_storage
from blackswan.impl.operations.attention import frequencies
from blackswan.impl.tensors import kept_on_devices

TILE = 2048
FEWEST_HEADS = 8
A_WARP = 512
TABLE_BLOCK = 256


@triton.jit
def _rotation(position, turns):
    """Cosine and sine of position · turns quarter turns, in float32 from float64.

    The angle is reduced to −1/8 … 1/8 of a turn, where these Taylor series err by less than 2e-10; float32 angles would have lost
    whole digits at positions in the thousands.
    """
    quarter = position.to(tl.float64) * turns
    whole = tl.floor(quarter + 0.5)
    angle = (quarter - whole) * 1.5707963267948966
    square = angle * angle
    sine = 2.755731922398589e-06 - 2.505210838544172e-08 * square
    sine = square * sine - 1.984126984126984e-04
    sine = square * sine + 8.333333333333333e-03
    sine = square * sine - 1.6666666666666666e-01
    sine = angle + angle * (square * sine)
    cosine = 2.48015873015873e-05 - 2.755731922398589e-07 * square
    cosine = square * cosine - 1.388888888888889e-03
    cosine = square * cosine + 4.1666666666666664e-02
    cosine = square * cosine - 0.5
    cosine = square * cosine + 1.0
    quadrant = whole.to(tl.int64) & 3
    turned = (quadrant & 1) == 1
    cos = tl.where(turned, sine, cosine)
    sin = tl.where(turned, cosine, sine)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = tl.where(quadrant >= 2, -sin, sin)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _angles(positions, turns, table, token, column, there, HALF: tl.constexpr, TABLE: tl.constexpr):
    if TABLE:
        cos = tl.load(table + token * (2 * HALF) + column, mask=there, other=0.0)
        sin = tl.load(table + token * (2 * HALF) + HALF + column, mask=there, other=0.0)
    else:
        cos, sin = _rotation(tl.load(positions + token), tl.load(turns + column, mask=there, other=0.0))
    return cos, sin


@triton.jit
def _rope_table(positions, turns, table, count, HALF: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = index < count
    token, column = index // HALF, index % HALF
    cos, sin = _rotation(tl.load(positions + token, mask=there, other=0), tl.load(turns + column, mask=there, other=0.0))
    tl.store(table + token * (2 * HALF) + column, cos, mask=there)
    tl.store(table + token * (2 * HALF) + HALF + column, sin, mask=there)


@triton.jit
def _qk_norm_rope(
    x, positions, turns, table, weight, out, rstd, heads, x_token, x_head, out_token, out_head, weight_head, eps,
    NORM: tl.constexpr, TABLE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    there = (head[:, None] < heads) & (column[None, :] < HALF)
    source = x + token * x_token + head.to(tl.int64)[:, None] * x_head + column[None, :]
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.div_rn(tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1), 2.0 * HALF)
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        tl.store(rstd + token * heads + head, scale, mask=head < heads)
        # Rounded between the two, as separate operations do.
        kept = out.dtype.element_ty
        factors = weight + head[:, None] * weight_head + column[None, :]
        first = (first * scale[:, None] * tl.load(factors, mask=there, other=0.0).to(tl.float32)).to(kept).to(tl.float32)
        second = (second * scale[:, None] * tl.load(factors + HALF, mask=there, other=0.0).to(tl.float32)).to(kept).to(tl.float32)
    cos, sin = _angles(positions, turns, table, token, column, column < HALF, HALF, TABLE)
    cos, sin = cos[None, :], sin[None, :]
    target = out + token * out_token + head.to(tl.int64)[:, None] * out_head + column[None, :]
    tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=there)
    tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=there)


@triton.jit
def _qk_norm_rope_backward(
    dy, x, positions, turns, table, weight, rstd, out, heads, dy_token, dy_head, x_token, x_head, out_token, out_head,
    weight_head, eps,
    NORM: tl.constexpr, KEPT: tl.constexpr, TABLE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    there = (head[:, None] < heads) & (column[None, :] < HALF)
    source = dy + token * dy_token + head.to(tl.int64)[:, None] * dy_head + column[None, :]
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    cos, sin = _angles(positions, turns, table, token, column, column < HALF, HALF, TABLE)
    cos, sin = cos[None, :], sin[None, :]
    dfirst, dsecond = first * cos + second * sin, second * cos - first * sin
    if NORM:
        held = x + token * x_token + head.to(tl.int64)[:, None] * x_head + column[None, :]
        first = tl.load(held, mask=there, other=0.0).to(tl.float32)
        second = tl.load(held + HALF, mask=there, other=0.0).to(tl.float32)
        if KEPT:
            scale = tl.load(rstd + token * heads + head, mask=head < heads, other=0.0)[:, None]
        else:
            mean = tl.div_rn(tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1), 2.0 * HALF)
            scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
        first, second = first * scale, second * scale
        factors = weight + head[:, None] * weight_head + column[None, :]
        dfirst *= tl.load(factors, mask=there, other=0.0).to(tl.float32)
        dsecond *= tl.load(factors + HALF, mask=there, other=0.0).to(tl.float32)
        mean = tl.div_rn(tl.sum(dfirst * first, axis=1) + tl.sum(dsecond * second, axis=1), 2.0 * HALF)[:, None]
        dfirst, dsecond = (dfirst - first * mean) * scale, (dsecond - second * mean) * scale
    target = out + token * out_token + head.to(tl.int64)[:, None] * out_head + column[None, :]
    tl.store(target, dfirst.to(out.dtype.element_ty), mask=there)
    tl.store(target + HALF, dsecond.to(out.dtype.element_ty), mask=there)


def rope_table(positions: Tensor, theta: float, head_dim: int, out: Tensor | None = None, scaling: RopeScaling | None = None) -> Tensor:
    """Cosines and then sines of each token's angles, float32 [tokens, head_dim]: what layers that share positions can share.

    positions int64 [tokens]; each entry is within an ulp of the float64 value. Raises a ValueError for an odd head_dim.
    """
    half = _half(head_dim)
    _check_positions(positions, positions.numel(), positions)
    tokens = positions.shape[0]
    out = buffer("out", out, (tokens, head_dim), positions, torch.float32)
    if not out.is_contiguous():
        raise ValueError("out is not contiguous: expected a table of its own")
    if tokens:
        grid, turns = (triton.cdiv(tokens * half, TABLE_BLOCK),), _quarter_turns(half, theta, scaling, positions.device)
        launch(_rope_table, grid, positions, turns, out, tokens * half, half, TABLE_BLOCK)
    return out


def qk_norm_rope(
    x: Tensor,
    positions: Tensor,
    theta: float,
    weight: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    rstd: Tensor | None = None,
    table: Tensor | None = None,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [tokens, heads, head_dim], rotated by position, and before that normed by head where a weight is given.

    The weight is [head_dim] for all heads, or [heads, head_dim], one for each. Returns y and rstd float32 [tokens, heads].
    The norm is rounded to the dtype of x before the rotation. Tokens and heads may be strided (a slice of a fused buffer); `out` may be x
    itself. `table` is `rope_table(positions, theta, head_dim)` of that scaling, in the place of computing angles anew; rstd is None without
    a weight.
    Raises a ValueError for sizes or dtypes that do not fit.
    """
    _check(x, positions, weight, table)
    out = buffer("out", out, x.shape, x)
    if weight is not None:
        rstd = _rstd(rstd, x)
    tokens, heads, head_dim = x.shape
    half, block, tile, warps = _tile(heads, head_dim)
    if tokens and heads:
        launch(
            _qk_norm_rope, (tokens, triton.cdiv(heads, tile)),
            x, positions, _quarter_turns(half, theta, scaling, x.device), x if table is None else table, x if weight is None else weight,
            out, x if rstd is None else rstd, heads, *x.stride()[:2], *out.stride()[:2], _weight_stride(weight), eps,
            weight is not None, table is not None, half, block, tile, num_warps=warps,
        )  # fmt: skip
    return out, rstd if weight is not None else None


def qk_norm_rope_backward(
    dy: Tensor,
    x: Tensor | None,
    positions: Tensor,
    theta: float,
    weight: Tensor | None = None,
    eps: float = 0.0,
    rstd: Tensor | None = None,
    out: Tensor | None = None,
    table: Tensor | None = None,
    scaling: RopeScaling | None = None,
) -> Tensor:
    """dx of `qk_norm_rope` for a frozen weight: the inverse rotation, then the norm's gradient, in float32, rounded once.

    x is what went in, and is not needed without a weight; rstd is what came out, computed anew from x and eps where it is None. `out` may
    be dy or x itself. Errors as for `qk_norm_rope`.
    """
    _check(dy, positions, weight, table)
    if weight is not None:
        if x is None:
            raise ValueError("the norm's gradient needs x, the input of the forward pass")
        require_same_shape("x", x, "dy", dy)
        rstd = None if rstd is None else _rstd(rstd, dy)
    out, held = buffer("out", out, dy.shape, dy), dy if x is None else x
    tokens, heads, head_dim = dy.shape
    half, block, tile, warps = _tile(heads, head_dim)
    if tokens and heads:
        launch(
            _qk_norm_rope_backward, (tokens, triton.cdiv(heads, tile)),
            dy, held, positions, _quarter_turns(half, theta, scaling, dy.device), dy if table is None else table,
            dy if weight is None else weight, dy if rstd is None else rstd, out, heads,
            *dy.stride()[:2], *held.stride()[:2], *out.stride()[:2], _weight_stride(weight), eps,
            weight is not None, rstd is not None, table is not None, half, block, tile, num_warps=warps,
        )  # fmt: skip
    return out


@kept_on_devices
def _quarter_turns(half: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Quarter turns a position of each pair, float64 [half]."""
    return frequencies(half, theta, scaling, device) * (2.0 / math.pi)


def _tile(heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Half of a head, the block that holds it, heads a program (of the fewest that are none, the most) and its warps."""
    half = _half(head_dim)
    block = triton.next_power_of_2(half)
    most = min(triton.next_power_of_2(max(heads, 1)), max(1, TILE // block))
    sizes = [size for size in (most, most // 2, most // 4) if size >= min(most, FEWEST_HEADS)]
    tile = min(sizes, key=lambda size: triton.cdiv(heads, size) * size)
    return half, block, tile, min(4, max(1, tile * block // A_WARP))


def _half(head_dim: int) -> int:
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim {head_dim}: expected an even number, whose halves are rotated against each other")
    return head_dim // 2


def _weight_stride(weight: Tensor | None) -> int:
    return weight.shape[1] if weight is not None and weight.dim() == 2 else 0


def _rstd(given: Tensor | None, x: Tensor) -> Tensor:
    rstd = buffer("rstd", given, x.shape[:2], x, torch.float32)
    if not rstd.is_contiguous():
        raise ValueError("rstd is not contiguous")
    return rstd


def _check(x: Tensor, positions: Tensor, weight: Tensor | None, table: Tensor | None) -> None:
    require_storage("x", x.dtype)
    if x.dim() != 3:
        raise ValueError(f"x has shape {list(x.shape)}: expected [tokens, heads, head_dim]")
    require_contiguous_rows("x", x)
    _check_positions(positions, x.shape[0], x)
    fitting = (x.shape[2:], x.shape[1:])
    if weight is not None and (weight.shape not in fitting or not weight.is_contiguous()):
        raise ValueError(f"the weight has shape {list(weight.shape)}: expected {list(fitting[0])} for all heads, or {list(fitting[1])}")
    if table is not None:
        buffer("table", table, (x.shape[0], x.shape[2]), x, torch.float32)
        if not table.is_contiguous():
            raise ValueError("the table is not contiguous: expected what rope_table gives")


def _check_positions(positions: Tensor, tokens: int, like: Tensor) -> None:
    if tuple(positions.shape) != (tokens,) or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(f"positions are {positions.dtype} {list(positions.shape)}: expected contiguous torch.int64 [{tokens}]")
    if positions.device != like.device:
        raise ValueError(f"positions are on {positions.device}, x is on {like.device}")
