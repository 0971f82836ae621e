"""RMSNorm (Zhang & Sennrich 2019), with the residual addition before it, and its gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blackswan.impl.kernels.launch import buffer, launch, require_contiguous_rows, require_same_shape, require_storage

WIDEST = 32768
TILE = 1024
ROWS_A_PART = 64
COLUMNS_A_PROGRAM = 64


@triton.jit
def _rms_norm(
    x, residual, weight, total, out, rstd, rows, hidden, x_stride, residual_stride, total_stride, out_stride, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    there = (row[:, None] < rows) & (column < hidden)
    value = tl.load(x + row[:, None] * x_stride + column, mask=there, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row[:, None] * residual_stride + column, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * total_stride + column, rounded, mask=there)
        value = rounded.to(tl.float32)
    # Not hidden.to(…): an argument that is 1 is a constant of the compiler and has no methods.
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(value * value, axis=1), hidden * 1.0) + eps))
    factor = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    result = value * scale[:, None] * factor
    tl.store(out + row[:, None] * out_stride + column, result.to(out.dtype.element_ty), mask=there)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def _rms_norm_backward(
    dy, x, weight, rstd, add, out, rows, hidden, dy_stride, x_stride, add_stride, out_stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    there = (row[:, None] < rows) & (column < hidden)
    scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
    normal = tl.load(x + row[:, None] * x_stride + column, mask=there, other=0.0).to(tl.float32) * scale
    factor = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    upstream = tl.load(dy + row[:, None] * dy_stride + column, mask=there, other=0.0).to(tl.float32) * factor
    mean = tl.div_rn(tl.sum(upstream * normal, axis=1), hidden * 1.0)
    gradient = (upstream - normal * mean[:, None]) * scale
    if ADD:
        gradient += tl.load(add + row[:, None] * add_stride + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * out_stride + column, gradient.to(out.dtype.element_ty), mask=there)


@triton.jit
def _weight_gradient_parts(dy, x, rstd, parts, rows, hidden, dy_stride, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row[:, None] < rows) & (column[None, :] < hidden)
    upstream = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
    scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
    tl.store(parts + part * hidden + column, tl.sum(upstream * (value * scale), axis=0), mask=column < hidden)


@triton.jit
def _weight_gradient_sum(parts, out, count, hidden, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    start = 0
    while start < count:  # not a range over a tensor: with NumPy 2.4 that fails in the interpreter of Triton 3.6
        part = start + tl.arange(0, ROWS).to(tl.int64)
        there = (part[:, None] < count) & (column[None, :] < hidden)
        total += tl.sum(tl.load(parts + part[:, None] * hidden + column[None, :], mask=there, other=0.0), axis=0)
        start += ROWS
    tl.store(out + column, total, mask=column < hidden)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, rstd: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y = x · rstd · w with rstd = 1 / sqrt(mean(x²) + ε), in float32, rounded once: x [rows, hidden] → (y, rstd float32 [rows]).

    Raises a ValueError for sizes or dtypes that do not fit, for rows that are not contiguous and for more than WIDEST columns.
    """
    _check(x, weight)
    out, rstd = buffer("out", out, x.shape, x), buffer("rstd", rstd, x.shape[:1], x, torch.float32)
    _forward(x, x, weight, out, out, rstd, eps, add=False)
    return out, rstd


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    total: Tensor | None = None,
    out: Tensor | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """total = x + residual, rounded to the dtype of x, and `rms_norm` of that: (total, y, rstd). `total` may be x or residual itself."""
    _check(x, weight)
    require_same_shape("residual", residual, "x", x)
    total, out = buffer("total", total, x.shape, x), buffer("out", out, x.shape, x)
    rstd = buffer("rstd", rstd, x.shape[:1], x, torch.float32)
    _forward(x, residual, weight, total, out, rstd, eps, add=True)
    return total, out, rstd


def _forward(x: Tensor, residual: Tensor, weight: Tensor, total: Tensor, out: Tensor, rstd: Tensor, eps: float, *, add: bool) -> None:
    rows, hidden = x.shape
    if rows == 0:
        return
    tile, block, warps = _tile(hidden)
    strides = (x.stride(0), residual.stride(0), total.stride(0), out.stride(0))
    tensors = (x, residual, weight, total, out, rstd)
    launch(_rms_norm, (triton.cdiv(rows, tile),), *tensors, rows, hidden, *strides, eps, add, tile, block, num_warps=warps)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """dx of `rms_norm` for dy [rows, hidden], plus `add` (the gradient of the branch around the norm), rounded once.

    `out` may be dy, x or add itself. Errors as for `rms_norm`.
    """
    _check(x, weight)
    require_same_shape("dy", dy, "x", x)
    rstd = buffer("rstd", rstd, x.shape[:1], x, torch.float32)
    if add is not None:
        require_same_shape("add", add, "x", x)
    out = buffer("out", out, x.shape, x)
    rows, hidden = x.shape
    if rows:
        tile, block, warps = _tile(hidden)
        other = dy if add is None else add
        strides = (dy.stride(0), x.stride(0), other.stride(0), out.stride(0))
        tensors = (dy, x, weight, rstd, other, out)
        constants = (add is not None, tile, block)
        launch(_rms_norm_backward, (triton.cdiv(rows, tile),), *tensors, rows, hidden, *strides, *constants, num_warps=warps)
    return out


def rms_norm_weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """Σ over rows of dy · x · rstd, float32 [hidden]: parts of ROWS_A_PART rows, then their sum, each in one order.

    Raises a ValueError for sizes or dtypes that do not fit, and for rows that are not contiguous.
    """
    require_storage("x", x.dtype)
    require_same_shape("dy", dy, "x", x)
    require_contiguous_rows("x", x)
    rstd = buffer("rstd", rstd, x.shape[:1], x, torch.float32)
    rows, hidden = x.shape
    count = triton.cdiv(rows, ROWS_A_PART)
    parts = torch.empty(count, hidden, dtype=torch.float32, device=x.device)
    out = torch.zeros(hidden, dtype=torch.float32, device=x.device)
    if rows:
        columns = triton.cdiv(hidden, COLUMNS_A_PROGRAM)
        strides = (dy.stride(0), x.stride(0))
        launch(_weight_gradient_parts, (count, columns), dy, x, rstd, parts, rows, hidden, *strides, ROWS_A_PART, COLUMNS_A_PROGRAM)
        launch(_weight_gradient_sum, (columns,), parts, out, count, hidden, ROWS_A_PART, COLUMNS_A_PROGRAM)
    return out


def _tile(hidden: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: sixteen values a thread from 2,048 to 16,384 columns."""
    block = triton.next_power_of_2(hidden)
    rows = max(1, TILE // block)
    return rows, block, min(32, max(4, block // 512))


def _check(x: Tensor, weight: Tensor) -> None:
    require_storage("x", x.dtype)
    if x.dim() != 2 or tuple(weight.shape) != (x.shape[1],) or not weight.is_contiguous():
        raise ValueError(f"x has shape {list(x.shape)} and the weight {list(weight.shape)}: expected [rows, hidden] and [hidden]")
    if not 0 < x.shape[1] <= WIDEST:
        raise ValueError(f"{x.shape[1]} columns: a row is held in registers, which takes 1 to {WIDEST}")
    require_contiguous_rows("x", x)
