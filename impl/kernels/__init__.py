"""Triton kernels of the operations that are bound by memory bandwidth, as plain functions on tensors and as stand-ins for operations.

`functions.OPERATIONS` holds the stand-ins under the names of `impl.operations.OPERATIONS`; it and the kernels are imported where they are
used, since Triton is an optional dependency (`pip install 'blackswan-contracts[kernels]'`). A kernel runs on a CUDA device, or on the CPU
under Triton's interpreter, which TRITON_INTERPRET=1 turns on before Triton is imported.
"""

import functools
import importlib
import os

NAMES = ("nf4_dequantize", "nf4_linear", "qk_norm", "rms_norm", "rope", "swiglu", "weighted_cross_entropy")
"""The operations that have a stand-in, known without Triton."""


def why_not() -> str | None:
    """Why the kernels cannot run here; None where they can."""
    reason = missing()
    if reason is not None:
        return reason
    if interpreted() or _has_cuda():
        return None
    return "Triton kernels need a CUDA device, and this host has none (TRITON_INTERPRET=1 runs them on the CPU, slowly)"


def interpreted() -> bool:
    """Whether TRITON_INTERPRET asks for the interpreter, under which kernels take tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@functools.cache
def missing() -> str | None:
    """Why Triton cannot be imported; None where it can, with a CUDA device or without."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error}); pip install 'blackswan-contracts[kernels]' brings it on Linux"
    return None
