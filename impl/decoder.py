"""Llama, Qwen2 and Qwen3 decoders. Parameter names and call paths are those of Hugging Face."""

import math

import torch
from torch import Tensor, nn

from blackswan.impl.config import DecoderConfig
from blackswan.impl.dispatch import call
from blackswan.impl.projection import Projection, frozen
from blackswan.impl.tensors import Converted, Shapes, Tensors, seeded, shapes_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the decoder, in the order of the model."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab, config.hidden)}
    for index in range(config.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden,)
    if not config.tied:
        shapes[HEAD] = (config.vocab, config.hidden)
    return shapes


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (config.hidden,)}
    for name, (rows, columns) in projection_shapes(config).items():
        shapes[f"{name}.weight"] = (rows, columns)
        if config.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj")):
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes | {"post_attention_layernorm.weight": (config.hidden,)}


def projection_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of the seven projections of a layer, by their name in the layer."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (queries, config.hidden),
        "self_attn.k_proj": (keys, config.hidden),
        "self_attn.v_proj": (keys, config.hidden),
        "self_attn.o_proj": (config.hidden, queries),
        "mlp.gate_proj": (config.intermediate, config.hidden),
        "mlp.up_proj": (config.intermediate, config.hidden),
        "mlp.down_proj": (config.hidden, config.intermediate),
    }


def random_tensors(config: DecoderConfig, seed: int) -> dict[str, Tensor]:
    """Float32 tensors for a model without a checkpoint: norms one, biases zero, matrices N(0, 0.02²) as the families initialise them."""
    generator = seeded(seed)
    return {name: _random_tensor(name, shape, generator) for name, shape in parameter_shapes(config).items()}


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) > 1:
        return 0.02 * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=torch.float32, device="cpu")


def require_tensors(expected: Shapes, tensors: Tensors, source: str) -> None:
    """Raises as `require_shapes` does; of tensors that are read when they are asked for, none is read."""
    require_shapes(expected, shapes_of(tensors), source)


def require_shapes(expected: Shapes, shapes: Shapes, source: str) -> None:
    """Raises a ValueError that names the first tensor that is missing, unexpected or of another shape."""
    missing, extra = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing:
        raise ValueError(f"{source}: no tensor {missing[0]!r} ({len(missing)} missing); are these the weights of that architecture?")
    if extra:
        raise ValueError(f"{source}: unexpected tensor {extra[0]!r} ({len(extra)} in all); the architecture does not have it")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(f"{source}: {name} has shape {list(shapes[name])}, the architecture says {list(shape)}")


class Norm(nn.Module):
    """RMSNorm over the last axis: the operation `rms_norm`, or `qk_norm` per head."""

    def __init__(self, path: str, weight: Tensor, eps: float, operation: str = "rms_norm") -> None:
        super().__init__()
        self.path, self.eps, self.operation = path, eps, operation
        self.weight = frozen(weight)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., features] → the same shape."""
        y: Tensor = call(self.path, self.operation, x=x, weight=self.weight, eps=self.eps)
        return y


class Attention(nn.Module):
    """Projections, per-head norms (Qwen3), rotary embedding and grouped-query attention of one layer."""

    def __init__(self, config: DecoderConfig, path: str, tensors: Tensors, nf4: bool) -> None:
        super().__init__()
        self.path, self.config = path, config
        self.q_proj = Projection.take(f"{path}.q_proj", tensors, nf4)
        self.k_proj = Projection.take(f"{path}.k_proj", tensors, nf4)
        self.v_proj = Projection.take(f"{path}.v_proj", tensors, nf4)
        self.o_proj = Projection.take(f"{path}.o_proj", tensors, nf4)
        if config.qk_norm:
            self.q_norm = Norm(f"{path}.q_norm", tensors[f"{path}.q_norm.weight"], config.eps, "qk_norm")
            self.k_norm = Norm(f"{path}.k_norm", tensors[f"{path}.k_norm.weight"], config.eps, "qk_norm")

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """X [batch, seq, hidden] → [batch, seq, hidden]."""
        q, k, v = (projection(x).unflatten(-1, (-1, self.config.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = call(f"{self.path}.q_rope", "rope", x=q, positions=positions, **self.config.rotary)
        k = call(f"{self.path}.k_rope", "rope", x=k, positions=positions, **self.config.rotary)
        y: Tensor = call(f"{self.path}.attention", "attention", q=q, k=k, v=v, mask=mask)
        output: Tensor = self.o_proj(y.flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU feed-forward network of one layer."""

    def __init__(self, path: str, tensors: Tensors, nf4: bool) -> None:
        super().__init__()
        self.path = path
        self.gate_proj = Projection.take(f"{path}.gate_proj", tensors, nf4)
        self.up_proj = Projection.take(f"{path}.up_proj", tensors, nf4)
        self.down_proj = Projection.take(f"{path}.down_proj", tensors, nf4)

    def forward(self, x: Tensor) -> Tensor:
        """X [batch, seq, hidden] → [batch, seq, hidden]."""
        y: Tensor = self.down_proj(call(f"{self.path}.swiglu", "swiglu", gate=self.gate_proj(x), up=self.up_proj(x)))
        return y


class Layer(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: DecoderConfig, path: str, tensors: Tensors, nf4: bool) -> None:
        super().__init__()
        self.path = path
        self.input_layernorm = Norm(f"{path}.input_layernorm", tensors[f"{path}.input_layernorm.weight"], config.eps)
        self.self_attn = Attention(config, f"{path}.self_attn", tensors, nf4)
        self.post_attention_layernorm = Norm(
            f"{path}.post_attention_layernorm", tensors[f"{path}.post_attention_layernorm.weight"], config.eps
        )
        self.mlp = FeedForward(f"{path}.mlp", tensors, nf4)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """X [batch, seq, hidden] → [batch, seq, hidden]."""
        attended = self.self_attn(self.input_layernorm(x), mask, positions)
        x = call(f"{self.path}.attention_residual", "residual_add", x=x, branch=attended)
        y: Tensor = call(f"{self.path}.mlp_residual", "residual_add", x=x, branch=self.mlp(self.post_attention_layernorm(x)))
        return y


class Body(nn.Module):
    """Embedding, blocks and final norm: what Hugging Face calls `model`.

    Each of `tensors` is asked for once, in the order of the model; one that goes to NF4 is let go before the next is asked for.
    """

    def __init__(self, config: DecoderConfig, tensors: Tensors, nf4: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = frozen(tensors["model.embed_tokens.weight"])
        self.layers = nn.ModuleList(Layer(config, f"model.layers.{index}", tensors, nf4) for index in range(config.layers))
        self.norm = Norm("model.norm", tensors["model.norm.weight"], config.eps)

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """input_ids and mask [batch, seq] → [batch, seq, hidden]. A token's position is the number of real tokens before it."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        x: Tensor = call("model.embed_tokens", "embedding", input_ids=input_ids, weight=self.embed_tokens.weight)
        for layer in self.layers:
            x = layer(x, mask, positions)
        y: Tensor = self.norm(x)
        return y


class Decoder(nn.Module):
    """A decoder with its language-model head, frozen.

    `tensors` are exactly those of `parameter_shapes(config)`; they are converted to `dtype` on `device`, one at a time. With `nf4` the
    seven projections of every layer are kept in NF4. Raises a ValueError where the tensors are not the architecture's.
    """

    def __init__(
        self, config: DecoderConfig, tensors: Tensors, *, dtype: torch.dtype, device: torch.device | str = "cpu", nf4: bool = False
    ) -> None:
        super().__init__()
        require_tensors(parameter_shapes(config), tensors, "decoder")
        placed = Converted(tensors, dtype=dtype, device=device)
        self.config = config
        self.model = Body(config, placed, nf4)
        if not config.tied:
            self.lm_head = nn.Module()
            self.lm_head.weight = frozen(placed["lm_head.weight"])

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """input_ids and mask [batch, seq] → hidden states after the final norm, [batch, seq, hidden]."""
        hidden: Tensor = self.model(input_ids, mask)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [batch, seq, hidden] → [batch, seq, vocab]."""
        weight = self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight
        y: Tensor = call("lm_head", "linear", x=hidden, weight=weight)
        return y

    def loss(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Mean next-token loss, float32."""
        logits = self.logits(self(input_ids, mask))
        loss: Tensor = call("loss", "lm_cross_entropy", logits=logits, input_ids=input_ids, mask=mask)
        return loss


def parameter_count(config: DecoderConfig) -> int:
    """Number of parameters of the architecture, tied ones once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())
