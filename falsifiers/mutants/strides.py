"""Operations that read a tensor's memory in order, whatever its strides are."""

from collections.abc import Callable, Mapping
from typing import Any

from blackswan.falsifiers.mutants.registry import wrong_steps

Operations = Mapping[str, Callable[..., Any]]


def _in_order(tensor: Any) -> Any:
    """The first numbers of the tensor's memory, in its shape."""
    strides = tensor.new_empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, strides)


def _reads(operation: str, *names: str) -> Callable[[Operations], Operations]:
    def wrong(operations: Operations) -> Operations:
        def call(**given: Any) -> Any:
            return operations[operation](**{name: _in_order(value) if name in names else value for name, value in given.items()})

        return {**operations, operation: call}

    return wrong


def _residual_gradient(operations: Operations) -> Operations:
    def call(**given: Any) -> Any:
        found = operations["residual_add"](**given)
        if found.requires_grad:
            found.register_hook(_in_order)
        return found

    return {**operations, "residual_add": call}


wrong_steps(
    "impl.dispatch:OPERATIONS",
    strides_of_nf4_scales=("Scales of double quantisation are read in the order of memory.", _reads("nf4_double_dequantize", "scales")),
    strides_of_positions=("Positions of rotary embeddings are read in the order of memory.", _reads("rope", "positions")),
    strides_of_masks=("The pooling's mask is read in the order of memory.", _reads("pool", "mask")),
    strides_of_moments=("AdamW reads the first moments in the order of memory.", _reads("adamw_step", "exp_avg")),
    strides_of_cotangents=("The gradient of a residual sum is read in the order of memory.", _residual_gradient),
)
