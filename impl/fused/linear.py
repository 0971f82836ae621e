"""Frozen projections that read one input, as one matrix product, with low-rank updates of some of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from impl.fused.factors import Factors
from impl.fused.fitting import blocks_align
from impl.kernels.nf4_dequantize import nf4_dequantize
from impl.projection import Projection, frozen

ADVICE = "the hand-written layers join these weights; choose engine torch"


@dataclass(frozen=True)
class _Update:
    """The columns of the result that an update adds to, its factor B and where that one's gradient goes, and its scale."""

    columns: slice
    b: Tensor
    b_gradient: Tensor
    scale: float


class Scratch:
    """Room for one dequantised weight, which each product overwrites after the one before has read it."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._room = torch.empty(elements, dtype=dtype, device=device)

    def shaped(self, rows: int, columns: int) -> Tensor:
        """A matrix in it."""
        return self._room[: rows * columns].view(rows, columns)


class FusedLinear:
    """y = x Wᵀ + b + Σ scale · (x Aᵀ) Bᵀ for the projections' weights one below the other.

    The projections' own tensors become views of the joined ones, so that nothing is stored twice.
    """

    def __init__(self, projections: Sequence[Projection], factors: Factors, scratch: Scratch, dtype: torch.dtype) -> None:
        self.rows, self.columns = sum(p.out_features for p in projections), projections[0].in_features
        self._scratch, self._dtype = scratch, dtype
        self._join_weights(projections)
        biases = [p.bias for p in projections if p.bias is not None]
        if 0 < len(biases) < len(projections):
            raise ValueError(f"{projections[0].path}: some projections that read this input have a bias and others none; {ADVICE}")
        self.bias = torch.cat([bias.to(dtype) for bias in biases]) if biases else None
        adapted = [p for p in projections if p.lora_A is not None]
        self._updates = [self._update(projections, p, factors) for p in adapted]
        if adapted:
            self._a, self._a_gradient = factors.stacked([f"{p.path}.lora_A.weight" for p in adapted])

    def _join_weights(self, projections: Sequence[Projection]) -> None:
        quantized = [p.quantized for p in projections]
        if quantized[0] is None:
            self._weight: Tensor | None = torch.cat([p.weight for p in projections if p.weight is not None])
            for p, part in zip(projections, torch.split(self._weight, [p.out_features for p in projections]), strict=True):
                p.weight = frozen(part)
            return
        self._weight = None
        kept = [q for q in quantized if q is not None]
        self._block = kept[0].block_size
        if any(q.nested for q in kept) or not blocks_align([p.out_features * p.in_features for p in projections], self._block):
            raise ValueError(f"{projections[0].path}: its NF4 blocks are nested or do not end where the next projection's begin; {ADVICE}")
        self._codes, self._absmax = torch.cat([q.codes for q in kept]), torch.cat([q.absmax for q in kept])
        codes, absmax = torch.split(self._codes, [len(q.codes) for q in kept]), torch.split(self._absmax, [len(q.absmax) for q in kept])
        for q, code, scale in zip(kept, codes, absmax, strict=True):
            q.codes, q.absmax = code, scale

    def _update(self, projections: Sequence[Projection], projection: Projection, factors: Factors) -> _Update:
        before = projections[: list(projections).index(projection)]
        first, name = sum(p.out_features for p in before), f"{projection.path}.lora_B.weight"
        b = factors.value(name)
        return _Update(slice(first, first + projection.out_features), b, factors.slot(name), projection.alpha / b.shape[1])

    def weight(self) -> Tensor:
        """The joined weight [out, in]; with NF4 dequantised anew into the scratch room."""
        if self._weight is not None:
            return self._weight
        room = self._scratch.shaped(self.rows, self.columns)
        return nf4_dequantize(self._codes, self._absmax, self.rows, self.columns, self._block, self._dtype, out=room)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """X [tokens, in] → y [tokens, out], and x Aᵀ of all updates side by side."""
        weight = self.weight()
        y = torch.mm(x, weight.T) if self.bias is None else torch.addmm(self.bias, x, weight.T)
        if not self._updates:
            return y, None
        projected = torch.mm(x, self._a.T)
        for update, part in zip(self._updates, self._parts(projected), strict=True):
            y[:, update.columns].addmm_(part, update.b.T, alpha=update.scale)
        return y, projected

    def backward(self, dy: Tensor, projected: Tensor | None, x: Callable[[], Tensor], needs_input: bool = True) -> Tensor | None:
        """The gradient of x [tokens, in], None unless it is needed; those of A and B go to their slots."""
        dprojected = None
        if projected is not None:
            dprojected = torch.empty_like(projected)
            for update, part, out in zip(self._updates, self._parts(projected), self._parts(dprojected), strict=True):
                upstream = dy[:, update.columns]
                torch.addmm(out, upstream, update.b, beta=0, alpha=update.scale, out=out)
                torch.addmm(update.b_gradient, upstream.T, part, beta=0, alpha=update.scale, out=update.b_gradient)
            torch.mm(dprojected.T, x(), out=self._a_gradient)
        if not needs_input:
            return None
        dx = torch.mm(dy, self.weight())
        return dx if dprojected is None else dx.addmm_(dprojected, self._a)

    def _parts(self, projected: Tensor) -> Sequence[Tensor]:
        return torch.split(projected, [update.b.shape[1] for update in self._updates], dim=1)
