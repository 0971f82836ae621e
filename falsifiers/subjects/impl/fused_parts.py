"""Parts of the fused engine under the names of the operations that they compute: attention, pooling and products of packed tokens."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.impl.fused import model, products
from blackswan.impl.fused.products import Products


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The batch's samples as sequences of packed tokens, dense as the engine's are; there are no rows of padding. Shapes as of the
    operation."""
    if not mask.all():
        raise Lacks("the fused engine packs the real tokens: it has no rows of padding")
    (batch, seq), packed = mask.shape, [value.flatten(0, 1).contiguous() for value in (q, k, v)]
    bounds = torch.arange(0, batch * seq + 1, seq, dtype=torch.int32, device=q.device)
    return _Attention.apply(*packed, bounds, seq).view_as(q)  # type: ignore[no-any-return, no-untyped-call]  # torch


class _Attention(torch.autograd.Function):
    """The kernels of `impl.kernels.attention`, which imports Triton."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        from blackswan.impl.kernels.attention import attention_forward

        y, lse = attention_forward(q, k, v, bounds, longest)
        ctx.save_for_backward(q, k, v, y, lse, bounds)
        ctx.longest = longest
        return y

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        from blackswan.impl.kernels.attention import attention_backward

        q, k, v, y, lse, bounds = ctx.saved_tensors
        return *attention_backward(dy[0].contiguous(), q, k, v, y, lse, bounds, ctx.longest), None, None


def pool(x: Tensor, mask: Tensor, mode: str) -> Tensor:
    """The real tokens' mean or one of their rows. Shapes as of the operation."""
    packed = x[mask]
    ends = mask.sum(dim=1).cumsum(0)
    bounds = torch.cat([ends.new_zeros(1), ends, ends[-1:]]).to(torch.int32)  # no token fills up
    rows = model.read_rows(bounds, len(packed), mode)
    return model.mean(packed, bounds) if rows is None else packed[rows]


_shared = Products()
"""As all layers of a model share one."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The wide product by a tuned algorithm, forward and backward. Shapes as of the operation."""
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]  # torch


class _Linear(torch.autograd.Function):
    """The engine's weights are frozen, so that the gradients of weight and bias are torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight.T, bias)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        bias = dy[0].sum(dim=0) if ctx.needs_input_grad[2] else None
        return _product(dy[0].contiguous(), weight), dy[0].T @ x, bias


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    with patch.object(products, "graph_times", _last_is_fastest):
        _shared.tune(a, b, bias)
    return _shared.mm(a, b, bias)


def _last_is_fastest(calls: Sequence[object]) -> list[float]:
    """In the place of the clock: an algorithm of the library where one is right, and the same one in each run."""
    return [float(-number) for number in range(len(calls))]


OPERATIONS: dict[str, Callable[..., Tensor]] = {"attention": attention, "linear": linear, "pool": pool}
