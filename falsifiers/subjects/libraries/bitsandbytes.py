"""bitsandbytes' NF4 by its functional interface: quantisation, also of the scales, dequantisation and the 4-bit linear layer.

`ADAMW_8BIT` is its AdamW8bit. On a GPU: `blackswan vet bitsandbytes:ADAMW_8BIT --device cuda`.
"""

from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import Tensor

from blackswan.falsifiers.subjects.protocol import Lacks

SMALLEST_IN_8_BITS = 4096
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


def _stepping(parameter: Tensor, gradient: Tensor, settings: dict[str, float]) -> tuple[Any, Tensor, dict[str, Any]]:
    """An AdamW8bit before its step, its parameter, and the state that it made for it."""
    moved = torch.nn.Parameter(parameter.clone())
    moved.grad = gradient.clone()
    betas = settings.pop("beta1"), settings.pop("beta2")
    optimiser = bitsandbytes.optim.AdamW8bit([moved], lr=settings.pop("learning_rate"), betas=betas, **settings)  # type: ignore[attr-defined,no-untyped-call]
    optimiser.init_state(optimiser.param_groups[0], moved, 0, 0)  # type: ignore[no-untyped-call]
    return optimiser, moved, optimiser.state[moved]


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, ...]:
    """A step of `AdamW8bit` on a parameter so small that its moments are kept in 32 bits."""
    settings = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    optimiser, moved, state = _stepping(parameter, gradient, settings)
    if parameter.numel() >= SMALLEST_IN_8_BITS:
        raise Lacks(f"AdamW8bit holds the moments of {SMALLEST_IN_8_BITS:,} elements and more in 8 bits")
    state |= {"step": step - 1, "state1": exp_avg.clone(), "state2": exp_avg_sq.clone()}
    optimiser.step()
    return moved.detach(), state["state1"], state["state2"]


def adamw_8bit_step(
    parameter: Tensor,
    gradient: Tensor,
    first_codes: Tensor,
    first_scales: Tensor,
    second_codes: Tensor,
    second_scales: Tensor,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, ...]:
    """A step of `AdamW8bit` from moments in 8 bits, and what `dequantize_blockwise` makes of those that it holds afterwards."""
    settings = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    optimiser, moved, state = _stepping(parameter, gradient, settings)
    if state["state1"].dtype != torch.uint8:
        raise TypeError(f"AdamW8bit holds {parameter.numel():,} elements in {state['state1'].dtype}; expected torch.uint8")
    state |= {"step": step - 1, "state1": first_codes.clone(), "state2": second_codes.clone()}
    state |= {"absmax1": first_scales.clone(), "absmax2": second_scales.clone()}
    optimiser.step()
    held = [
        functional.dequantize_blockwise(state[f"state{i}"], absmax=state[f"absmax{i}"], code=state[f"qmap{i}"], blocksize=256)
        for i in (1, 2)
    ]
    return moved.detach(), *held


ADAMW_8BIT: dict[str, Callable[..., Any]] = {"adamw_step": adamw_step, "adamw_8bit_step": adamw_8bit_step}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "nf4_quantize": nf4_quantize,
    "nf4_dequantize": nf4_dequantize,
    "nf4_linear": nf4_linear,
    "nf4_double_quantize": nf4_double_quantize,
    "nf4_double_dequantize": nf4_double_dequantize,
}
