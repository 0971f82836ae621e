"""SwiGLU (Shazeer 2020, "GLU variants improve transformer") and its gradient."""

import triton
import triton.language as tl
from torch import Tensor

from blackswan.impl.kernels.launch import buffer, launch, require_same_shape, require_storage

BLOCK = 1024


@triton.jit
def _sigmoid(g):
    """σ(g) as a product of two factors, and 1 − σ(g).

    With h = e^(−|g| / 2), σ(−|g|) = h · h / (1 + h²) and σ(|g|) = 1 / (1 + h²). Small σ(g) is below the smallest normal number, which a
    GPU may flush to zero, where its product with a large factor is not; its square root is above.
    """
    root = tl.exp(-0.5 * tl.abs(g))
    share = 1.0 / (1.0 + root * root)
    opened, closed = tl.where(g < 0.0, root, 1.0), tl.where(g < 0.0, 1.0, root)
    return opened, opened * share, closed * (closed * share)


@triton.jit
def _swiglu(gate, up, out, columns, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=there, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=there, other=0.0).to(tl.float32)
    opened, share, _ = _sigmoid(g)
    result = (g * opened) * (u * share)
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _swiglu_backward(dy, gate, up, dgate, dup, columns, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    upstream = tl.load(dy + row * dy_stride + column, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=there, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=there, other=0.0).to(tl.float32)
    opened, share, complement = _sigmoid(g)
    share *= upstream
    for_up = (g * opened) * share
    for_gate = (u * opened) * share * (1.0 + g * complement)
    tl.store(dup + row * dup_stride + column, for_up.to(dup.dtype.element_ty), mask=there)
    tl.store(dgate + row * dgate_stride + column, for_gate.to(dgate.dtype.element_ty), mask=there)


def swiglu(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """y = gate · σ(gate) · up in float32, rounded once: all [tokens, intermediate], rows strided as they come; `out` may be gate or up.

    Raises a ValueError for shapes or dtypes that do not fit.
    """
    _check(gate, up)
    out = buffer("out", out, gate.shape, gate)
    tokens, columns = gate.shape
    if tokens and columns:
        grid = (tokens, triton.cdiv(columns, BLOCK))
        launch(_swiglu, grid, gate, up, out, columns, gate.stride(0), up.stride(0), out.stride(0), BLOCK)
    return out


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor | None = None, dup: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(dgate, dup) of `swiglu`. Either may be written over gate, up or dy, which the kernel has read by then."""
    _check(gate, up)
    require_same_shape("dy", dy, "gate", gate)
    dgate, dup = buffer("dgate", dgate, gate.shape, gate), buffer("dup", dup, gate.shape, up)
    tokens, columns = gate.shape
    strides = (dy.stride(0), gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0))
    if tokens and columns:
        launch(_swiglu_backward, (tokens, triton.cdiv(columns, BLOCK)), dy, gate, up, dgate, dup, columns, *strides, BLOCK)
    return dgate, dup


def _check(gate: Tensor, up: Tensor) -> None:
    require_storage("gate", gate.dtype)
    if gate.dim() != 2 or up.dtype != gate.dtype:
        raise ValueError(f"gate is {gate.dtype} {list(gate.shape)} and up {up.dtype}: expected [tokens, intermediate] of one dtype")
    require_same_shape("up", up, "gate", gate)
    require_same_shape("gate", gate, "up", up)
