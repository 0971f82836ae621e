"""The architecture in a Hugging Face config.json: what is computed is read, and what would be computed otherwise is refused by its key.

The keys are those that transformers 5.23 reads for these families, at construction or in a forward pass
(tests/test_architecture.py records them). A key that it does not read changes nothing and is passed over.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from blackswan.impl.config import FAMILIES, DecoderConfig, RopeScaling

ENCODER_FAMILIES = (
    *("albert", "bert", "big_bird", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert"),
    *("flaubert", "funnel", "longformer", "mobilebert", "modernbert", "mpnet", "nomic_bert", "nystromformer", "rembert", "roberta"),
    *("roberta-prelayernorm", "roformer", "squeezebert", "xlm", "xlm-roberta", "xlm-roberta-xl"),
)
FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "use_sliding_window": (False, None),
    "use_bidirectional_attention": (False, None),
    "partial_rotary_factor": (1.0, None),
    **dict.fromkeys(
        (
            "quantization_config",
            "attention_chunk_size",
            "per_layer_config",
            "kv_sharing_modes",
            "auto_map",
            "text_config",
            "decoder",
            "generator",
        ),
        (None,),
    ),
}
"""Keys that would change the computation → the values with which nothing changes; the first one is named in errors."""
LLAMA3: Mapping[str, str] = {
    **{name: name for name in ("factor", "low_freq_factor", "high_freq_factor")},
    "original_max_position_embeddings": "original_positions",
}
"""The keys of the rope_type llama3, each of which must be there → fields of `RopeScaling`."""
DEFAULT_THETA = 10_000.0
QWEN3_HEAD_DIM = 128
LARGEST = 2**40
"""Of a size: no tensor is as large, and layers are refused long before by the tensors that they would need."""


def read_architecture(values: Mapping[str, Any], path: Path, names: Mapping[str, str] | None = None) -> DecoderConfig:
    """The architecture in the content of a config.json; `path` is named in errors, and the keys as the file calls them in `names`.

    Raises a ValueError for an encoder, an unknown model type, a missing key and anything that the decoder does not compute.
    """
    return _Reading(values, path, names or {}).decoder()


def to_huggingface(config: DecoderConfig) -> dict[str, Any]:
    """The content of a config.json, as transformers 4 and 5 read it."""
    return {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,
        **_rope(config),
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_positions,
    }


def _rope(config: DecoderConfig) -> dict[str, Any]:
    """The rotary parameters by the keys of transformers 5, and where they are scaled by that of transformers 4 too."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_parameters": {"rope_theta": config.theta, "rope_type": "default"}}
    values = {key: getattr(scaling, name) for key, name in LLAMA3.items()}
    found = {"rope_theta": config.theta, "rope_type": "llama3", **values}
    return {"rope_parameters": found, "rope_scaling": found}


class _Reading:
    """A config.json whose every reading names the file and the key in its errors."""

    def __init__(self, values: Mapping[str, Any], path: Path, names: Mapping[str, str]) -> None:
        self.values, self.path, self.names = values, path, names

    def decoder(self) -> DecoderConfig:
        family = self._family()
        for key, allowed in FIXED.items():
            if not any(_same(self.values.get(key, allowed[0]), value) for value in allowed):
                self._refuse(key, f"{allowed[0]!r} or no such key: nothing else is implemented")
        self._require_full_attention(family)
        try:
            return DecoderConfig(
                family=family,
                vocab=self._count("vocab_size"),
                hidden=self._count("hidden_size"),
                intermediate=self._count("intermediate_size"),
                layers=self._count("num_hidden_layers"),
                heads=self._count("num_attention_heads"),
                kv_heads=self._kv_heads(family),
                head_dim=self._head_dim(family),
                eps=self._number("rms_norm_eps"),
                theta=self._theta(),
                rope_scaling=self._rope_scaling(),
                tied=self._tied(),
                max_positions=self._count("max_position_embeddings"),
            )
        except ValueError as error:
            if str(error).startswith(str(self.path)):
                raise
            raise ValueError(f"{self.path}: {error}") from None

    def _family(self) -> str:
        kind = self.values.get("model_type")
        if kind in ENCODER_FAMILIES:
            self._refuse("model_type", f"a decoder ({', '.join(FAMILIES)}); this is an encoder, without causal attention")
        if kind not in FAMILIES:
            near = difflib.get_close_matches(str(kind), FAMILIES, n=1)
            self._refuse("model_type", f"one of {', '.join(FAMILIES)}" + (f" (nearest: {near[0]})" if near else ""))
        return str(kind)

    def _require_full_attention(self, family: str) -> None:
        """Qwen's configurations name a window beside `use_sliding_window: false`; Llama has no such switch."""
        types = self.values.get("layer_types")
        if types is not None and (not isinstance(types, list) or any(kind != "full_attention" for kind in types)):
            self._refuse("layer_types", "full attention in every layer: nothing else is implemented")
        if types is not None and len(types) != self._count("num_hidden_layers"):
            self._refuse("layer_types", f"one entry a layer, {self._count('num_hidden_layers')}")
        if family == "llama" and self.values.get("sliding_window") is not None:
            self._refuse("sliding_window", "null or no such key: sliding windows are not implemented")

    def _kv_heads(self, family: str) -> int:
        """All heads where a Llama has no such key, or null is said; transformers' Qwen classes have a default of their own, 32."""
        if self.values.get("num_key_value_heads") is None and (family == "llama" or "num_key_value_heads" in self.values):
            return self._count("num_attention_heads")
        return self._count("num_key_value_heads")

    def _head_dim(self, family: str) -> int:
        """The hidden size shared out where the key is absent; 128 for Qwen3, the default of transformers' class. Null is Llama's alone."""
        if "head_dim" in self.values and not (family == "llama" and self.values["head_dim"] is None):
            return self._count("head_dim")
        if family == "qwen3":
            return QWEN3_HEAD_DIM
        hidden, heads = self._count("hidden_size"), self._count("num_attention_heads")
        if hidden % heads:
            self._refuse("hidden_size", f"a multiple of num_attention_heads ({heads}), since there is no head_dim")
        return hidden // heads

    def _theta(self) -> float:
        """The base of the rotary angles."""
        key, found = self._rotary()
        outer, inner = self.values.get("rope_theta"), found.get("rope_theta", self.values.get("rope_theta"))
        if outer is not None and inner != outer:
            self._refuse("rope_theta", f"the value of {key}.rope_theta, {inner!r}")
        if inner is not None and not _is_number(inner):
            self._refuse(key if "rope_theta" in found else "rope_theta", "a number for rope_theta")
        return DEFAULT_THETA if inner is None else float(inner)

    def _rope_scaling(self) -> RopeScaling | None:
        """What transformers makes of the keys of llama3; its fall-backs for one that is missing are refused."""
        key, found = self._rotary()
        if _rope_type(found) != "llama3":
            return None
        outer = self.values.get("original_max_position_embeddings")
        for name in LLAMA3:
            if name not in found:
                self._refuse(key, f"a {name} beside the rope_type 'llama3'")
            if not _is_number(found[name]):
                self._refuse(key, f"a number for {name}")
        if outer is not None and outer != found["original_max_position_embeddings"]:
            self._refuse("original_max_position_embeddings", f"that of {key}, {found['original_max_position_embeddings']!r}")
        try:
            return RopeScaling(**{field: found[name] for name, field in LLAMA3.items()})
        except ValueError as error:
            self._refuse(key, f"parameters of llama3 that fit together: {error}")

    def _rotary(self) -> tuple[str, Mapping[str, Any]]:
        """The rotary parameters and their key. transformers 5 keeps them in `rope_parameters`, and reads `rope_scaling` as those."""
        scaling, parameters = (self.values.get(key) for key in ("rope_scaling", "rope_parameters"))
        if scaling and parameters and scaling != parameters:
            self._refuse("rope_scaling", f"the same as rope_parameters, {parameters!r}, or no such key")
        key, found = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters or {})
        if not isinstance(found, Mapping):
            self._refuse(key, "an object with rope_type and rope_theta")
        kind = _rope_type(found)
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(LLAMA3 if kind == "llama3" else ())}
        if kind not in ("default", "llama3") or not set(found) <= known:
            self._refuse(key, "the rope_type 'default' with a rope_theta, or 'llama3' with its four numbers: nothing else is implemented")
        if found.get("partial_rotary_factor", 1.0) != 1.0:
            self._refuse(key, "a partial_rotary_factor of 1.0: nothing else is implemented")
        return key, found

    def _tied(self) -> bool:
        tied = self.values.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            self._refuse("tie_word_embeddings", "true or false")
        return tied

    def _count(self, key: str) -> int:
        value = self._present(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            self._refuse(key, f"an integer from 1 to {LARGEST}")
        return value

    def _number(self, key: str) -> float:
        value = self._present(key)
        if not _is_number(value):
            self._refuse(key, "a number")
        return float(value)

    def _present(self, key: str) -> Any:
        if key not in self.values:
            near = difflib.get_close_matches(key, list(self.values), n=1)
            raise ValueError(f"{self.path}: no key {self.names.get(key, key)!r}" + (f"; the nearest is {near[0]!r}" if near else ""))
        return self.values[key]

    def _refuse(self, key: str, expected: str) -> NoReturn:
        raise ValueError(f"{self.path}: {self.names.get(key, key)} is {self.values.get(key)!r}; expected {expected}")


def _rope_type(found: Mapping[str, Any]) -> Any:
    """As transformers reads it; `type` is its older name."""
    return found.get("rope_type", found.get("type", "default"))


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and a truth value only to a truth value: 1 is not true, and 0 is not false."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300
