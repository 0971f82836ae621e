"""Unsloth's Triton kernels and fast LoRA layers. They run on a GPU alone: `blackswan vet unsloth --device cuda --contiguous`.

The extra `unsloth` installs what they need. Unsloth's norm gives no gradient of its weight; `unsloth:FROZEN` has torch's, so that
the one of x is asked. `unsloth:QKV` is the layer of three projections, and `unsloth:ONE_LENGTH` turns by the kernel without indices.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from blackswan.falsifiers.subjects.libraries import installed
from blackswan.falsifiers.subjects.libraries.torch import linear
from blackswan.falsifiers.subjects.protocol import Lacks

KERNELS = ("rms_layernorm", "cross_entropy_loss", "swiglu", "rope_embedding", "fast_lora")


def _loaded() -> tuple[dict[str, ModuleType], str | None]:
    """Unsloth's modules by name, or the reason why there are none here."""
    if installed("unsloth") is None:
        return {}, "unsloth is not installed here; expected it and what it needs: pip install 'blackswan-contracts[unsloth]'"
    if not torch.cuda.is_available():
        return {}, "Unsloth's kernels run on a GPU, and there is none"
    try:
        import_module("unsloth")  # it patches transformers and has to come first
        return {name: import_module(f"unsloth.kernels.{name}") for name in KERNELS}, None
    except Exception as error:  # whatever it raises where a package or a GPU does not suit it
        return {}, f"unsloth cannot be imported here: {type(error).__name__}: {error}"


FOUND, WHY_NOT = _loaded()
from blackswan.falsifiers.subjects.libraries.transformers import rotary  # noqa: E402  # after Unsloth


def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which finds Unsloth lacking where it is not installed, and a tensor that is not on CUDA."""

    @wraps(function)
    def asked(*given: Any, **named: Any) -> Any:
        if WHY_NOT:
            raise Lacks(WHY_NOT)
        if not next(iter((*given, *named.values()))).is_cuda:
            raise Lacks("Unsloth's kernels run on a GPU; add --device cuda")
        return function(*given, **named)

    return asked


def _owning(y: Tensor) -> Tensor:
    """A result whose backward pass gets a copy of the gradient, for Unsloth's writes its own over it."""
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clone(memory_format=torch.contiguous_format))  # type: ignore[no-untyped-call]
    return y


def _with_gradient_of(frozen: Tensor, y: Tensor) -> Tensor:
    """y with torch's gradient of the parameter that `frozen` is computed from, which adds nothing to its values."""
    return y + (frozen - frozen.detach())


@on_gpu
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Fast_RMS_Layernorm`, as the Llama and Qwen2 models are given it."""
    return _owning(FOUND["rms_layernorm"].Fast_RMS_Layernorm.apply(x, weight, eps, False))


@on_gpu
def rms_norm_frozen(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with torch's gradient of the weight."""
    return _with_gradient_of(functional.rms_norm(x.detach(), weight.shape, weight, eps), rms_norm(x, weight.detach(), eps))


class _SwiGLU(torch.autograd.Function):
    """The two kernels, between which `LoRA_MLP` has the down projection. The second one writes over what it is given."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """`swiglu_fg_kernel`, which takes [batch, seq, width]."""
        ctx.save_for_backward(gate, up)
        width = gate.shape[-1]
        one, other = (each.contiguous().reshape(1, -1, width) for each in (gate, up))
        return FOUND["swiglu"].swiglu_fg_kernel(one, other).reshape(gate.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """`swiglu_DWf_DW_dfg_kernel`, which takes [rows, width]."""
        gate, up = ctx.saved_tensors
        copies = [each.clone(memory_format=torch.contiguous_format).reshape(-1, gate.shape[-1]) for each in (dy, gate, up)]
        _, dup, dgate = FOUND["swiglu"].swiglu_DWf_DW_dfg_kernel(*copies)
        return dgate.reshape(gate.shape), dup.reshape(gate.shape)


@on_gpu
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu_fg_kernel` and `swiglu_DWf_DW_dfg_kernel`."""
    return _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call,no-any-return]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Fast_RoPE_Embedding_QK` with an index for each token. It turns queries and keys where they lie, so that both are copies here."""
    batch, seq = x.shape[:2]
    queries, keys = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for _ in range(2))
    tables = (each.expand(batch, seq, -1).reshape(batch * seq, -1).contiguous() for each in (cos, sin))
    indices = torch.arange(batch * seq, dtype=torch.int32, device=x.device)
    y, _ = FOUND["rope_embedding"].Fast_RoPE_Embedding_QK.apply(queries, keys, *tables, indices)
    return _owning(y).transpose(1, 2)


def turned_alone(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Fast_RoPE_Embedding`, whose samples have the same positions."""
    if x.shape[0] != 1 or x.shape[1] == 1:
        raise Lacks("Unsloth's kernel without indices is asked one sample of several tokens, for all have the same positions")
    tables = (each.reshape(x.shape[1], -1).contiguous() for each in (cos, sin))
    return _owning(FOUND["rope_embedding"].Fast_RoPE_Embedding.apply(x.clone(memory_format=torch.contiguous_format), *tables))


def _copied(logits: Tensor) -> Tensor:
    """Logits as rows, in memory of their own: the backward pass puts the gradient there."""
    return logits.clone(memory_format=torch.contiguous_format)


@on_gpu
def cross_entropy_per_sample(logits: Tensor, labels: Tensor) -> Tensor:
    """`Fast_CrossEntropyLoss`, which is not reduced."""
    return FOUND["cross_entropy_loss"].Fast_CrossEntropyLoss.apply(_copied(logits), labels, 0, 0)  # type: ignore[no-any-return]


@on_gpu
def weighted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`fast_cross_entropy_loss`; it has no class weights."""
    return FOUND["cross_entropy_loss"].fast_cross_entropy_loss(_copied(logits)[None], labels[None])  # type: ignore[no-any-return]


@on_gpu
def lm_cross_entropy(logits: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """`fast_cross_entropy_loss` of the next tokens, those behind padding ignored."""
    wanted = torch.where(mask[:, 1:] & mask[:, :-1], input_ids[:, 1:], -100)
    return FOUND["cross_entropy_loss"].fast_cross_entropy_loss(_copied(logits[:, :-1]), wanted.contiguous())  # type: ignore[no-any-return]


@on_gpu
def lora_linear(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float) -> Tensor:
    """`LoRA_W`, with torch's gradient of the weight, which Unsloth freezes."""
    given = x.reshape(1, -1, x.shape[-1])
    y = FOUND["fast_lora"].LoRA_W.apply(given, weight.detach(), None, lora_a, lora_b, alpha / lora_a.shape[0])
    return _with_gradient_of(functional.linear(x.detach(), weight), _owning(y).reshape(*x.shape[:-1], -1))


@on_gpu
def lora_linear_of_three(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float) -> Tensor:
    """The first result of `LoRA_QKV`, with the same weights for all three; not in place, for x is the caller's."""
    given = x.clone(memory_format=torch.contiguous_format).reshape(1, -1, x.shape[-1])
    projection = (weight.detach(), None, lora_a, lora_b, alpha / lora_a.shape[0])
    y, *_ = FOUND["fast_lora"].LoRA_QKV.apply(given, *projection, *projection, *projection, False)
    return _with_gradient_of(functional.linear(x.detach(), weight), _owning(y).reshape(*x.shape[:-1], -1))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "qk_norm": rms_norm,
    "rope": on_gpu(rotary(turned)),
    "swiglu": swiglu,
    "weighted_cross_entropy": weighted_cross_entropy,
    "cross_entropy_per_sample": cross_entropy_per_sample,
    "lm_cross_entropy": lm_cross_entropy,
    "linear": on_gpu(linear),  # the layer below, which some claims compare with
    "lora_linear": lora_linear,
}
FROZEN = {"rms_norm": rms_norm_frozen, "qk_norm": rms_norm_frozen}
QKV = {"linear": on_gpu(linear), "lora_linear": lora_linear_of_three}
ONE_LENGTH = {"rope": on_gpu(rotary(turned_alone))}
