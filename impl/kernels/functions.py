"""The kernels as stand-ins for the operations of the same names: same inputs, scalars and errors, with gradients.

Cross-entropy over more classes than its kernel holds is left to torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from blackswan.impl.config import RopeScaling
from blackswan.impl.kernels import cross_entropy, nf4_dequantize, rms_norm, rope, swiglu
from blackswan.impl.operations import losses
from blackswan.impl.operations.nf4 import require_block_size
from blackswan.impl.validation import require_integers

Gradients = tuple[Tensor | None, ...]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rms_norm.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, weight, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        dx = rms_norm.rms_norm_backward(dy, x, weight, rstd) if ctx.needs_input_grad[0] else None
        dweight = rms_norm.rms_norm_weight_gradient(dy, x, rstd).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, theta: float, scaling: RopeScaling | None) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.theta, ctx.scaling = theta, scaling
        return rope.qk_norm_rope(x, positions, theta, scaling=scaling)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        (positions,) = ctx.saved_tensors
        return rope.qk_norm_rope_backward(dy.contiguous(), None, positions, ctx.theta, scaling=ctx.scaling), None, None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        return swiglu.swiglu_backward(dy.contiguous(), *ctx.saved_tensors)


class _Nf4Linear(torch.autograd.Function):
    """Keeps the codes, not the dequantised weight, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, shape: tuple[int, int], block_size: int) -> Tensor:
        ctx.save_for_backward(codes, absmax)
        ctx.shape, ctx.block_size = shape, block_size
        weight = nf4_dequantize.nf4_dequantize(codes, absmax, *shape, block_size, x.dtype)
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        codes, absmax = ctx.saved_tensors
        rows, columns = ctx.shape
        weight = nf4_dequantize.nf4_dequantize(codes, absmax, rows, columns, ctx.block_size, dy.dtype)
        return dy @ weight, None, None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, class_weights: Tensor | None) -> Tensor:
        loss, dlogits = cross_entropy.weighted_cross_entropy(logits, labels, class_weights)
        ctx.save_for_backward(dlogits)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Gradients:
        (dlogits,) = ctx.saved_tensors
        return (dloss * dlogits).to(ctx.dtype), None, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = _RmsNorm.apply(rows, weight.contiguous(), eps)
    return y.view(x.shape)


def _rope(x: Tensor, positions: Tensor, theta: float, **scaling: Any) -> Tensor:
    if positions.shape != x.shape[:2]:
        raise ValueError(
            f"positions have shape {list(positions.shape)} and x {list(x.shape)}: expected [batch, seq] and [batch, seq, heads, d]"
        )
    tokens = x.reshape(-1, *x.shape[2:]).contiguous()
    require_integers("positions", positions)
    flat = positions.to(torch.int64).reshape(-1).contiguous()
    y: Tensor = _Rope.apply(tokens, flat, float(theta), RopeScaling(**scaling) if scaling else None)
    return y.view(x.shape)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if up.shape != gate.shape:
        raise ValueError(f"gate has shape {list(gate.shape)} and up {list(up.shape)}: expected one shape")
    rows = (value.reshape(-1, gate.shape[-1]).contiguous() for value in (gate, up))
    y: Tensor = _SwiGlu.apply(*rows)
    return y.view(gate.shape)


def _nf4_dequantize(codes: Tensor, absmax: Tensor, rows: int, columns: int, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    require_block_size(block_size)
    return nf4_dequantize.nf4_dequantize(codes.contiguous(), absmax.float().contiguous(), rows, columns, block_size, dtype)


def _nf4_linear(
    x: Tensor, codes: Tensor, absmax: Tensor, in_features: int, out_features: int, block_size: int, bias: Tensor | None = None
) -> Tensor:
    require_block_size(block_size)
    stored = (codes.contiguous(), absmax.float().contiguous())
    y: Tensor = _Nf4Linear.apply(x, *stored, bias, (out_features, in_features), block_size)
    return y


def _weighted_cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    if logits.shape[-1] > cross_entropy.WIDEST:
        return losses.weighted_cross_entropy(logits, labels, class_weights)
    losses.require_classification(logits, labels, class_weights)
    weights = None if class_weights is None else class_weights.contiguous()
    y: Tensor = _CrossEntropy.apply(logits.contiguous(), labels.to(torch.int64).contiguous(), weights)
    return y


OPERATIONS: dict[str, Callable[..., Any]] = {
    "nf4_dequantize": _nf4_dequantize,
    "nf4_linear": _nf4_linear,
    "qk_norm": _rms_norm,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "weighted_cross_entropy": _weighted_cross_entropy,
}
