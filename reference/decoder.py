"""Decoders of the Llama, Qwen2 and Qwen3 families, under the names and paths of Hugging Face's modules.

A block (Touvron et al. 2023, arXiv:2302.13971, §2.2): x ← x + attention(rms_norm(x)), then x ← x + mlp(rms_norm(x)). Qwen2 adds a bias to
the queries, keys and values; Qwen3 normalises each head of the queries and keys.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from blackswan.reference.rope import Scaling
from blackswan.reference.table import Array, Composition, Scalars
from blackswan.reference.tape import Tape

FAMILIES = ("llama", "qwen2", "qwen3")
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
INPUTS = ("input_ids", "mask", "labels", "class_weights")

Project = Callable[[str, str], str]
"""(path of the projection, name of its input) → name of its result."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes and scalars of a decoder; eps is RMSNorm's, theta the rotary base, tied whether the embedding is the head's weight.

    The last four scale the rotary frequencies (`rope.Scaling`).
    """

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    tied: bool
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: float = 8192.0

    def __post_init__(self) -> None:
        """ValueError for sizes that no decoder has."""
        if self.family not in FAMILIES:
            raise ValueError(f"family is {self.family!r}; expected one of {', '.join(FAMILIES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, kv_heads {self.kv_heads}; expected a multiple")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even number")

    @classmethod
    def from_scalars(cls, scalars: Scalars) -> Self:
        """The configuration among an operation's scalars and attributes; what else is there is left alone."""
        return cls(**{entry.name: scalars[entry.name] for entry in fields(cls) if entry.name in scalars})

    def rope_scaling(self) -> dict[str, float]:
        """The scalars of `rope` that scale the frequencies; none where nothing is scaled."""
        return {entry.name: getattr(self, entry.name) for entry in fields(Scaling)} if self.factor != 1.0 else {}

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of the seven projections of a block, in the order of the calls, by their path in it."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def has_bias(self, path: str) -> bool:
        """Whether the projection at that path has a bias."""
        return self.family == "qwen2" and path.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")


def parameter_shapes(scalars: Scalars) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every parameter."""
    config = DecoderConfig.from_scalars(scalars)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def _block_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (config.hidden,), "post_attention_layernorm.weight": (config.hidden,)}
    for path, (out_features, in_features) in config.projection_shapes().items():
        shapes[f"{path}.weight"] = (out_features, in_features)
        if config.has_bias(path):
            shapes[f"{path}.bias"] = (out_features,)
    if config.family == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def require_parameters(tape: Tape, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError for a parameter that is missing, has another shape, or belongs to no such model."""
    given = [name for name in tape.values if name not in INPUTS]
    for name, shape in shapes.items():
        if name not in tape.values:
            raise ValueError(f"parameter {name!r} is missing{nearest_name(name, given)}")
        if tape.values[name].shape != shape:
            raise ValueError(f"parameter {name!r} has shape {list(tape.values[name].shape)}; expected {list(shape)}")
    for name in given:
        if name not in shapes:
            raise ValueError(f"parameter {name!r} belongs to no such model{nearest_name(name, shapes)}")


def nearest_name(name: str, names: Collection[str]) -> str:
    """The end of an error about a name that is not among others: the nearest of them, if any is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; the nearest name is {near[0]!r}" if near else ""


def positions_of(mask: Array) -> Array:
    """The position of each token among its sample's real tokens, [batch, seq], so that padding on the left changes no angle."""
    positions: Array = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return positions


def linear_projection(tape: Tape, config: DecoderConfig) -> Project:
    """Projections as plain linear layers."""

    def project(path: str, x: str) -> str:
        bias = f"{path}.bias" if config.has_bias(path) else None
        return tape.call(path, "linear", x=x, weight=f"{path}.weight", bias=bias)

    return project


def self_attention(tape: Tape, config: DecoderConfig, path: str, x: str, project: Project) -> str:
    """Projections, head norms (Qwen3), rotation, attention and output projection at `path` (….self_attn)."""
    batch, seq = tape.values["mask"].shape

    def heads_of(name: str, heads: int) -> str:
        projected = project(f"{path}.{name}_proj", x)
        return tape.view(projected, "heads", (batch, seq, heads, config.head_dim))

    def positioned(name: str, heads: int) -> str:
        value = heads_of(name, heads)
        if config.family == "qwen3":
            value = tape.call(f"{path}.{name}_norm", "qk_norm", x=value, weight=f"{path}.{name}_norm.weight", eps=config.eps)
        return tape.call(f"{path}.{name}_rope", "rope", x=value, positions="positions", theta=config.theta, **config.rope_scaling())

    q, k, v = positioned("q", config.heads), positioned("k", config.kv_heads), heads_of("v", config.kv_heads)
    attended = tape.call(f"{path}.attention", "attention", q=q, k=k, v=v, mask="mask")
    return project(f"{path}.o_proj", tape.view(attended, "joined", (batch, seq, config.heads * config.head_dim)))


def mlp(tape: Tape, path: str, x: str, project: Project) -> str:
    """Gate, up, SwiGLU and down at `path` (….mlp)."""
    gate, up = project(f"{path}.gate_proj", x), project(f"{path}.up_proj", x)
    return project(f"{path}.down_proj", tape.call(f"{path}.swiglu", "swiglu", gate=gate, up=up))


def block(tape: Tape, config: DecoderConfig, path: str, x: str, project: Project) -> str:
    """One decoder block at `path` (model.layers.N)."""
    normalised = tape.call(f"{path}.input_layernorm", "rms_norm", x=x, weight=f"{path}.input_layernorm.weight", eps=config.eps)
    attended = self_attention(tape, config, f"{path}.self_attn", normalised, project)
    x = tape.call(f"{path}.attention_residual", "residual_add", x=x, branch=attended)
    second = f"{path}.post_attention_layernorm"
    normalised = tape.call(second, "rms_norm", x=x, weight=f"{second}.weight", eps=config.eps)
    return tape.call(f"{path}.mlp_residual", "residual_add", x=x, branch=mlp(tape, f"{path}.mlp", normalised, project))


def embed(tape: Tape) -> str:
    """The embedding of `input_ids`, [batch, seq, hidden]."""
    return tape.call("model.embed_tokens", "embedding", input_ids="input_ids", weight="model.embed_tokens.weight")


def final_norm(tape: Tape, config: DecoderConfig, x: str) -> str:
    """The norm after the last block."""
    return tape.call("model.norm", "rms_norm", x=x, weight="model.norm.weight", eps=config.eps)


def backbone(tape: Tape, config: DecoderConfig, project: Project) -> str:
    """Embedding, blocks and final norm of `input_ids` and `mask` [batch, seq] → the name of the hidden states [batch, seq, hidden]."""
    tape.put("positions", positions_of(tape.values["mask"]))
    x = embed(tape)
    for layer in range(config.layers):
        x = block(tape, config, f"model.layers.{layer}", x, project)
    return final_norm(tape, config, x)


def _forward(tape: Tape, scalars: Scalars) -> None:
    config = DecoderConfig.from_scalars(scalars)
    require_parameters(tape, parameter_shapes(scalars))
    hidden = backbone(tape, config, linear_projection(tape, config))
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    tape.outputs = {"hidden": hidden, "logits": tape.call("lm_head", "linear", x=hidden, weight=head, bias=None)}


DECODER_FORWARD = Composition(_forward)


def _language_model_loss(tape: Tape, scalars: Scalars) -> None:
    tape.compose("decoder_forward", DECODER_FORWARD, scalars)
    logits = tape.outputs["logits"]
    tape.outputs = {"loss": tape.call("loss", "lm_cross_entropy", logits=logits, input_ids="input_ids", mask="mask")}


LANGUAGE_MODEL_LOSS = Composition(_language_model_loss)
