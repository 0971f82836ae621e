"""One decoder block, forward and backward, on packed tokens. Norms and the activation's product are computed again, not kept."""

from dataclasses import dataclass

import torch
from torch import Tensor

from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import Layer
from blackswan.impl.fused.factors import Factors
from blackswan.impl.fused.linear import FusedLinear, Shared
from blackswan.impl.kernels.attention import attention_backward, attention_forward
from blackswan.impl.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from blackswan.impl.kernels.rope import qk_norm_rope, qk_norm_rope_backward
from blackswan.impl.kernels.swiglu import swiglu, swiglu_backward
from blackswan.impl.projection import Projection


@dataclass(frozen=True)
class Tokens:
    """Where the tokens stand: positions [tokens] and their angles, the bounds of sequences, the most tokens that one may have.

    rows [samples] are the only tokens that anybody reads after the last block, None where all are read.
    """

    positions: Tensor
    table: Tensor
    bounds: Tensor
    longest: int
    rows: Tensor | None = None


@dataclass(frozen=True)
class Stream:
    """The residual stream x [tokens, hidden], its norm y, and 1 / rms of its rows."""

    x: Tensor
    y: Tensor
    rstd: Tensor


@dataclass(frozen=True)
class Kept:
    """What a block keeps for its backward pass. The gradient of `gate_up` is written over it.

    With `rows`, everything after the attention is of those tokens only.
    """

    x: Tensor
    rstd: Tensor
    qkv: Tensor
    attended: Tensor
    logarithms: Tensor
    middle: Tensor
    middle_rstd: Tensor
    gate_up: Tensor
    projected: tuple[Tensor | None, ...]
    rows: Tensor | None


BUFFERS = (0, 1, 0, 1)
"""Where the weights of a block's products are dequantised: neighbours do not share a buffer."""


def groups(layer: Layer) -> list[list[Projection]]:
    """The projections of a block by the input that they read."""
    attention, mlp = layer.self_attn, layer.mlp
    return [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


class FusedLayer:
    """A block over the parameters of `layer`."""

    def __init__(self, layer: Layer, config: DecoderConfig, factors: Factors, shared: Shared, dtype: torch.dtype) -> None:
        self.config, self._side = config, shared.side
        made = [FusedLinear(group, factors, buffer, shared, dtype) for group, buffer in zip(groups(layer), BUFFERS, strict=True)]
        self.qkv, self.o, self.gate_up, self.down = made
        # Kernels read memory in order; what the caller's tensors are parts of may lie between their numbers.
        self.norm, self.middle_norm = (norm.weight.contiguous() for norm in (layer.input_layernorm, layer.post_attention_layernorm))
        self.head_norms = _head_norms(layer, config)

    def products(self) -> list[FusedLinear]:
        """In the order of the forward pass; the backward pass's is reversed."""
        return [self.qkv, self.o, self.gate_up, self.down]

    def forward(self, stream: Stream, tokens: Tokens, next_norm: Tensor, last: bool) -> tuple[Kept, Stream]:
        """The stream after the block, normed by the next block's weight; after the last block only of the rows that are read."""
        eps = self.config.eps
        qkv, projected = self.qkv.forward(stream.y)
        attended, logarithms = attention_forward(*self._turned(qkv, tokens), tokens.bounds, tokens.longest)
        rows = tokens.rows if last else None
        branch, projected_o = self.o.forward(_at(attended.flatten(1), rows))
        middle, y, middle_rstd = add_rms_norm(branch, _at(stream.x, rows), self.middle_norm, eps)
        gate_up, projected_middle = self.gate_up.forward(y)
        branch, projected_down = self.down.forward(swiglu(*gate_up.chunk(2, dim=1)))
        after = Stream(*add_rms_norm(branch, middle, next_norm, eps))
        every = (projected, projected_o, projected_middle, projected_down)
        return Kept(stream.x, stream.rstd, qkv, attended, logarithms, middle, middle_rstd, gate_up, every, rows), after

    def backward(self, kept: Kept, dx: Tensor, tokens: Tokens, needs_input: bool) -> Tensor | None:
        """From the gradient of the stream after the block to that of the stream before it, None unless that is needed."""
        dmiddle = self._mlp_backward(kept, dx)
        attended, rows, x = kept.attended.flatten(1), kept.rows, kept.x
        dy = self.o.backward(dmiddle, kept.projected[1], lambda: _at(attended, rows))
        assert dy is not None
        dy, dmiddle = (_spread(value, rows, len(x)) for value in (dy, dmiddle))
        dqkv = self._attention_backward(kept, dy.view_as(kept.attended), tokens)
        dy = self.qkv.backward(dqkv, kept.projected[0], lambda: rms_norm(x, self.norm, self.config.eps)[0], needs_input)
        return rms_norm_backward(dy, x, self.norm, kept.rstd, add=dmiddle) if dy is not None else None

    def _mlp_backward(self, kept: Kept, dx: Tensor) -> Tensor:
        gate, up = kept.gate_up.chunk(2, dim=1)
        dproduct = self.down.backward(dx, kept.projected[3], lambda: swiglu(gate, up))
        assert dproduct is not None
        self._side.finish()  # it may read gate and up, over which their gradients are written
        swiglu_backward(dproduct, gate, up, dgate=gate, dup=up)
        del dproduct
        middle = kept.middle
        dy = self.gate_up.backward(kept.gate_up, kept.projected[2], lambda: rms_norm(middle, self.middle_norm, self.config.eps)[0])
        assert dy is not None
        return rms_norm_backward(dy, middle, self.middle_norm, kept.middle_rstd, add=dx)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The heads of queries and keys, one after the other, and those of values."""
        config = self.config
        qk, v = torch.split(qkv.view(len(qkv), -1, config.head_dim), [config.heads + config.kv_heads, config.kv_heads], dim=1)
        return qk, v

    def _turned(self, qkv: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        qk, v = self._heads(qkv)
        config = self.config
        turned, _ = qk_norm_rope(qk, tokens.positions, config.theta, weight=self.head_norms, eps=config.eps, table=tokens.table)
        return *self._split(turned), v

    def _split(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        q, k = torch.split(qk, [self.config.heads, self.config.kv_heads], dim=1)
        return q, k

    def _attention_backward(self, kept: Kept, dy: Tensor, tokens: Tokens) -> Tensor:
        """The gradient of `kept.qkv`."""
        q, k, v = self._turned(kept.qkv, tokens)
        dqkv = torch.empty_like(kept.qkv)
        (raw, _), (out, dv), config = self._heads(kept.qkv), self._heads(dqkv), self.config
        turned = torch.empty_like(raw, memory_format=torch.contiguous_format)
        dq, dk = self._split(turned)
        attention_backward(dy, q, k, v, kept.attended, kept.logarithms, tokens.bounds, tokens.longest, dq=dq, dk=dk, dv=dv)
        qk_norm_rope_backward(
            turned, raw, tokens.positions, config.theta, weight=self.head_norms, eps=config.eps, table=tokens.table, out=out
        )
        return dqkv


def _head_norms(layer: Layer, config: DecoderConfig) -> Tensor | None:
    """The norms' weights of each query head and then of each key head, [heads + kv_heads, head_dim]; None without these norms."""
    if not config.qk_norm:
        return None
    q, k = layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight
    return torch.cat([q.expand(config.heads, -1), k.expand(config.kv_heads, -1)])


def _at(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]


def _spread(gradient: Tensor, rows: Tensor | None, tokens: int) -> Tensor:
    """The gradient of all tokens, zero except at the rows. A place without a sample may name another's row: its gradient is zero."""
    if rows is None:
        return gradient
    return gradient.new_zeros(tokens, gradient.shape[1]).index_add_(0, rows, gradient)
