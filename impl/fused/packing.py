"""Batches without padding: the real tokens of all samples one after the other."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blackswan.impl.trainer import Batch

GRAIN = 256
"""Numbers of tokens are rounded up to a multiple of this, so that few shapes occur."""


@dataclass(frozen=True)
class Packed:
    """The real tokens of up to `samples` samples.

    input_ids and positions [tokens]; bounds int32 [samples + 2]: sample i holds tokens bounds[i] … bounds[i + 1] − 1, and tokens that only
    fill up come last, as a sequence of their own. real [samples] is 1.0 for a sample and 0.0 for a place without one.
    """

    input_ids: Tensor
    positions: Tensor
    bounds: Tensor
    labels: Tensor
    real: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return self.input_ids, self.positions, self.bounds, self.labels, self.real


class Sizes(NamedTuple):
    """Tokens in all, of the shortest and of the longest sample, and the ranges of ids and of labels, NaN where a label is."""

    total: int
    shortest: int
    longest: int
    least_id: int
    largest_id: int
    least_label: float
    largest_label: float


def sizes_of(batch: Batch) -> Sizes:
    """All of them in one transfer from the device."""
    lengths = batch.mask.sum(dim=1)
    ends = (*torch.aminmax(lengths), *torch.aminmax(batch.input_ids), *torch.aminmax(batch.labels))
    # In float64, which holds every number of these exactly.
    numbers = torch.stack([value.double() for value in (lengths.sum(), *ends)]).tolist()
    total, shortest, longest, least_id, largest_id = map(int, numbers[:5])
    return Sizes(total, shortest, longest, least_id, largest_id, *numbers[5:])


def pack(batch: Batch, samples: int, total: int) -> Packed:
    """The `total` real tokens of a batch of at most `samples` samples; a token's position is the number of real tokens before it."""
    count, device = len(batch.labels), batch.mask.device
    if count > samples:
        raise ValueError(f"{count} samples in a batch of at most {samples}")
    tokens = -(-total // GRAIN) * GRAIN
    bounds = torch.full((samples + 2,), total, dtype=torch.int32, device=device)
    bounds[0], bounds[-1] = 0, tokens
    bounds[1 : count + 1] = batch.mask.sum(dim=1).cumsum(dim=0)
    labels = batch.labels.new_zeros((samples, *batch.labels.shape[1:]))
    labels[:count] = batch.labels
    real = (torch.arange(samples, device=device) < count).float()
    places = torch.nonzero_static(batch.mask.flatten(), size=total)[:, 0]
    positions = (batch.mask.cumsum(dim=1) - 1).flatten()[places]
    filler = torch.arange(tokens - total, device=device)
    ids = torch.cat([batch.input_ids.flatten()[places], torch.zeros_like(filler)])
    return Packed(ids, torch.cat([positions, filler]), bounds, labels, real)
