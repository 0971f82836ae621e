"""Tensors of PyTorch as arrays of NumPy."""

import ml_dtypes
import numpy as np
import torch

from blackswan.reference.table import Array


def to_numpy(value: torch.Tensor) -> Array:
    """The tensor's content on the host; bfloat16 as ml_dtypes has it."""
    host = value.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(host.numpy())
