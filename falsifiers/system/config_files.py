"""config.json of a decoder: one architecture in the spellings that transformers 4 and 5 write and read, and what such a file says."""

from collections.abc import Mapping
from typing import Any

from blackswan.falsifiers.numeric.generators import Generator

KEYS = {
    "family": "model_type",
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
"""Scalars of scaled rotary frequencies, by the keys of the rope_type llama3."""
SCALED: dict[str, Any] = {
    "factor": 8 + 2.0**-20,
    "low_freq_factor": 2 + 2.0**-20,
    "high_freq_factor": 3 + 2.0**-20,
    "original_positions": 24,
}
"""Among the wavelengths of small heads some are shorter than 8 positions, some longer than 12, some between. Factors have many digits."""
DEFAULT_THETA = 10_000.0
QWEN3_HEAD_DIM = 128
"""Where there is no such key: the default of transformers' class."""
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters")
BESIDE = {"hidden_act": "silu", "max_position_embeddings": 512, "pad_token_id": 0}


def plain(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Every key as transformers 4 writes it."""
    return {key: scalars[name] for name, key in KEYS.items()} | {"rope_theta": scalars["theta"]} | BESIDE


def beside_nothing(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters as transformers 5 writes them, beside a rope_scaling without content, which says nothing."""
    scaled = {"rope_type": "llama3", **{key: scalars[name] for name, key in SCALING.items()}} if scalars.get("factor", 1.0) != 1.0 else {}
    found = plain(scalars)
    return found | {"rope_parameters": {"rope_type": "default", "rope_theta": found.pop("rope_theta")} | scaled, "rope_scaling": {}}


def spelled(rng: Generator, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """One of the spellings: keys at their defaults are there, null or not there, and others are that change nothing."""
    found = plain(scalars)
    llama = scalars["family"] == "llama"
    absent = {
        "head_dim": scalars["head_dim"] == (QWEN3_HEAD_DIM if scalars["family"] == "qwen3" else scalars["hidden"] / scalars["heads"]),
        "num_key_value_heads": llama and scalars["kv_heads"] == scalars["heads"],
        "tie_word_embeddings": not scalars["tied"],
        "hidden_act": True,
    }
    for key in (key for key, able in absent.items() if able and rng.integers(4)):
        del found[key]
    null = {"head_dim": llama and absent["head_dim"], "num_key_value_heads": scalars["kv_heads"] == scalars["heads"]}
    found |= dict.fromkeys(key for key, able in null.items() if able and rng.integers(3) == 0)
    neutral: dict[str, Any] = {"attention_bias": False, "mlp_bias": False} if llama else {"use_sliding_window": False, "sliding_window": 4}
    neutral |= {"layer_types": ["full_attention"] * scalars["layers"], "use_cache": False}
    found |= {key: value for key, value in neutral.items() if rng.integers(2)}
    return found | _rotary(rng, scalars, found)


def _rotary(rng: Generator, scalars: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters beside `rope_theta`, or in its place."""
    given = found.pop("rope_theta")
    theta = {"rope_theta": int(given) if rng.integers(2) and given == int(given) else given}
    if scalars.get("factor", 1.0) != 1.0:
        scaling = {str(rng.choice(["rope_type", "type"])): "llama3", **{key: scalars[name] for name, key in SCALING.items()}}
        ways = [theta | {"rope_scaling": scaling}, {"rope_parameters": scaling | theta}]
        return ways[int(rng.integers(2))]
    ways = [
        theta,
        theta | {"rope_scaling": None},
        {"rope_parameters": {"rope_type": "default"} | theta},
        theta | {"rope_parameters": dict(theta)},
    ]
    return {} if theta["rope_theta"] == DEFAULT_THETA and rng.integers(3) == 0 else ways[int(rng.integers(len(ways)))]


def others(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says beside the rotary parameters, each under its key."""
    return {key: value for key, value in config.items() if key not in ROTARY}


def said(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars that a config.json says, by either version's keys; a KeyError for one that neither has."""
    scalars = {name: config[key] for name, key in KEYS.items() if config.get(key) is not None}
    scalars.setdefault("tied", False)
    scalars.setdefault("kv_heads", scalars["heads"])
    scalars.setdefault("head_dim", QWEN3_HEAD_DIM if scalars["family"] == "qwen3" else scalars["hidden"] // scalars["heads"])
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scalars["theta"] = float(rotary.get("rope_theta", config.get("rope_theta", DEFAULT_THETA)))
    scaled = rotary.get("rope_type", rotary.get("type")) == "llama3"
    return scalars | ({name: float(rotary[key]) for name, key in SCALING.items()} if scaled else {"factor": 1.0})
