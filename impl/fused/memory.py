"""How much device memory a step of the hand-written layers needs, by what they keep (`impl.fused.layer.Kept`)."""

import math

import torch

from impl.classifier import Adaptation, base_shapes, trainable_shapes
from impl.config import DecoderConfig
from impl.decoder import projection_shapes
from impl.fused.packing import GRAIN
from impl.memory import THREADS, WORKSPACE_HOPPER, Estimate
from impl.nf4 import BLOCK_SIZE

_WORDS = {"embed_tokens.weight": "embedding", "norm.weight": "norms", ".bias": "biases"}


def estimate_fused(config: DecoderConfig, adaptation: Adaptation, batch: int, seq: int, dtype: torch.dtype) -> Estimate:
    """What one optimiser step of a micro-batch of `batch` samples of `seq` tokens needs on a Hopper GPU; parts as in `Estimate`."""
    width, tokens = dtype.itemsize, math.ceil(batch * seq / GRAIN) * GRAIN
    parts = _weights(config, adaptation, width) | _optimiser(config, adaptation, width)
    parts["activations"] = _kept(config, tokens, width, all_rows=adaptation.pooling == "mean", samples=batch)
    parts["working"] = tokens * width * (config.intermediate + 3 * config.hidden)
    parts["library_workspace"] = THREADS * WORKSPACE_HOPPER
    return Estimate(parts, sum(parts.values()))


def _weights(config: DecoderConfig, adaptation: Adaptation, width: int) -> dict[str, int]:
    parts = dict.fromkeys(("embedding", "norms", "biases", "projections", "nf4_codes", "nf4_absmax", "dequantised_weights"), 0)
    for name, shape in base_shapes(config).items():
        count = math.prod(shape)
        word = next((word for ending, word in _WORDS.items() if name.endswith(ending)), "projections")
        if word == "projections" and adaptation.nf4:
            parts["nf4_codes"] += count // 2
            parts["nf4_absmax"] += 4 * math.ceil(count / BLOCK_SIZE)
        else:
            parts[word] += width * count * (2 if word == "biases" else 1)
    if adaptation.nf4:
        parts["dequantised_weights"] = width * max(2 * config.intermediate * config.hidden, _attention_rows(config) * config.hidden)
    return parts


def _attention_rows(config: DecoderConfig) -> int:
    shapes = projection_shapes(config)
    return sum(shapes[f"self_attn.{name}_proj"][0] for name in "qkv")


def _optimiser(config: DecoderConfig, adaptation: Adaptation, width: int) -> dict[str, int]:
    shapes = trainable_shapes(config, adaptation)
    sizes = [math.prod(shape) for shape in shapes.values()]
    count, head = sum(sizes), sum(sizes[-2:])
    rows_and_places = 8 * (len(sizes) * max(sizes) + count)
    return {
        "lora": 4 * (count - head),
        "head": 4 * head,
        "moments": 2 * 4 * count,
        "optimiser_indices": rows_and_places + 8 * count,
        "gradients": (4 + 2 * width) * count,  # the flat vector, the rounded copies of the factors and their gradients
        "update": 4 * 4 * count,
    }


def _kept(config: DecoderConfig, tokens: int, width: int, *, all_rows: bool, samples: int) -> int:
    """Every block's input, joined projections, attention and its logarithms; what follows the last attention of the rows that are read."""
    queries = config.heads * config.head_dim
    first = tokens * (width * (config.hidden + _attention_rows(config) + queries) + 4 * (1 + config.heads))
    second = width * (config.hidden + 2 * config.intermediate) + 4
    rows = tokens if all_rows else samples
    return config.layers * first + ((config.layers - 1) * tokens + rows) * second
