"""Low-rank updates of a decoder's projections (Hu et al. 2021): their shapes, order and initial values."""

import math

import torch
from torch import Tensor, nn


class LoraFactor(nn.Module):
    """One trainable factor of an update, A [rank, in] or B [out, rank]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def factor_shapes(path: str, shape: tuple[int, int], rank: int) -> dict[str, tuple[int, int]]:
    """Name and shape of A, then B, of the projection `path` of shape [out, in]."""
    rows, columns = shape
    return {f"{path}.lora_A.weight": (rank, columns), f"{path}.lora_B.weight": (rows, rank)}


def initial_factor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A uniform as in Hu et al.'s code (Kaiming with a = √5, that is within ±1/√in), B zero, so that the update starts at zero.

    On the CPU, as the generator is, whichever device is torch's default."""
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    bound = 1.0 / math.sqrt(shape[-1])
    return (2.0 * torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") - 1.0) * bound
