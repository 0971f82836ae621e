"""Honest mutants: other ways to compute an operation, which are right, so that every claim on it must hold for them.

They differ from the implementation as programs of different people do: products written out or fused, other orders of sums, other forms of
one formula, and torch's own functions. Each computes in float32 (float64 in float64) and rounds once to the storage dtype. A claim that is
false for one of them asks more than its statement says, and its tolerance or its statement is wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from blackswan.contracts.model import Claim
from blackswan.falsifiers.subjects.functions import Functions
from blackswan.falsifiers.subjects.libraries import torch as library
from blackswan.impl.config import RopeScaling
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.operations.attention import frequencies
from blackswan.impl.operations.nf4 import nf4_dequantize
from blackswan.impl.operations.precision import widen
from blackswan.reference.nf4 import CODEBOOK

HONEST: dict[str, tuple[str, Callable[..., Any]]] = {}
"""Name → operation and function; the names of its parameters are the operation's."""


def honest(operation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a function as an honest way to compute an operation."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        HONEST[function.__name__] = operation, function
        return function

    return enter


def names(claim: Claim) -> list[str]:
    """Those that the claim must hold for: not where it asks for a refusal, or for a kernel of ours, which is held to its own accuracy."""
    if claim.kind == "rejection" or claim.backend is not None or claim.domain.input != "generated":
        return []
    return [name for name, (operation, _) in HONEST.items() if operation == claim.operation]


def subject(name: str) -> Functions:
    """One of them as a subject, whose other operations are the implementation's."""
    operation, function = HONEST[name]
    return Functions({**OPERATIONS, operation: function}, name)


# layers


@honest("linear")
def linear_written_out(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product is made by einsum in float32, and the bias is added before rounding."""
    y = torch.einsum("...i,oi->...o", widen(x), widen(weight))
    return (y if bias is None else y + widen(bias)).to(x.dtype)


@honest("linear")
def linear_in_two_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The features' second half is summed apart from the first."""
    wide, weights, half = widen(x), widen(weight), x.shape[-1] // 2
    y = wide[..., :half] @ weights[:, :half].T + wide[..., half:] @ weights[:, half:].T
    return (y if bias is None else y + widen(bias)).to(x.dtype)


@honest("rms_norm")
def rms_norm_by_reciprocal_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reciprocal root of the mean of squares is multiplied in, then the weight."""
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widen(weight)).to(x.dtype)


@honest("rms_norm")
def rms_norm_weight_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight is multiplied in first, and the root divides."""
    wide = widen(x)
    scale = torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (wide * widen(weight) / scale).to(x.dtype)


HONEST["qk_norm_by_reciprocal_root"] = "qk_norm", rms_norm_by_reciprocal_root
HONEST["qk_norm_weight_first"] = "qk_norm", rms_norm_weight_first


@honest("swiglu")
def swiglu_by_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """The sigmoid is multiplied in last."""
    wide = widen(gate)
    return (wide * widen(up) * torch.sigmoid(wide)).to(gate.dtype)


@honest("softmax")
def softmax_written_out(x: Tensor) -> Tensor:
    """Exponentials of what is below the maximum are divided by their sum."""
    wide = widen(x)
    powers = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


@honest("softmax")
def softmax_by_logarithm(x: Tensor) -> Tensor:
    """The exponential of log-softmax is taken."""
    return torch.log_softmax(widen(x), -1).exp().to(x.dtype)


@honest("pool")
def pool_by_product(x: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Each token is multiplied by its share, and the products are added."""
    places = torch.arange(x.shape[1], device=x.device)
    first = torch.where(mask, places, x.shape[1]).amin(1)
    last = torch.where(mask, places, -1).amax(1)
    chosen = {"mean": mask, "first": places == first[:, None], "last": places == last[:, None]}[mode]
    shares = chosen.to(widen(x).dtype) / chosen.sum(1, keepdim=True)
    return torch.einsum("bs,bsh->bh", shares, widen(x)).to(x.dtype)


# attention


@honest("rope")
def rope_by_rotated_half(
    x: Tensor,
    positions: Tensor,
    theta: float,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_positions: int = 8192,
) -> Tensor:
    """x · cos + rotated(x) · sin over the whole width."""
    half = x.shape[-1] // 2
    scaling = RopeScaling(factor, low_freq_factor, high_freq_factor, original_positions)
    angle = positions[..., None].double() * frequencies(half, theta, scaling if factor != 1 else None, x.device)
    angle = torch.cat([angle, angle], -1)[:, :, None]
    wide = widen(x)
    rotated = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    return (wide * angle.cos().to(wide.dtype) + rotated * angle.sin().to(wide.dtype)).to(x.dtype)


def _seen(mask: Tensor) -> Tensor:
    seq = mask.shape[1]
    return torch.ones(seq, seq, dtype=torch.bool, device=mask.device).tril() & mask[:, None, :]


def _scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", widen(q) * q.shape[-1] ** -0.5, widen(k).repeat_interleave(groups, 2))
    return scores.masked_fill(~_seen(mask)[:, None], -torch.inf)


@honest("attention")
def attention_written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Queries are scaled first, and both products are made by einsum."""
    weights = torch.softmax(_scores(q, k, mask), -1).nan_to_num(0.0)
    values = widen(v).repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values).to(q.dtype)


@honest("attention")
def attention_by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Keys are taken in blocks of four, the last first; their exponentials are summed beside the values, as in fused kernels."""
    scores, values = _scores(q, k, mask), widen(v).repeat_interleave(q.shape[2] // v.shape[2], 2).transpose(1, 2)
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min).detach()
    total, sums = scores.new_zeros(()), scores.new_zeros(())
    for start in reversed(range(0, q.shape[1], 4)):
        powers = torch.exp(scores[..., start : start + 4] - largest)
        sums = sums + powers.sum(-1, keepdim=True)
        total = total + powers @ values[:, :, start : start + 4]
    return torch.where(sums > 0, total / torch.where(sums > 0, sums, 1), 0).transpose(1, 2).to(q.dtype)


# losses


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    wide = widen(logits)
    return torch.logsumexp(wide, -1) - wide.gather(-1, labels[..., None])[..., 0]


@honest("weighted_cross_entropy")
def cross_entropy_by_product(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Log-softmax is multiplied by one-hot targets, which hold the weights."""
    wide = widen(logits)
    wanted = functional.one_hot(labels, logits.shape[-1]).to(wide.dtype)
    weighted = wanted if class_weights is None else wanted * class_weights.to(wide.dtype)
    return -(torch.log_softmax(wide, -1) * weighted).sum() / logits.shape[0]


@honest("weighted_cross_entropy")
def cross_entropy_by_logsumexp(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """The label's logit is subtracted from the logarithm of the sum of exponentials."""
    losses = _losses(logits, labels)
    return (losses if class_weights is None else losses * class_weights.to(losses.dtype)[labels]).sum() / logits.shape[0]


@honest("cross_entropy_per_sample")
def cross_entropy_per_sample_by_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    """As `cross_entropy_by_logsumexp`."""
    return _losses(logits, labels)


@honest("cross_entropy_per_sample")
def cross_entropy_per_sample_gathered(logits: Tensor, labels: Tensor) -> Tensor:
    """The label's entry is gathered from log-softmax, which is written out below the maximum."""
    wide = widen(logits)
    below = wide - wide.amax(-1, keepdim=True)
    return below.exp().sum(-1).log() - below.gather(-1, labels[:, None])[:, 0]


@honest("bce_with_logits")
def bce_by_softplus(logits: Tensor, targets: Tensor) -> Tensor:
    """t · softplus(−z) + (1 − t) · softplus(z)."""
    z, t = widen(logits), widen(targets)
    return (t * functional.softplus(-z, threshold=88) + (1 - t) * functional.softplus(z, threshold=88)).mean()


@honest("lm_cross_entropy")
def lm_cross_entropy_by_logsumexp(logits: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """The target's logit is subtracted from the logarithm of the sum of exponentials; the mean is over the targets."""
    wanted = mask[:, 1:] & mask[:, :-1]
    return _losses(logits[:, :-1], input_ids[:, 1:])[wanted].mean()


# LoRA


@honest("lora_linear")
def lora_linear_merged(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """One product is made with the merged weight, in float32."""
    merged = widen(weight) + (alpha / lora_a.shape[0]) * (widen(lora_b) @ widen(lora_a))
    return functional.linear(widen(x), merged, None if bias is None else widen(bias)).to(x.dtype)


@honest("lora_merge")
def lora_merge_scaled_first(weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float) -> Tensor:
    """B is scaled before the product."""
    return torch.addmm(widen(weight), widen(lora_b) * (alpha / lora_a.shape[0]), widen(lora_a)).to(weight.dtype)


@honest("lora_unmerge")
def lora_unmerge_scaled_first(weight: Tensor, lora_a: Tensor, lora_b: Tensor, alpha: float) -> Tensor:
    """B is scaled before the product, which is subtracted."""
    return torch.addmm(widen(weight), widen(lora_b) * (-alpha / lora_a.shape[0]), widen(lora_a)).to(weight.dtype)


# NF4


@honest("nf4_quantize")
def nf4_quantize_by_counting(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """A value's code is the number of midpoints below it."""
    flat = functional.pad(weight.float().flatten(), (0, -weight.numel() % block_size)).view(-1, block_size)
    absmax = flat.abs().amax(1)
    scaled = flat * torch.where(absmax > 0, 1 / absmax, 0)[:, None]
    codebook = torch.tensor(CODEBOOK, dtype=torch.float32, device=weight.device)
    codes = (scaled[..., None] > (codebook[1:] + codebook[:-1]) / 2).sum(-1).flatten()[: weight.numel()]
    pairs = functional.pad(codes, (0, weight.numel() % 2), value=7).view(-1, 2)
    return (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8), absmax


@honest("nf4_linear")
def nf4_linear_written_out(
    x: Tensor, codes: Tensor, absmax: Tensor, in_features: int, out_features: int, block_size: int, bias: Tensor | None = None
) -> Tensor:
    """The weight is restored in the dtype of x, and the product is made by einsum."""
    weight = nf4_dequantize(codes, absmax, out_features, in_features, block_size).to(x.dtype)
    return linear_written_out(x, weight, bias)  # type: ignore[no-any-return]


# optimiser


@honest("clip_by_global_norm")
def clip_by_norm_of_norms(gradients: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """The norm is that of the rows' norms, as in torch.nn.utils but without its ε."""
    wide = widen(gradients)
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(wide, dim=1))
    return torch.where(norm > max_norm, wide / norm * max_norm, wide), norm


@honest("average_gradients")
def average_by_shares(gradients: Tensor, counts: Tensor) -> Tensor:
    """Each gradient is multiplied by its share of the samples."""
    wide = widen(gradients)
    return torch.einsum("m,mp->p", counts.to(wide.dtype) / counts.sum(), wide)


HONEST["adamw_of_torch"] = "adamw_step", library.OPERATIONS["adamw_step"]
HONEST["adamw_of_torch_foreach"] = "adamw_step", library.FOREACH["adamw_step"]
HONEST["adamw_of_torch_fused"] = "adamw_step", library.FUSED["adamw_step"]
