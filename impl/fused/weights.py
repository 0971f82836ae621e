"""Frozen weights that one product reads, and a step's products in order, so that each weight is dequantised beside the product before."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from blackswan.impl.fused.fitting import blocks_align
from blackswan.impl.fused.side import SideStream
from blackswan.impl.kernels.nf4_dequantize import nf4_dequantize
from blackswan.impl.projection import Projection, frozen

ADVICE = "the hand-written layers join these weights; choose backend torch"


class JoinedWeight:
    """The weights of projections one below the other, [rows, columns]: plain, or NF4 codes that are dequantised into buffer `buffer`.

    The projections' own tensors become views of the joined ones, so that nothing is stored twice. Raises a ValueError where NF4 blocks
    cannot be joined.
    """

    def __init__(self, projections: Sequence[Projection], buffer: int, dtype: torch.dtype) -> None:
        self.rows, self.columns = sum(p.out_features for p in projections), projections[0].in_features
        self.buffer, self._dtype = buffer, dtype
        self.plain: Tensor | None = None
        quantized = [p.quantized for p in projections]
        if quantized[0] is None:
            self.plain = torch.cat([p.weight for p in projections if p.weight is not None])
            for p, part in zip(projections, torch.split(self.plain, [p.out_features for p in projections]), strict=True):
                p.weight = frozen(part)
            return
        kept = [q for q in quantized if q is not None]
        self._block = kept[0].block_size
        if any(q.doubly_quantized for q in kept):
            raise ValueError(f"{projections[0].path}: its absmax are quantised as well (double_quantize), which no kernel reads; {ADVICE}")
        if not blocks_align([p.out_features * p.in_features for p in projections], self._block):
            raise ValueError(f"{projections[0].path}: its NF4 blocks do not end where the next projection's begin; {ADVICE}")
        self._codes, self._absmax = torch.cat([q.codes for q in kept]), torch.cat([q.absmax for q in kept])
        codes, absmax = torch.split(self._codes, [len(q.codes) for q in kept]), torch.split(self._absmax, [len(q.absmax) for q in kept])
        for q, code, scale in zip(kept, codes, absmax, strict=True):
            q.codes, q.absmax = code, scale

    def dequantized(self, buffer: Tensor) -> Tensor:
        """The weight, computed anew into the first elements of `buffer`."""
        out = buffer[: self.rows * self.columns].view(self.rows, self.columns)
        return nf4_dequantize(self._codes, self._absmax, self.rows, self.columns, self._block, self._dtype, out=out)


class Weights:
    """The weights of a step's products, each used once where it stands in the order that `begin` is told.

    While a product reads the weight in one buffer, the next one is dequantised into another. Two uses in a row of the same weight are one
    dequantisation.
    """

    def __init__(self, side: SideStream, dtype: torch.dtype, device: torch.device) -> None:
        self._side, self._dtype, self._device = side, dtype, device
        self._sizes: dict[int, int] = {}
        self._uses: deque[JoinedWeight] = deque()
        self._last: JoinedWeight | None = None
        self._ready: Callable[[], Tensor] | None = None

    def add(self, weight: JoinedWeight) -> JoinedWeight:
        """Says that this weight will be used; all are added before the first use."""
        size = weight.rows * weight.columns if weight.plain is None else 0
        self._sizes[weight.buffer] = max(self._sizes.get(weight.buffer, 0), size)
        return weight

    @cached_property
    def buffers(self) -> dict[int, Tensor]:
        """By number, each as large as the largest weight that goes there."""
        return {buffer: torch.empty(size, dtype=self._dtype, device=self._device) for buffer, size in self._sizes.items()}

    def of(self, weight: JoinedWeight) -> Tensor:
        """The weight, out of any order, until another one is dequantised into its buffer."""
        return weight.plain if weight.plain is not None else weight.dequantized(self.buffers[weight.buffer])

    def begin(self, uses: Iterable[JoinedWeight]) -> None:
        """Makes the first weight ready; `uses` are those of the coming products, neighbours in different buffers or the same weight."""
        self._uses, self._last = deque(uses), None
        self._prepare()

    def take(self, weight: JoinedWeight) -> Tensor:
        """The weight [rows, columns] for a product that is launched before the next is taken. Raises a RuntimeError out of order."""
        if weight.plain is not None:
            return weight.plain
        if self._ready is None or self._last is not weight:
            raise RuntimeError("a product out of the order that was said: its weight is not the one that was made ready")
        found = self._ready()
        self._prepare()
        return found

    def _prepare(self) -> None:
        if not self._uses or self._uses[0].plain is not None:
            self._ready = None
            return
        before, weight = self._last, self._uses.popleft()
        self._last = weight
        if weight is before and self._ready is not None:
            return
        self._ready = self._side.run(lambda: self.of(weight))
