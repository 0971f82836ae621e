"""Random arguments of every elementary operation, for the tests of the reference; floats are float64."""

from collections.abc import Callable
from typing import Any

import numpy as np

Arguments = tuple[dict[str, Any], dict[str, Any]]
"""(inputs, scalars)."""


def padding(random: np.random.Generator, batch: int, seq: int) -> np.ndarray:
    """Masks with at least one real token: full, padded left or padded right, a side for each sample."""
    lengths, left = random.integers(1, seq + 1, batch), random.integers(0, 2, batch)
    starts = np.where(left == 1, seq - lengths, 0)[:, None]
    tokens = np.arange(seq)
    return (tokens >= starts) & (tokens < starts + lengths[:, None])


def _leading(random: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(n) for n in random.integers(1, 4, random.integers(1, 4)))


def _size(random: np.random.Generator, low: int = 1, high: int = 6) -> int:
    return int(random.integers(low, high + 1))


def embedding(random: np.random.Generator) -> Arguments:
    vocab, hidden = _size(random), _size(random)
    return {"input_ids": random.integers(0, vocab, (2, _size(random))), "weight": random.standard_normal((vocab, hidden))}, {}


def linear(random: np.random.Generator) -> Arguments:
    n, m = _size(random), _size(random)
    bias = random.standard_normal(m) if random.integers(2) else None
    return {"x": random.standard_normal((*_leading(random), n)), "weight": random.standard_normal((m, n)), "bias": bias}, {}


def residual_add(random: np.random.Generator) -> Arguments:
    shape = (*_leading(random), _size(random))
    return {"x": random.standard_normal(shape), "branch": random.standard_normal(shape)}, {}


def rms_norm(random: np.random.Generator) -> Arguments:
    n = _size(random)
    return {"x": random.standard_normal((*_leading(random), n)), "weight": random.standard_normal(n)}, {
        "eps": float(random.uniform(1e-6, 0.5))
    }


def qk_norm(random: np.random.Generator) -> Arguments:
    n = _size(random)
    return {"x": random.standard_normal((2, 3, 2, n)), "weight": random.standard_normal(n)}, {"eps": 1e-6}


def rope(random: np.random.Generator) -> Arguments:
    batch, seq, half = _size(random, 1, 2), _size(random), _size(random, 1, 3)
    return {"x": random.standard_normal((batch, seq, 2, 2 * half)), "positions": random.integers(0, 100, (batch, seq))}, {"theta": 1e4}


def attention(random: np.random.Generator) -> Arguments:
    batch, seq, kv_heads, groups, head_dim = (_size(random, 1, 3) for _ in range(5))
    keys = (batch, seq, kv_heads, head_dim)
    inputs = {
        "q": random.standard_normal((batch, seq, kv_heads * groups, head_dim)),
        "k": random.standard_normal(keys),
        "v": random.standard_normal(keys),
        "mask": padding(random, batch, seq),
    }
    return inputs, {}


def softmax(random: np.random.Generator) -> Arguments:
    return {"x": random.standard_normal((*_leading(random), _size(random)))}, {}


def swiglu(random: np.random.Generator) -> Arguments:
    shape = (*_leading(random), _size(random))
    return {"gate": 2 * random.standard_normal(shape), "up": random.standard_normal(shape)}, {}


def pool(random: np.random.Generator) -> Arguments:
    batch, seq = _size(random, 1, 3), _size(random)
    mode = str(random.choice(["mean", "last", "first"]))
    return {"x": random.standard_normal((batch, seq, _size(random))), "mask": padding(random, batch, seq)}, {"mode": mode}


def weighted_cross_entropy(random: np.random.Generator) -> Arguments:
    batch, classes = _size(random), _size(random, 2)
    weights = random.uniform(0.2, 3, classes) if random.integers(2) else None
    return {
        "logits": random.standard_normal((batch, classes)),
        "labels": random.integers(0, classes, batch),
        "class_weights": weights,
    }, {}


def bce_with_logits(random: np.random.Generator) -> Arguments:
    shape = (_size(random), _size(random))
    return {"logits": random.standard_normal(shape), "targets": random.integers(0, 2, shape).astype(float)}, {}


def lm_cross_entropy(random: np.random.Generator) -> Arguments:
    batch, seq, vocab = _size(random, 1, 3), _size(random, 2), _size(random)
    mask = padding(random, batch, seq)
    mask[0] = True
    return {"logits": random.standard_normal((batch, seq, vocab)), "input_ids": random.integers(0, vocab, (batch, seq)), "mask": mask}, {}


def _factors(random: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    n, m, rank = _size(random), _size(random), _size(random, 1, 3)
    factors = {"lora_a": random.standard_normal((rank, n)), "lora_b": random.standard_normal((m, rank))}
    return {"weight": random.standard_normal((m, n)), **factors}, {"alpha": float(random.uniform(0.5, 8))}


def lora_linear(random: np.random.Generator) -> Arguments:
    inputs, scalars = _factors(random)
    m, n = inputs["weight"].shape
    bias = random.standard_normal(m) if random.integers(2) else None
    return {"x": random.standard_normal((*_leading(random), n)), **inputs, "bias": bias}, scalars


def nf4_quantize(random: np.random.Generator) -> Arguments:
    return {"weight": random.standard_normal((_size(random), _size(random, 1, 40)))}, {"block_size": 64}


def _quantized(random: np.random.Generator) -> tuple[dict[str, Any], int, int]:
    rows, columns = _size(random), _size(random, 1, 40)
    codes = random.integers(0, 256, (rows * columns + 1) // 2).astype(np.uint8)
    return {"codes": codes, "absmax": random.uniform(0.1, 2, -(-rows * columns // 64))}, rows, columns


def nf4_dequantize(random: np.random.Generator) -> Arguments:
    inputs, rows, columns = _quantized(random)
    return inputs, {"rows": rows, "columns": columns, "block_size": 64}


def nf4_linear(random: np.random.Generator) -> Arguments:
    inputs, rows, columns = _quantized(random)
    bias = random.standard_normal(rows) if random.integers(2) else None
    scalars = {"in_features": columns, "out_features": rows, "block_size": 64}
    return {"x": random.standard_normal((*_leading(random), columns)), **inputs, "bias": bias}, scalars


def nf4_double_quantize(random: np.random.Generator) -> Arguments:
    return {"absmax": random.uniform(0.1, 2, _size(random, 1, 600))}, {}


def nf4_double_dequantize(random: np.random.Generator) -> Arguments:
    blocks = _size(random, 1, 600)
    scales = random.uniform(0.1, 2, -(-blocks // 256))
    return {"codes": random.integers(0, 256, blocks).astype(np.uint8), "scales": scales, "offset": np.array(random.uniform(0.1, 2))}, {}


def adamw_step(random: np.random.Generator) -> Arguments:
    count = _size(random, 1, 40)
    values = {name: random.standard_normal(count) for name in ("parameter", "gradient", "exp_avg")}
    scalars = {"step": _size(random, 1, 50), "learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    return {**values, "exp_avg_sq": random.uniform(0, 2, count)}, scalars


def clip_by_global_norm(random: np.random.Generator) -> Arguments:
    return {"gradients": random.standard_normal((_size(random), _size(random)))}, {"max_norm": float(random.uniform(0.1, 6))}


def average_gradients(random: np.random.Generator) -> Arguments:
    micro = _size(random)
    return {"gradients": random.standard_normal((micro, _size(random))), "counts": random.integers(1, 9, micro)}, {}


def learning_rate_schedule(random: np.random.Generator) -> Arguments:
    kind = str(random.choice(["constant", "linear", "cosine"]))
    return {}, {"total_steps": _size(random, 1, 60), "peak": 2e-4, "warmup_fraction": float(random.uniform(0, 0.5)), "kind": kind}


DRAW: dict[str, Callable[[np.random.Generator], Arguments]] = {
    function.__name__: function
    for function in (
        embedding, linear, residual_add, rms_norm, qk_norm, rope, attention, softmax, swiglu, pool, weighted_cross_entropy, bce_with_logits,
        lm_cross_entropy, lora_linear, nf4_quantize, nf4_dequantize, nf4_linear, nf4_double_quantize, nf4_double_dequantize, adamw_step,
        clip_by_global_norm, average_gradients, learning_rate_schedule,
    )
} | {"lora_merge": _factors, "lora_unmerge": _factors}  # fmt: skip
