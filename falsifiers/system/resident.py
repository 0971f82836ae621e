"""Counts the bytes that stay on a device between training steps with NF4, and from them the bits of a projection's weight."""

from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.subjects.doors.devices import Estimate, Usage, Workload
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.workloads import BYTES, counts, split
from blackswan.reference.classifier import frozen_names

BITS = 4 + 32 / 64
"""A code, and for each block of 64 weights an absmax in float32 (Dettmers et al. 2023, §3)."""
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


def stays(work: Workload, taken: Estimate | Usage, on: str) -> list[Comparison]:
    """The bytes that stay, measured or estimated on a kind of device, as bits of a projection's weight, and measured the thawed tensors.

    Fewer bits than NF4's fail as well: then less stays than is taken off here, which would hide as much of the weights.
    """
    sizes, (base, trained) = counts(work), split(work, counts(work))
    frozen = sum(sizes[name] for name in frozen_names(work.scalars))
    weights = sum(base.values()) - frozen
    beyond = 8 * (taken.resident - _beside(work, frozen, list(trained.values()))) / weights - BITS
    unsure = 8 * _unsure(work, len(sizes), on) / weights
    found = [value_at_most(f"{work.backend}: bits of a projection's weight beyond {BITS}", beyond, unsure)]
    if isinstance(taken, Usage):
        label = f"{work.backend}: frozen tensors that require a gradient"
        found += same(label, 0, taken.thawed)
    return found


def _beside(work: Workload, frozen: int, trained: list[int]) -> int:
    """Bytes of all else: frozen tensors; float32 masters and two moments; where a matrix of a row a trained tensor reads them, and back."""
    indices = len(trained) * max(trained) + sum(trained)
    beside = BYTES[work.dtype] * frozen + 3 * MASTER * sum(trained) + INDEX * indices
    return beside + (_of_layers(work, sum(trained)) if work.backend == "fused" else 0)


def _of_layers(work: Workload, trained: int) -> int:
    """Bytes that the hand-written layers have of their own: a gradient of the masters, copies of these in the dtype, with gradients and
    an order; biases and head norms side by side; and two buffers, each for the largest weight that is dequantised there."""
    queries, keys, hidden, wide = work.heads * work.head_dim, work.kv_heads * work.head_dim, work.hidden, work.intermediate
    beside_products = {"qwen2": queries + 2 * keys, "qwen3": queries + keys}.get(work.family, 0)
    buffers = max((queries + 2 * keys) * hidden, 2 * wide * hidden) + max(hidden * queries, hidden * wide)
    width = BYTES[work.dtype]
    return (MASTER + 2 * width + INDEX) * trained + width * (work.layers * beside_products + buffers)


def _unsure(work: Workload, tensors: int, on: str) -> int:
    """Bytes at most of what is not told apart: the tables; an estimate's rounding, a tensor, which leaves room for the scalars of a graph
    too; the batch that the graph reads, and what cuBLASLt keeps."""
    if on == "cpu":
        return TABLES
    tokens = -(-work.batch * work.seq // GRAIN) * GRAIN
    packed = 2 * INDEX * tokens + (INDEX + 2 * MASTER) * work.batch + 2 * MASTER
    return TABLES + BLOCK * tensors + (packed + PRODUCTS * PRODUCT if work.backend == "fused" else 0)
