"""Counts the bytes that stay on a device between training steps, and from them the bits of a projection's weight."""

from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.subjects.doors.devices import Estimate, Usage, Workload
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.workloads import BYTES, counts, scale_bytes, split

MASTER, INDEX = 4, 8
"""Bytes of a number in float32 and of one in int64."""
BLOCK = 512
"""Bytes that an allocator on CUDA rounds a tensor up to, which an estimate does as well."""
TABLES = BLOCK
"""Bytes of NF4's 16 levels and what tells them apart, which a process makes once: less than a block."""
TABLES_OF_SCALES = 2 * 1024
"""Bytes of the 256 levels of scales that are quantised in turn, and of what tells them apart."""
GRAIN = 256
"""The hand-written layers take numbers of tokens that are multiples of this."""
PRODUCTS, PRODUCT = 8, 64 * 2**10
"""The wide products of a block, forward and backward, and bytes that each may keep for cuBLASLt, which asks for them where it counts."""


def stays(work: Workload, taken: Estimate | Usage, on: str) -> list[Comparison]:
    """The bytes that stay, measured or estimated on a kind of device, as bits of a projection's weight, and measured the thawed tensors.

    In NF4 a weight has a code of 4 bits and its share of the scales (Dettmers et al. 2023, §3); else the bits of its dtype. Fewer fail as
    well: then less stays than is taken off here, which would hide as much of the weights.
    """
    base, trained = split(work, counts(work))
    projections = [count for name, count in base.items() if name.endswith("_proj.weight")]
    weights = sum(projections)
    frozen = sum(base.values()) - weights
    own = weights / 2 + sum(scale_bytes(count, work.double_quantize) for count in projections) if work.nf4 else BYTES[work.dtype] * weights
    beyond = 8 * (taken.resident - _beside(work, frozen, list(trained.values())) - own) / weights
    unsure = 8 * _unsure(work, len(base) + len(trained), on) / weights
    label = f"{work.backend}{', doubly quantised' * work.double_quantize}"
    found = [value_at_most(f"{label}: bits of a projection's weight beyond its codes and scales", beyond, unsure)]
    if isinstance(taken, Usage):
        found += same(f"{label}: frozen tensors that require a gradient", 0, taken.thawed)
    return found


def _beside(work: Workload, frozen: int, trained: list[int]) -> int:
    """Bytes of all else: frozen tensors; float32 masters and two moments; where a matrix of a row a trained tensor reads them, and back."""
    indices = len(trained) * max(trained) + sum(trained)
    beside = BYTES[work.dtype] * frozen + 3 * MASTER * sum(trained) + INDEX * indices
    return beside + (_of_layers(work, sum(trained)) if work.backend == "fused" else 0)


def _of_layers(work: Workload, trained: int) -> int:
    """Bytes that the hand-written layers have of their own: a gradient of the masters, copies of these in the dtype, with gradients and
    an order; biases and head norms side by side; and with NF4 two buffers, each for the largest weight that is dequantised there."""
    queries, keys, hidden, wide = work.heads * work.head_dim, work.kv_heads * work.head_dim, work.hidden, work.intermediate
    beside_products = {"qwen2": queries + 2 * keys, "qwen3": queries + keys}.get(work.family, 0)
    buffers = work.nf4 * (max((queries + 2 * keys) * hidden, 2 * wide * hidden) + max(hidden * queries, hidden * wide))
    width = BYTES[work.dtype]
    return (MASTER + 2 * width + INDEX) * trained + width * (work.layers * beside_products + buffers)


def _unsure(work: Workload, tensors: int, on: str) -> int:
    """Bytes at most of what is not told apart: the tables; an estimate's rounding, a tensor, which leaves room for the scalars of a graph
    too; the batch that the graph reads, and what cuBLASLt keeps."""
    tables = TABLES + work.double_quantize * TABLES_OF_SCALES
    if on == "cpu":
        return tables
    tokens = -(-work.batch * work.seq // GRAIN) * GRAIN
    packed = 2 * INDEX * tokens + (INDEX + 2 * MASTER) * work.batch + 2 * MASTER
    return tables + BLOCK * tensors + (packed + PRODUCTS * PRODUCT if work.backend == "fused" else 0)
