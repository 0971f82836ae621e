"""Frozen projections that read one input, as one matrix product, with low-rank updates of some of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blackswan.impl.fused.factors import Factors
from blackswan.impl.fused.products import Products
from blackswan.impl.fused.side import SideStream
from blackswan.impl.fused.weights import ADVICE, JoinedWeight, Weights
from blackswan.impl.projection import Projection


@dataclass(frozen=True)
class Shared:
    """What the products of a model share."""

    side: SideStream
    products: Products
    weights: Weights


@dataclass(frozen=True)
class _Update:
    """The columns of the result that an update adds to, its factor B and where that one's gradient goes, and its scale."""

    columns: slice
    b: Tensor
    b_gradient: Tensor
    scale: float


class FusedLinear:
    """y = x Wᵀ + b + Σ scale · (x Aᵀ) Bᵀ for the projections' weights one below the other; the narrow products beside the wide ones."""

    def __init__(self, projections: Sequence[Projection], factors: Factors, buffer: int, shared: Shared, dtype: torch.dtype) -> None:
        self.weight, self._shared = shared.weights.add(JoinedWeight(projections, buffer, dtype)), shared
        biases = [p.bias for p in projections if p.bias is not None]
        if 0 < len(biases) < len(projections):
            raise ValueError(f"{projections[0].path}: some projections that read this input have a bias and others none; {ADVICE}")
        self.bias = torch.cat([bias.to(dtype) for bias in biases]) if biases else None
        adapted = [p for p in projections if p.lora_A is not None]
        self._updates = [self._update(projections, p, factors) for p in adapted]
        if adapted:
            self._a, self._a_gradient = factors.stacked([f"{p.path}.lora_A.weight" for p in adapted])

    def _update(self, projections: Sequence[Projection], projection: Projection, factors: Factors) -> _Update:
        before = projections[: list(projections).index(projection)]
        first, name = sum(p.out_features for p in before), f"{projection.path}.lora_B.weight"
        b = factors.value(name)
        return _Update(slice(first, first + projection.out_features), b, factors.slot(name), projection.alpha / b.shape[1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """X [tokens, in] → y [tokens, out], and x Aᵀ of all updates side by side."""
        weight = self._shared.weights.take(self.weight)
        beside = self._shared.side.run(lambda: torch.mm(x, self._a.T), x) if self._updates else None
        y = self._shared.products.mm(x, weight.T, self.bias)
        if beside is None:
            return y, None
        projected = beside()
        for update, part in zip(self._updates, self._parts(projected), strict=True):
            y[:, update.columns].addmm_(part, update.b.T, alpha=update.scale)
        return y, projected

    def backward(self, dy: Tensor, projected: Tensor | None, x: Callable[[], Tensor], needs_input: bool = True) -> Tensor | None:
        """The gradient of x [tokens, in], None unless it is needed; those of A and B are in their slots after `SideStream.finish`.

        Neither `dy` nor what `x` computes the input from may be written to before that; both live until then.
        """
        weight = self._shared.weights.take(self.weight) if needs_input else None
        beside = None if projected is None else self._shared.side.run(lambda: self._projected_gradient(dy, projected), dy)
        dx = None if weight is None else self._shared.products.mm(dy, weight)
        if beside is None or projected is None:
            return dx
        dprojected = beside()
        self._shared.side.later(lambda: self._factor_gradients(dy, projected, dprojected, x), dy, x)
        return None if dx is None else dx.addmm_(dprojected, self._a)

    def tune(self, tokens: int) -> None:
        """Finds the fastest algorithms of the wide products of so many tokens, on random values; the weight is dequantised for it."""
        weight, products = self._shared.weights.of(self.weight), self._shared.products
        generator = torch.Generator(weight.device).manual_seed(0)
        for factor, bias in ((weight.T, self.bias), (weight, None)):
            x = torch.randn(tokens, len(factor), dtype=weight.dtype, device=weight.device, generator=generator)
            products.tune(x, factor, bias)

    def _projected_gradient(self, dy: Tensor, projected: Tensor) -> Tensor:
        gradient = torch.empty_like(projected)
        for update, out in zip(self._updates, self._parts(gradient), strict=True):
            torch.addmm(out, dy[:, update.columns], update.b, beta=0, alpha=update.scale, out=out)
        return gradient

    def _factor_gradients(self, dy: Tensor, projected: Tensor, dprojected: Tensor, x: Callable[[], Tensor]) -> None:
        for update, part in zip(self._updates, self._parts(projected), strict=True):
            torch.addmm(update.b_gradient, dy[:, update.columns].T, part, beta=0, alpha=update.scale, out=update.b_gradient)
        torch.mm(dprojected.T, x(), out=self._a_gradient)

    def _parts(self, projected: Tensor) -> Sequence[Tensor]:
        return torch.split(projected, [update.b.shape[1] for update in self._updates], dim=1)
