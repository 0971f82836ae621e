"""PEFT's LoRA layer: its forward pass, merge and unmerge on a `torch.nn.Linear`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraConfig
from torch import Tensor

from blackswan.falsifiers.subjects.libraries.torch import linear

NAME = "default"


def _layer(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float, bias: Tensor | None = None, stabilised: bool = False
) -> tuple[Any, dict[str, Tensor]]:
    rank = lora_a.shape[0]
    given_alpha = alpha / math.sqrt(rank) if stabilised else alpha  # rsLoRA divides by the root of the rank
    config = LoraConfig(r=rank, lora_alpha=given_alpha, use_rslora=stabilised)  # type: ignore[arg-type]  # PEFT takes any number
    with torch.random.fork_rng():  # the initial values are replaced
        base = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device=weight.device)
        layer = Linear(base, NAME, config=config, r=rank, lora_alpha=given_alpha)  # type: ignore[arg-type]
    layer.to(weight.device, weight.dtype)
    given = {"base_layer.weight": weight, f"lora_A.{NAME}.weight": lora_a, f"lora_B.{NAME}.weight": lora_b}
    return layer, given | ({} if bias is None else {"base_layer.bias": bias})


def lora_linear(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """`peft.tuners.lora.Linear`."""
    layer, given = _layer(weight, lora_a, lora_b, alpha, bias)
    return torch.func.functional_call(layer, given, (x,))  # type: ignore[no-any-return]


def rslora_linear(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """`peft.tuners.lora.Linear` with `use_rslora`, and the `lora_alpha` by which its factor is alpha / rank again."""
    layer, given = _layer(weight, lora_a, lora_b, alpha, bias, stabilised=True)
    return torch.func.functional_call(layer, given, (x,))  # type: ignore[no-any-return]


def _merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float, unmerge: bool) -> Tensor:
    layer, given = _layer(weight, lora_a, lora_b, alpha)
    with torch.no_grad():
        for name, value in given.items():
            layer.get_parameter(name).copy_(value)
        if unmerge:
            layer.merged_adapters.append(NAME)
            layer.unmerge()
        else:
            layer.merge()
    return layer.base_layer.weight.detach().clone()  # type: ignore[no-any-return]


def lora_merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float) -> Tensor:
    """`merge()`."""
    return _merged(weight, lora_a, lora_b, alpha, unmerge=False)


def lora_unmerge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float) -> Tensor:
    """`unmerge()`."""
    return _merged(weight, lora_a, lora_b, alpha, unmerge=True)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "linear": linear,  # the layer below, which some claims compare with
    "lora_linear": lora_linear,
    "lora_merge": lora_merge,
    "lora_unmerge": lora_unmerge,
}
RSLORA = {"linear": linear, "lora_linear": rslora_linear}
