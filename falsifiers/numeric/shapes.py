"""Sizes of published models, which claims and benchmarks attack or measure in their true shapes."""

from collections.abc import Mapping
from typing import Any

SHAPES: Mapping[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "family": "qwen2",
        "vocab": 151_936,
        "hidden": 896,
        "intermediate": 4864,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "head_dim": 64,
        "theta": 1e6,
    },
    "qwen3-4b": {
        "family": "qwen3",
        "vocab": 151_936,
        "hidden": 2560,
        "intermediate": 9728,
        "layers": 36,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "theta": 1e6,
    },
}
"""The published configurations (Qwen2.5-0.5B and Qwen3-4B, config.json), both with tied embeddings."""
