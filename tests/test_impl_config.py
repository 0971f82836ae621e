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


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"model_type": "qwen22"}, "model_type", "'qwen22'.*nearest: qwen2"),
        ({"layer_types": 3}, "layer_types", "3; expected full attention in every layer"),
        ({"layer_types": [["full_attention"]]}, "layer_types", "expected full attention in every layer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers", "2.0"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size", "32"),
        ({"num_key_value_heads": 3}, "heads 4", "kv_heads 3"),
        ({"head_dim": 7}, "head_dim", "7"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps", "'1e-6'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'"),
    ],
)
def test_refuses_what_it_does_not_compute(changes: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {key}.*{value}"):
        read(**changes)


def test_names_a_missing_key_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"config\.json: no key 'rms_norm_eps'; the nearest is 'rms_norm_epsilon'"):
        read(rms_norm_eps="absent", rms_norm_epsilon=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pooling": "lst"}, "pooling is 'lst'.*nearest: last"),
        ({"class_weights": [1.0, 1.0]}, "class_weights.*expected 5 positive numbers"),
        ({"class_weights": "balancd"}, "class_weights is 'balancd'.*nearest: balanced"),
        ({"class_weights": "balanced", "multi_label": True}, "class_weights is 'balanced' with multi_label"),
        ({"padding_side": "lft"}, "padding_side is 'lft'.*nearest: left"),
        ({"dtype": "float16"}, "dtype is 'float16'.*expected one of float32, bfloat16"),
        ({"double_quantize": True}, "double_quantize is True without quantize_nf4"),
        ({"seed": 2**63}, "seed is 9223372036854775808: expected an integer from 0 to 9223372036854775807"),
        ({"batch_size": 2**63}, "batch_size is 9223372036854775808: expected 9223372036854775807 at most"),
        ({"lora_rnk": 8}, "'lora_rnk'.*nearest is 'lora_rank'"),
        ({"lora_targets": "q_proj,v_prj"}, r"lora_targets is 'q_proj,v_prj'.*nearest: v_proj"),
    ],
)
def test_refuses_bad_settings(values: dict[str, Any], message: str) -> None:
    """Which values are refused, test_contracts_cli asks of every setting, beside the rules: here it is what is said of them."""
    with pytest.raises(ValueError, match=message):
        ClassifyConfig.from_mapping(values)
