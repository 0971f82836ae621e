"""What stays on a device between training steps with NF4: the bytes beside the projections' weights, and with them the bits of a weight."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, compare_exactly, value_at_most
from blackswan.reference.classifier import frozen_names, parameter_shapes, trainable_names
from blackswan.reference.table import Array

BITS = 4 + 32 / 64
"""A code, and for each block of 64 weights an absmax in float32 (Dettmers et al. 2023, §3)."""
BYTES = {"bfloat16": 2, "float32": 4}
MASTER, INDEX = 4, 8
"""Bytes of a number in float32 and of one in int64."""
BLOCK = 512
"""Bytes that an allocator on CUDA rounds a tensor up to, which an estimate does as well."""
TABLES = BLOCK
"""Bytes of NF4's 16 levels and what tells them apart, which a process makes once: less than a block."""
GRAIN = 256
"""The hand-written layers take numbers of tokens that are multiples of this."""
PRODUCTS, PRODUCT = 8, 64 * 2**10
"""The wide products of a block, forward and backward, and bytes that each may keep for cuBLASLt, which asks for them where it counts."""


def stays(run: Mapping[str, Any], answer: Mapping[str, Array]) -> list[Comparison]:
    """Of a run by `engine` its answer's `resident` bytes, as bits of a projection's weight, and where it was measured `thawed` tensors.

    `measured_on` is a kind of device, or None for an estimate for CUDA. Fewer bits than NF4's fail as well: then less stays than is taken
    off here, which would hide as much of the weights.
    """
    engine, sizes = run["engine"], {**run, "eps": 1e-6, "theta": 1e4, "alpha": 1.0, "pooling": "mean"}
    shapes = parameter_shapes(sizes)
    apart = {*trainable_names(sizes), *frozen_names(sizes)}
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name not in apart)
    beyond = 8 * (float(answer["resident"]) - _beside(sizes)) / weights - BITS
    found = [value_at_most(f"{engine}: bits of a projection's weight beyond {BITS}", beyond, 8 * _unsure(sizes, len(shapes)) / weights)]
    if "thawed" in answer:
        found.append(compare_exactly(f"{engine}: frozen tensors that require a gradient", np.asarray(0), answer["thawed"]))
    return found


def _beside(sizes: Mapping[str, Any]) -> int:
    """Bytes of all else: frozen tensors; float32 masters and two moments; where a matrix of a row a trained tensor reads them, and back."""
    shapes, width = parameter_shapes(sizes), BYTES[sizes["dtype"]]
    trained = [math.prod(shapes[name]) for name in trainable_names(sizes)]
    frozen = sum(math.prod(shapes[name]) for name in frozen_names(sizes))
    indices = len(trained) * max(trained) + sum(trained)
    beside = width * frozen + 3 * MASTER * sum(trained) + INDEX * indices
    return beside + (_of_layers(sizes, sum(trained)) if sizes["engine"] == "fused" else 0)


def _of_layers(sizes: Mapping[str, Any], trained: int) -> int:
    """Bytes that the hand-written layers have of their own: a gradient of the masters, copies of these in the dtype, with gradients and
    an order; biases and head norms side by side; and two rooms, each for the largest weight that is dequantised there."""
    queries, keys = (sizes[name] * sizes["head_dim"] for name in ("heads", "kv_heads"))
    hidden, wide = sizes["hidden"], sizes["intermediate"]
    beside_products = {"qwen2": queries + 2 * keys, "qwen3": queries + keys}.get(sizes["family"], 0)
    rooms = max((queries + 2 * keys) * hidden, 2 * wide * hidden) + max(hidden * queries, hidden * wide)
    width = BYTES[sizes["dtype"]]
    own: int = (MASTER + 2 * width + INDEX) * trained + width * (sizes["layers"] * beside_products + rooms)
    return own


def _unsure(sizes: Mapping[str, Any], tensors: int) -> int:
    """Bytes at most of what is not told apart: the tables; an estimate's rounding, a tensor, which leaves room for the scalars of a graph
    too; the batch that the graph reads, and what cuBLASLt keeps."""
    if sizes["measured_on"] == "cpu":
        return TABLES
    tokens = -(-sizes["batch"] * sizes["seq"] // GRAIN) * GRAIN
    packed = 2 * INDEX * tokens + (INDEX + 2 * MASTER) * sizes["batch"] + 2 * MASTER
    return TABLES + BLOCK * tensors + (packed + PRODUCTS * PRODUCT if sizes["engine"] == "fused" else 0)
