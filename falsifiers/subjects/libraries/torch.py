"""torch's own operations, losses, optimiser and clipping, called as its documentation says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from blackswan.falsifiers.subjects.protocol import Lacks


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`."""
    return functional.linear(x, weight, bias)


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.embedding`."""
    return functional.embedding(input_ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch.nn.functional.rms_norm`."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def softmax(x: Tensor) -> Tensor:
    """`torch.softmax` over the last axis."""
    return torch.softmax(x, -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`torch.nn.functional.silu` and a product."""
    return functional.silu(gate) * up


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`scaled_dot_product_attention`, causal, grouped, with the keys of the mask."""
    seq = q.shape[1]
    seen = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril() & mask[:, None, None, :]
    queries, keys, values = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    return torch.where(seen.any(-1).transpose(1, 2)[..., None], found, 0)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.cross_entropy`, whose mean is over the weights where there are any."""
    return functional.cross_entropy(logits, labels, class_weights)


def cross_entropy_per_sample(logits: Tensor, labels: Tensor) -> Tensor:
    """`torch.nn.functional.cross_entropy`, not reduced."""
    return functional.cross_entropy(logits, labels, reduction="none")


def bce_with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """`torch.nn.functional.binary_cross_entropy_with_logits`."""
    return functional.binary_cross_entropy_with_logits(logits, targets)


def lm_cross_entropy(logits: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """`torch.nn.functional.cross_entropy` of the next tokens, those behind padding ignored."""
    wanted = torch.where(mask[:, 1:] & mask[:, :-1], input_ids[:, 1:], -100)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), ignore_index=-100)


def adamw_step(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: int, form: dict[str, bool], **settings: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of `torch.optim.AdamW` in one of its forms, from the moments given."""
    moved = torch.nn.Parameter(parameter.clone())
    moved.grad = gradient.clone()
    betas = settings["beta1"], settings["beta2"]
    optimiser = torch.optim.AdamW(
        [moved], lr=settings["learning_rate"], betas=betas, eps=settings["eps"], weight_decay=settings["weight_decay"], **form
    )
    state = {"step": torch.tensor(float(step - 1)), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
    optimiser.state[moved] = state
    with torch.enable_grad():
        optimiser.step()
    return moved.detach(), state["exp_avg"], state["exp_avg_sq"]


def adamw(**form: bool) -> Callable[..., Any]:
    """`adamw_step` in a form, with the parameters of the operation."""

    def step(
        parameter: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: int,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        return adamw_step(parameter, gradient, exp_avg, exp_avg_sq, step=step, form=form, **settings)

    return step


def clip_by_global_norm(gradients: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """`torch.nn.utils.clip_grad_norm_`, which adds 1e-6 to the norm that it divides by."""
    parameters = [torch.nn.Parameter(torch.zeros_like(row)) for row in gradients]
    for parameter, row in zip(parameters, gradients, strict=True):
        parameter.grad = row.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    return torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None]), norm


def learning_rate_schedule(peak: float, warmup_fraction: float, kind: str, total_steps: int) -> Tensor:
    """`torch.optim.lr_scheduler`: constant, linear and cosine without warm-up."""
    if warmup_fraction:
        raise Lacks("torch has no schedule with a warm-up by itself")
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimiser = torch.optim.SGD([parameter], lr=peak)
    schedulers: dict[str, Callable[[], Any]] = {
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimiser, 1.0),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, total_steps),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total_steps),
    }
    scheduler, rates = schedulers[kind](), []
    for _ in range(total_steps):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return torch.tensor(rates, dtype=torch.float64)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "embedding": embedding,
    "residual_add": lambda x, branch: x + branch,
    "rms_norm": rms_norm,
    "qk_norm": rms_norm,
    "softmax": softmax,
    "swiglu": swiglu,
    "attention": attention,
    "weighted_cross_entropy": weighted_cross_entropy,
    "cross_entropy_per_sample": cross_entropy_per_sample,
    "bce_with_logits": bce_with_logits,
    "lm_cross_entropy": lm_cross_entropy,
    "adamw_step": adamw(),
    "clip_by_global_norm": clip_by_global_norm,
    "learning_rate_schedule": learning_rate_schedule,
}
FOREACH = {"adamw_step": adamw(foreach=True)}
FUSED = {"adamw_step": adamw(fused=True)}


def __getattr__(name: str) -> Any:
    """`COMPILED` is what torch.compile makes of three of them, `OURS_COMPILED` of `impl`'s; its compiler takes seconds to import."""
    if name not in ("COMPILED", "OURS_COMPILED"):
        raise AttributeError(name)
    from blackswan.impl import operations

    plain = OPERATIONS if name == "COMPILED" else operations.OPERATIONS
    return {each: torch.compile(plain[each], dynamic=True) for each in ("rms_norm", "softmax", "swiglu")}
