"""Wrong indices of large arrays, one for each operation that is asked of them, and wrong steps that leave out a part of many rows."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from blackswan.falsifiers.mutants.changes import short_index
from blackswan.falsifiers.mutants.registry import mutants, wrong_step, wrong_steps

READ = "Rows that begin beyond the first 2^15 elements are read as zeros: an index of 16 bits, as one of 32 is at 2^31."

mutants("rms_norm", rms_norm_short_index=(READ, short_index("x")))
mutants("rope", rope_short_index=(READ, short_index("x")))
mutants("swiglu", swiglu_short_index=(READ, short_index("gate")))
mutants("softmax", softmax_short_index=(READ, short_index("x")))
mutants("linear", linear_short_index=(READ, short_index("x")))
mutants("attention", attention_short_index=(READ, short_index("q")))
mutants("cross_entropy_per_sample", cross_entropy_per_sample_short_index=(READ, short_index("logits")))
mutants("weighted_cross_entropy", weighted_cross_entropy_short_index=(READ, short_index("logits")))
mutants("lm_cross_entropy", lm_cross_entropy_short_index=(READ, short_index("logits")))

Operations = Mapping[str, Callable[..., Any]]
FIRST = 2**16
"""So many rows, or numbers, are computed in one part."""


def _with(name: str, make: Callable[..., Any]) -> Callable[[Operations], Operations]:
    """The operations with one that is given its right one before its own arguments."""
    return lambda right: {**right, name: lambda **given: make(right[name], **given)}


def _moved(right: Callable[..., Any], parameter: Tensor, **given: Any) -> Any:
    moved, *moments = right(parameter, **given)
    return torch.cat([moved[:FIRST], parameter[FIRST:]]), *moments


def _clipped(right: Callable[..., Any], gradients: Tensor, max_norm: float) -> Any:
    _, norm = right(gradients[:, :FIRST], max_norm)
    return gradients * torch.clamp(max_norm / norm, max=1.0), norm


def _adapted(right: Callable[..., Any], x: Tensor, alpha: float, **given: Any) -> Any:
    return torch.cat([right(x[:FIRST], alpha=alpha, **given), right(x[FIRST:], alpha=0.0, **given)])


def _without_the_last_block(right: Callable[..., Any], weight: Tensor, block_size: int) -> Any:
    codes, absmax = right(weight, block_size)
    if len(absmax) > FIRST:
        absmax[-1] = 0.0
    return codes, absmax


wrong_steps(
    "impl.dispatch:OPERATIONS",
    adamw_moves_the_first_numbers=("A step moves the first 65,536 numbers alone.", _with("adamw_step", _moved)),
    clipped_by_the_first_numbers=("Gradients are clipped by the norm of the first 65,536 numbers.", _with("clip_by_global_norm", _clipped)),
    losses_of_the_first_samples=(
        "The loss of each sample after the first 65,536 is zero.",
        _with("cross_entropy_per_sample", lambda right, logits, labels: right(logits, labels) * (torch.arange(len(labels)) < FIRST)),
    ),
    lora_update_of_the_first_tokens=("Tokens after the first 65,536 have no update.", _with("lora_linear", _adapted)),
    absmax_of_the_last_block_lost=(
        "The last of more than 65,536 blocks of NF4 has no absmax.",
        _with("nf4_quantize", _without_the_last_block),
    ),
)


@wrong_step("impl.validation:require_finite")
def bad_numbers_placed_in_their_part(require: Callable[..., None], name: str, value: Tensor) -> None:
    """Numbers are looked at in parts of 65,536, and a place is that in its part."""
    for part in torch.split(value.flatten(), FIRST) if value.numel() > FIRST else [value]:
        require(name, part)
