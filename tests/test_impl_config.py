"""Configurations: what is read, what is refused, and the defaults against the hyperparameter rules' numbers."""

from pathlib import Path
from typing import Any

import pytest

from blackswan.impl.architecture import read_architecture
from blackswan.impl.config import ClassifyConfig, DecoderConfig

PATH = Path("folder/config.json")
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "sliding_window": 32,
    "use_sliding_window": False,
}


def read(**changes: Any) -> DecoderConfig:
    values = {**QWEN2, **changes}
    return read_architecture({key: value for key, value in values.items() if value != "absent"}, PATH)


def test_names_the_nearest_model_type() -> None:
    with pytest.raises(ValueError, match=r"config\.json: model_type.*'qwen22'.*nearest: qwen2"):
        read(model_type="qwen22")


def test_names_a_missing_key_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"config\.json: no key 'rms_norm_eps'; the nearest is 'rms_norm_epsilon'"):
        read(rms_norm_eps="absent", rms_norm_epsilon=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pooling": "lst"}, "pooling is 'lst'.*nearest: last"),
        ({"class_weights": "balancd"}, "class_weights is 'balancd'.*nearest: balanced"),
        ({"padding_side": "lft"}, "padding_side is 'lft'.*nearest: left"),
        ({"lora_rnk": 8}, "'lora_rnk'.*nearest is 'lora_rank'"),
        ({"lora_targets": "q_proj,v_prj"}, r"lora_targets is 'q_proj,v_prj'.*nearest: v_proj"),
    ],
)
def test_refuses_bad_settings(values: dict[str, Any], message: str) -> None:
    """Which values are refused, CMD-SETTINGS-BOUNDS asks: here it is which one is nearest."""
    with pytest.raises(ValueError, match=message):
        ClassifyConfig.from_mapping(values)
