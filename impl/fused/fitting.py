"""Which architectures the hand-written layers can compute; without Triton, and before a model is made."""

import math
from collections.abc import Sequence

from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import projection_shapes
from blackswan.impl.nf4 import BLOCK_SIZE

JOINED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
"""Projections that read one input, whose weights lie one below the other."""
WIDEST_HEAD = 256


def why_not_weights(config: DecoderConfig, nf4: bool, double_quantize: bool) -> str | None:
    """Why the layers of that architecture, with weights held so, cannot be computed; None where they can."""
    if double_quantize:
        return "double_quantize is on, and its kernels read an absmax of NF4 as a float32"
    if config.head_dim > WIDEST_HEAD:
        return f"head_dim is {config.head_dim}, and its attention holds a head of at most {WIDEST_HEAD} in registers"
    shapes = projection_shapes(config)
    for group in JOINED if nf4 else ():
        if not blocks_align([math.prod(shapes[name]) for name in group], BLOCK_SIZE):
            sizes = ", ".join(f"{name} {list(shapes[name])}" for name in group)
            return f"NF4 blocks of {BLOCK_SIZE} do not end where the next of the joined projections begins ({sizes})"
    return None


def blocks_align(elements: Sequence[int], block: int) -> bool:
    """Whether weights of so many elements can lie one below the other in whole blocks, and in whole bytes of pairs."""
    return all(count % (2 * block) == 0 for count in elements[:-1])
