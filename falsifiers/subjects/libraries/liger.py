"""Liger's Triton kernels, as its patched Qwen2 and Llama models call them. They run on a GPU alone: `blackswan vet liger --device cuda`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from liger_kernel.ops import LigerCrossEntropyFunction, LigerRMSNormFunction, LigerSiLUMulFunction, LigerSoftmaxFunction
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from torch import Tensor

from blackswan.falsifiers.subjects.libraries.transformers import rotary
from blackswan.falsifiers.subjects.protocol import Lacks


def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which a tensor elsewhere than on CUDA finds lacking."""

    @wraps(function)
    def asked(*given: Any, **named: Any) -> Any:
        if not next(iter((*given, *named.values()))).is_cuda:
            raise Lacks("Liger's kernels run on a GPU; add --device cuda")
        return function(*given, **named)

    return asked


@on_gpu
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`LigerRMSNorm` as the Llama and Qwen2 models are given it."""
    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False, None)  # type: ignore[no-any-return]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`liger_rotary_pos_emb`. It turns queries and keys where they lie, so that both are copies here."""
    queries, keys = (x.transpose(1, 2).clone() for _ in range(2))
    return liger_rotary_pos_emb(queries, keys, cos, sin)[0].transpose(1, 2)  # type: ignore[no-any-return]


@on_gpu
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`LigerSwiGLUMLP` between its projections."""
    return LigerSiLUMulFunction.apply(gate, up)  # type: ignore[no-any-return]


@on_gpu
def softmax(x: Tensor) -> Tensor:
    """`LigerSoftmax`, over the last axis."""
    return LigerSoftmaxFunction.apply(x)  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """`LigerCrossEntropyLoss`, which puts the gradient where the logits were, so that they are a copy here."""
    given = logits.clone() if logits.requires_grad else logits.detach().clone()
    return LigerCrossEntropyFunction.apply(given, labels, class_weights, -100, 0.0, 0.0, reduction)[0]  # type: ignore[no-any-return]


@on_gpu
def weighted_cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """`LigerCrossEntropyLoss`, whose mean is over the weights where there are any."""
    return cross_entropy(logits, labels, class_weights)


@on_gpu
def cross_entropy_per_sample(logits: Tensor, labels: Tensor) -> Tensor:
    """`LigerCrossEntropyLoss`, not reduced."""
    return cross_entropy(logits, labels, reduction="none")


@on_gpu
def lm_cross_entropy(logits: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """`LigerCrossEntropyLoss` of the next tokens, those behind padding ignored."""
    wanted = torch.where(mask[:, 1:] & mask[:, :-1], input_ids[:, 1:], -100)
    return cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten())


OPERATIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "qk_norm": rms_norm,
    "rope": on_gpu(rotary(turned)),
    "swiglu": swiglu,
    "softmax": softmax,
    "weighted_cross_entropy": weighted_cross_entropy,
    "cross_entropy_per_sample": cross_entropy_per_sample,
    "lm_cross_entropy": lm_cross_entropy,
}
