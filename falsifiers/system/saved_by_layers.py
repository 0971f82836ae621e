"""What a decoder's layer keeps for its backward pass on CUDA, counted from the formulas of its operations, against the estimate's."""

from collections.abc import Iterator
from dataclasses import replace

from blackswan.falsifiers.numeric.comparison import Comparison, value_inside
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import BYTES

BLOCK = 512
"""Bytes that CUDA's allocator rounds a tensor up to. There are as many tokens, so that nothing that has a row a token is rounded."""
SEEDS = 2 * BLOCK
"""The fused kernel of attention may keep where its random numbers stand, in two tensors."""
SINGLE = 4
"""Bytes of float32, which torch's own operations compute norms, rotations and activations in."""
QKV, GATES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
ADAPTED = {"q_v": ("q_proj", "v_proj"), "all": (*QKV, "o_proj", *GATES, "down_proj")}


def kept_by_a_layer(trial: Trial, work: Workload) -> Iterator[Comparison]:
    """A layer more on a card takes what its operations keep: torch's own in either dtype, and Triton's in one of them."""
    trial.memory.require_kernels()
    for by, dtype in (*(("torch", dtype) for dtype in BYTES), ("auto", list(BYTES)[trial.seed % 2])):
        one = replace(work, dtype=dtype, layers=1, batch=BLOCK // 64, seq=64, nf4=False, backend="torch", accumulation=1)
        few, more = (trial.memory.estimate(replace(one, layers=layers), "cuda", by=by).parts.get("activations", 0) for layers in (1, 2))
        least = BLOCK * _a_token(one, by) + _copies(one, by)
        yield value_inside(f"{by}, {dtype}: activations of a layer more on CUDA", more - few, least, least + SEEDS)


def _a_token(work: Workload, by: str) -> int:
    """Bytes of each token: of norms, rotations, attention, the updates' inputs and the activation."""
    width, queries, keys = BYTES[work.dtype], work.heads * work.head_dim, work.kv_heads * work.head_dim
    computed = SINGLE if by == "torch" else width
    heads = [(queries, work.heads), (keys, work.kv_heads)] if work.family == "qwen3" else []
    norms = sum(computed * features + SINGLE * rows for features, rows in [(work.hidden, 1)] * 2 + heads)  # input and 1/rms
    tables = SINGLE * 4 * (work.head_dim // 2) if by == "torch" else 0  # cosine and sine, for queries and for keys
    # Queries, keys, values, and where attention is fused result, logarithm of the sum and mask, else probabilities; and blind rows.
    fused = 4 * width * queries + SINGLE * work.heads + width * work.seq
    attention = 1 + (fused if work.dtype == "bfloat16" else 3 * width * queries + width * work.heads * work.seq)
    swiglu = computed * work.intermediate * (3 if by == "torch" else 2)  # gate and up, and torch's the activated gate
    return norms + tables + attention + swiglu + width * _of_updates(work)


def _of_updates(work: Workload) -> int:
    """Numbers of each token that updates keep: inputs, which queries, keys and values share as gate and up do, and products with A."""
    adapted, inputs = ADAPTED[work.targets], {"o_proj": work.heads * work.head_dim, "down_proj": work.intermediate}
    shared = work.hidden * sum(any(name in adapted for name in group) for group in (QKV, GATES))
    return shared + sum(size for name, size in inputs.items() if name in adapted) + work.rank * len(adapted)


def _copies(work: Workload, by: str) -> int:
    """Bytes of the factors, and for torch's norms of the weights, in the dtype that they are computed in where it is another one."""
    if work.dtype == "float32":
        return 0
    queries, keys = work.heads * work.head_dim, work.kv_heads * work.head_dim
    shapes = dict(zip(QKV, ((size, work.hidden) for size in (queries, keys, keys)), strict=True))
    shapes |= {"o_proj": (work.hidden, queries), "down_proj": (work.hidden, work.intermediate)}
    shapes |= dict.fromkeys(GATES, (work.intermediate, work.hidden))
    factors = [BYTES[work.dtype] * work.rank * size for name in ADAPTED[work.targets] for size in shapes[name]]
    norms = [work.hidden] * 2 + [work.head_dim] * 2 * (work.family == "qwen3")
    return sum(-(-size // BLOCK) * BLOCK for size in factors + [SINGLE * size for size in norms] * (by == "torch"))
