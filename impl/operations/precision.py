"""Mixed precision: low-precision storage, float32 arithmetic, one rounding at the end."""

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an operation on `dtype` computes: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(value: Tensor) -> Tensor:
    """`value` in the dtype in which operations on it compute."""
    return value.to(compute_dtype(value.dtype))
