"""The table of elementary operations, under the names of contracts/operations.yaml, and the formulas of other conventions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import blackswan.reference.attention as attention
import blackswan.reference.bce as bce
import blackswan.reference.cross_entropy as cross_entropy
import blackswan.reference.embedding as embedding
import blackswan.reference.linear as linear
import blackswan.reference.lora as lora
import blackswan.reference.nf4 as nf4
import blackswan.reference.nf4_double as nf4_double
import blackswan.reference.optimiser as optimiser
import blackswan.reference.pool as pool
import blackswan.reference.residual as residual
import blackswan.reference.rms_norm as rms_norm
import blackswan.reference.rope as rope
import blackswan.reference.softmax as softmax
import blackswan.reference.swiglu as swiglu
from blackswan.reference.table import Array, Composition, Operation, Table
from blackswan.reference.training import WEIGHTS_DECAY

TABLE: dict[str, Operation] = {
    "embedding": Operation(embedding.forward, embedding.backward),
    "linear": Operation(linear.forward, linear.backward),
    "residual_add": Operation(residual.forward, residual.backward),
    "rms_norm": Operation(rms_norm.forward, rms_norm.backward),
    "qk_norm": Operation(rms_norm.forward, rms_norm.backward),
    "rope": Operation(rope.forward, rope.backward),
    "attention": Operation(attention.forward, attention.backward),
    "softmax": Operation(softmax.forward, softmax.backward),
    "swiglu": Operation(swiglu.forward, swiglu.backward),
    "pool": Operation(pool.forward, pool.backward),
    "weighted_cross_entropy": Operation(cross_entropy.weighted_forward, cross_entropy.weighted_backward, ("loss",)),
    "cross_entropy_per_sample": Operation(cross_entropy.per_sample_forward, cross_entropy.per_sample_backward, ("losses",)),
    "bce_with_logits": Operation(bce.forward, bce.backward, ("loss",)),
    "lm_cross_entropy": Operation(cross_entropy.lm_forward, cross_entropy.lm_backward, ("loss",)),
    "lora_linear": Operation(lora.forward, lora.backward),
    "lora_merge": Operation(lora.merge),
    "lora_unmerge": Operation(lora.unmerge),
    "nf4_quantize": Operation(nf4.quantize, None, ("codes", "absmax")),
    "nf4_dequantize": Operation(nf4.dequantize, None, ("weight",)),
    "nf4_linear": Operation(nf4.linear_forward, nf4.linear_backward),
    "nf4_double_quantize": Operation(nf4_double.quantize, None, ("codes", "scales", "offset")),
    "nf4_double_dequantize": Operation(nf4_double.dequantize, None, ("absmax",)),
    "adamw_8bit_step": Operation(optimiser.adamw_8bit_step, None, ("parameter", "exp_avg", "exp_avg_sq")),
    "adamw_step": Operation(optimiser.adamw_step, None, ("parameter", "exp_avg", "exp_avg_sq")),
    "clip_by_global_norm": Operation(optimiser.clip_by_global_norm, None, ("gradients", "norm")),
    "average_gradients": Operation(optimiser.average_gradients, None, ("gradient",)),
    "learning_rate_schedule": Operation(optimiser.learning_rate_schedule, None, ("rates",)),
}

CONVENTIONS: dict[tuple[str, str, str], Operation | Composition] = {
    ("weighted_cross_entropy", "reduction", "weights"): Operation(
        partial(cross_entropy.weighted_forward, reduction="weights"),
        partial(cross_entropy.weighted_backward, reduction="weights"),
        ("loss",),
    ),
    ("clip_by_global_norm", "eps", "1e-6"): Operation(partial(optimiser.clip_by_global_norm, eps=1e-6), None, ("gradients", "norm")),
    ("train_steps", "decay", "weights"): WEIGHTS_DECAY,
    ("multi_label_steps", "decay", "weights"): WEIGHTS_DECAY,
}
"""Operation, convention, value → what is computed then. Conventions that are not here change dtypes and rounding alone."""


def table_of(declared: Mapping[str, Mapping[str, str]]) -> Table:
    """The table with the formulas that are declared of operations by name."""
    chosen = {
        operation: CONVENTIONS[operation, name, value]
        for operation, declaration in declared.items()
        for name, value in declaration.items()
        if (operation, name, value) in CONVENTIONS
    }
    return {**TABLE, **chosen} if chosen else TABLE


F = TypeVar("F", bound=Callable[..., Any])


def reference_operation(
    name: str, backward: Callable[..., dict[str, Array]] | None = None, outputs: tuple[str, ...] = ("y",)
) -> Callable[[F], F]:
    """Enters a function in NumPy as the forward pass of an operation of a user's own, which an operations.yaml declares.

    forward and `backward` are those of `table.Operation`. ValueError where there is an operation of that name.
    """
    if name in TABLE:
        raise ValueError(f"the reference has an operation {name!r} already; expected another name")

    def enter(forward: F) -> F:
        TABLE[name] = Operation(forward, backward, outputs)
        return forward

    return enter
