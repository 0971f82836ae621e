"""The trainable tensors in the compute dtype, in the order in which products use them, and their gradients likewise."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from blackswan.impl.projection import Projection


class Factors:
    """Copies of the float32 masters in `dtype`, and room for their gradients.

    The factors A of projections that read one input lie one below the other, so that one product serves them all.
    `refresh` takes the copies from the masters' flat vector, `gradient` gives the gradients in that vector's order.
    """

    def __init__(
        self, sizes: Mapping[str, Sequence[int]], groups: Iterable[Sequence[Projection]], dtype: torch.dtype, device: torch.device
    ):
        self._shapes = {name: tuple(shape) for name, shape in sizes.items()}
        starts, total = {}, 0
        for name, shape in self._shapes.items():
            starts[name] = total
            total += torch.Size(shape).numel()
        order = [name for group in groups for name in _names(group)]
        order += [name for name in self._shapes if name not in set(order)]
        self._offsets, offset = {}, 0
        for name in order:
            self._offsets[name] = offset
            offset += torch.Size(self._shapes[name]).numel()
        pieces = [torch.arange(starts[name], starts[name] + torch.Size(self._shapes[name]).numel(), device=device) for name in order]
        self._order = torch.cat(pieces)
        self.values = torch.zeros(total, dtype=dtype, device=device)
        self.gradients = torch.zeros(total, dtype=dtype, device=device)

    def refresh(self, masters: Tensor) -> None:
        """Rounds the masters' flat vector to the copies."""
        self.values.copy_(masters[self._order])

    def gradient(self, out: Tensor) -> None:
        """Writes the gradients in the masters' order and dtype."""
        out.index_copy_(0, self._order, self.gradients.to(out.dtype))

    def value(self, name: str) -> Tensor:
        """The copy of a tensor."""
        return self._view(self.values, [name])

    def slot(self, name: str) -> Tensor:
        """Where a tensor's gradient goes."""
        return self._view(self.gradients, [name])

    def stacked(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Copies of tensors of one width that lie one below the other, as one matrix; and where its gradient goes."""
        return self._view(self.values, names), self._view(self.gradients, names)

    def _view(self, vector: Tensor, names: Sequence[str]) -> Tensor:
        first, *rest = (self._shapes[name] for name in names)
        shape = (first[0] + sum(other[0] for other in rest), *first[1:])
        start = self._offsets[names[0]]
        return vector[start : start + torch.Size(shape).numel()].view(shape)


def _names(group: Sequence[Projection]) -> list[str]:
    adapted = [projection.path for projection in group if projection.lora_A is not None]
    return [f"{path}.lora_A.weight" for path in adapted] + [f"{path}.lora_B.weight" for path in adapted]
