"""The elementary operations by name, on torch tensors: inputs, scalars and order of results as in contracts/operations.yaml."""

from collections.abc import Callable
from typing import Any

from blackswan.impl.operations import attention, layers, lora, losses, nf4, optimisation

OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        layers.embedding,
        layers.linear,
        layers.residual_add,
        layers.rms_norm,
        layers.qk_norm,
        attention.rope,
        attention.attention,
        layers.softmax,
        layers.swiglu,
        layers.pool,
        losses.weighted_cross_entropy,
        losses.cross_entropy_per_sample,
        losses.bce_with_logits,
        losses.lm_cross_entropy,
        lora.lora_linear,
        lora.lora_merge,
        lora.lora_unmerge,
        nf4.nf4_quantize,
        nf4.nf4_dequantize,
        nf4.nf4_linear,
        nf4.nf4_double_quantize,
        nf4.nf4_double_dequantize,
        optimisation.adamw_step,
        optimisation.clip_by_global_norm,
        optimisation.average_gradients,
        optimisation.learning_rate_schedule,
    )
}
