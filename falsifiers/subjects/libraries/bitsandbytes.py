"""bitsandbytes' NF4 by its functional interface: quantisation, also of the scales, dequantisation and the 4-bit linear layer."""

from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import Tensor

from blackswan.falsifiers.subjects.protocol import Lacks

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def _supported(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise Lacks(f"bitsandbytes has no block size {block_size}")


def nf4_quantize(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """`quantize_4bit` of the flattened weight."""
    _supported(block_size)
    codes, state = functional.quantize_4bit(weight.contiguous().reshape(1, -1), blocksize=block_size, quant_type="nf4")
    return codes.flatten(), state.absmax


def _state(absmax: Tensor, rows: int, columns: int, block_size: int, dtype: torch.dtype) -> Any:
    _supported(block_size)
    code = functional.get_4bit_type("nf4", absmax.device)  # type: ignore[no-untyped-call]
    return functional.QuantState(absmax.contiguous(), torch.Size((rows, columns)), code, block_size, "nf4", dtype)  # type: ignore[no-untyped-call]


def nf4_dequantize(codes: Tensor, absmax: Tensor, rows: int, columns: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """`dequantize_4bit`."""
    state = _state(absmax, rows, columns, block_size, dtype)
    return functional.dequantize_4bit(codes.contiguous().reshape(-1, 1), state)


def nf4_linear(
    x: Tensor, codes: Tensor, absmax: Tensor, in_features: int, out_features: int, block_size: int, bias: Tensor | None = None
) -> Tensor:
    """`matmul_4bit`, which `Linear4bit` calls."""
    state = _state(absmax, out_features, in_features, block_size, x.dtype)
    return bitsandbytes.matmul_4bit(x, codes.contiguous().reshape(-1, 1).t(), quant_state=state, bias=bias)  # type: ignore[attr-defined,no-any-return]


def nf4_double_quantize(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_blockwise` of absmax less its mean, as `quantize_4bit` calls it for `compress_statistics`."""
    offset = absmax.mean()
    codes, state = functional.quantize_blockwise(absmax - offset, blocksize=256)
    return codes, state.absmax, offset


def nf4_double_dequantize(codes: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
    """`dequantize_blockwise`, plus the offset."""
    code = functional.create_dynamic_map().to(codes.device)  # type: ignore[no-untyped-call]
    return functional.dequantize_blockwise(codes.contiguous(), absmax=scales.contiguous(), code=code, blocksize=256) + offset


OPERATIONS: dict[str, Callable[..., Any]] = {
    "nf4_quantize": nf4_quantize,
    "nf4_dequantize": nf4_dequantize,
    "nf4_linear": nf4_linear,
    "nf4_double_quantize": nf4_double_quantize,
    "nf4_double_dequantize": nf4_double_dequantize,
}
