"""Batches without padding: the real tokens of all samples one after the other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from impl.trainer import Batch

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


def pack(batch: Batch, samples: int) -> Packed:
    """The tokens of a batch of at most `samples` samples; a token's position is the number of real tokens before it."""
    count = len(batch.labels)
    if count > samples:
        raise ValueError(f"{count} samples in a batch of at most {samples}")
    lengths = batch.mask.sum(dim=1)
    positions = (batch.mask.cumsum(dim=1) - 1)[batch.mask]
    total = len(positions)
    tokens = -(-total // GRAIN) * GRAIN
    ends = torch.full((samples + 2,), total, dtype=torch.int32, device=lengths.device)
    ends[0], ends[-1] = 0, tokens
    ends[1 : count + 1] = lengths.cumsum(dim=0)
    labels = batch.labels.new_zeros((samples, *batch.labels.shape[1:]))
    labels[:count] = batch.labels
    real = torch.zeros(samples, device=lengths.device)
    real[:count] = 1.0
    return Packed(_filled(batch.input_ids[batch.mask], tokens), _filled(positions, tokens, rising=True), ends, labels, real)


def _filled(values: Tensor, length: int, rising: bool = False) -> Tensor:
    missing = length - len(values)
    filler = torch.arange(missing, device=values.device) if rising else values.new_zeros(missing)
    return torch.cat([values, filler.to(values.dtype)])
