"""The same decoder in other words of the format `.apr`: keys by other names, defaults left out, flags and metadata that change nothing."""

import json
from collections.abc import Mapping
from typing import Any

from blackswan.falsifiers.numeric.apr_format import ROW_MAJOR
from blackswan.falsifiers.numeric.generators import Generator

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_layers": ("num_layers", "num_hidden_layers", "n_layers"),
    "num_heads": ("num_heads", "num_attention_heads"),
    "num_kv_heads": ("num_kv_heads", "num_key_value_heads"),
    "max_position_embeddings": ("max_position_embeddings", "context_length"),
    "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps"),
    "tied_embeddings": ("tied_embeddings", "tie_word_embeddings"),
}
"""What writers of the format call a size (paiml/aprender: exporters, trainer, importers of GGUF)."""
UNSAID = (0x20, 0x40, 0x80, 0x100, 0x200, ROW_MAJOR)
"""Flags that change nothing: quantised, filterbank, model card, streaming, vocabulary; older files do not say that they are row-major."""
POSITIONS = 32_768
"""The limit of positions of a file that says none."""
LARGE = 2**20 + 1
"""Bytes of a vocabulary in the metadata, which some writers put there."""


def spelled(rng: Generator, said: Mapping[str, Any]) -> dict[str, Any]:
    """Each key by one of its names, or left out where its value is the format's default."""
    defaults = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_kv_heads": said["num_heads"]}
    defaults |= {"head_dim": said["head_dim"], "max_position_embeddings": POSITIONS}
    kept = {key: value for key, value in said.items() if key not in defaults or value != defaults[key] or rng.integers(2)}
    found = {str(rng.choice(NAMES.get(key, (key,)))): value for key, value in kept.items() if key != "architecture"}
    return found | _family(rng, str(said["architecture"]))


def _family(rng: Generator, family: str) -> dict[str, Any]:
    """The family by its name or its class's; beside it other programs say what kind of model it is, or what reads it."""
    of_a_class = (CLASSES[family].replace("ForCausalLM", use) for use in ("ForCausalLM", "Model", "ForSequenceClassification"))
    words = (family, family.upper(), *of_a_class)
    ways: tuple[dict[str, Any], ...] = (
        {"architecture": str(rng.choice(words))},
        {"hf_architecture": str(rng.choice(words))},
        {"model_type": str(rng.choice(words))},
        {"architecture": family, "hf_architecture": CLASSES[family], "model_type": "transformer_lm"},
    )
    return ways[int(rng.integers(len(ways)))]


def text(rng: Generator, said: Mapping[str, Any]) -> bytes:
    """Metadata whose hidden size is repeated, of which the last one counts, with keys that are null and, in some cases, much more.

    That a file is no shard and has no experts may be said in words.
    """
    unused = "n_embd" if "hidden_size" in said else "hidden_size"
    more = {"vocabulary": "x" * LARGE} if rng.integers(4) == 0 else {}
    plain: dict[str, Any] = {"num_experts": (None, 0)[int(rng.integers(2))], "sharding": (None, False, {})[int(rng.integers(3))]}
    values = {**said, "chat_template": None, **plain, **more, unused: None}
    return b'{"hidden_size": 7, "n_embd": 7, ' + json.dumps(values).encode()[1:]


def flags(rng: Generator) -> int:
    """Any of those that change nothing."""
    return sum(flag for flag in UNSAID if rng.integers(2))
