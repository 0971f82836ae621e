"""One decoder block, forward and backward, on packed tokens. Norms and the activation's product are computed again, not kept."""

from dataclasses import dataclass

import torch
from torch import Tensor

from impl.config import DecoderConfig
from impl.decoder import Layer
from impl.fused.factors import Factors
from impl.fused.linear import FusedLinear, Scratch
from impl.kernels.attention import attention_backward, attention_forward
from impl.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from impl.kernels.rope import qk_norm_rope, qk_norm_rope_backward
from impl.kernels.swiglu import swiglu, swiglu_backward
from impl.projection import Projection


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


def groups(layer: Layer) -> list[list[Projection]]:
    """The projections of a block by the input that they read."""
    attention, mlp = layer.self_attn, layer.mlp
    return [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


class FusedLayer:
    """A block over the parameters of `layer`."""

    def __init__(self, layer: Layer, config: DecoderConfig, factors: Factors, scratch: Scratch, dtype: torch.dtype) -> None:
        self.config = config
        self.qkv, self.o, self.gate_up, self.down = (FusedLinear(group, factors, scratch, dtype) for group in groups(layer))
        self.norm, self.middle_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        attention = layer.self_attn
        self.head_norms = (attention.q_norm.weight, attention.k_norm.weight) if config.qk_norm else (None, None)

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
        gate, up = kept.gate_up.chunk(2, dim=1)
        dproduct = self.down.backward(dx, kept.projected[3], lambda: swiglu(gate, up))
        assert dproduct is not None
        swiglu_backward(dproduct, gate, up, dgate=gate, dup=up)
        del dproduct
        dy = self.gate_up.backward(kept.gate_up, kept.projected[2], lambda: rms_norm(kept.middle, self.middle_norm, self.config.eps)[0])
        assert dy is not None
        dmiddle = rms_norm_backward(dy, kept.middle, self.middle_norm, kept.middle_rstd, add=dx)
        attended = self.o.backward(dmiddle, kept.projected[1], lambda: _at(kept.attended.flatten(1), kept.rows))
        assert attended is not None
        attended, dmiddle = (_spread(value, kept.rows, len(kept.x)) for value in (attended, dmiddle))
        dqkv = self._turned_back(kept, attended.view_as(kept.attended), tokens)
        dy = self.qkv.backward(dqkv, kept.projected[0], lambda: rms_norm(kept.x, self.norm, self.config.eps)[0], needs_input)
        return rms_norm_backward(dy, kept.x, self.norm, kept.rstd, add=dmiddle) if dy is not None else None

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        q, k, v = torch.split(qkv.view(len(qkv), -1, config.head_dim), [config.heads, config.kv_heads, config.kv_heads], dim=1)
        return q, k, v

    def _turned(self, qkv: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._heads(qkv)
        config, table = self.config, tokens.table
        turned = [
            qk_norm_rope(value, tokens.positions, config.theta, weight=weight, eps=config.eps, table=table)[0]
            for value, weight in zip((q, k), self.head_norms, strict=True)
        ]
        return turned[0], turned[1], v

    def _turned_back(self, kept: Kept, dy: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self._turned(kept.qkv, tokens)
        dqkv = torch.empty_like(kept.qkv)
        raw, out, config = self._heads(kept.qkv), self._heads(dqkv), self.config
        forward = (q, k, v, kept.attended, kept.logarithms, tokens.bounds, tokens.longest)
        dq, dk, _ = attention_backward(dy, *forward, dv=out[2])
        for gradient, value, weight, into in zip((dq, dk), raw[:2], self.head_norms, out[:2], strict=True):
            qk_norm_rope_backward(
                gradient, value, tokens.positions, config.theta, weight=weight, eps=config.eps, table=tokens.table, out=into
            )
        return dqkv


def _at(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]


def _spread(gradient: Tensor, rows: Tensor | None, tokens: int) -> Tensor:
    """The gradient of all tokens, zero except at the rows. A place without a sample may name another's row: its gradient is zero."""
    if rows is None:
        return gradient
    return gradient.new_zeros(tokens, gradient.shape[1]).index_add_(0, rows, gradient)
