"""Operations of `impl` on many rows, which are a few again and again: what is right for each of them is what these few give by themselves.

Their numbers are primes, so that parts of any size begin at other rows and a last part has fewer. In float64 a sum over all rows shows one
that is missing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.impl import dispatch
from blackswan.reference.table import Array

FEW, TIMES = 1021, 1031
"""Rows, and how often they are there: more than 2²⁰."""
BLOCK, OF_A_WEIGHT, GROUP = 64, 67, 256
"""Numbers of a block of NF4, of which each row of a weight is one; how often these rows are there, 2²² numbers; and blocks of a scale."""


class Asked(NamedTuple):
    """An operation and its arguments, along which axis of each there are rows, and of each result; what a result is multiplied by where
    the rows are there more often; and the arguments of which there are gradients, of the first result."""

    operation: str
    arguments: dict[str, Any]
    axes: Mapping[str, int]
    results: Sequence[int | None]
    wrt: Sequence[str] = ()
    times: int = TIMES
    factors: Sequence[float] = (1.0, 1.0, 1.0)


def many_rows() -> Iterator[tuple[str, Array, Array]]:
    """Results and gradients by torch, each with a label, as the few rows give them and as the many do."""
    for asked in [*_of_models(), *_of_losses(), *_of_steps(), *_of_nf4()]:
        few, of_few = _computed(asked.operation, asked.arguments, asked.wrt)
        repeated = {name: _repeated(value, asked.axes.get(name), asked.times) for name, value in asked.arguments.items()}
        many, of_many = _computed(asked.operation, repeated, asked.wrt)
        for number, (axis, factor, one, other) in enumerate(zip(asked.results, asked.factors, few, many, strict=False)):
            right = one if factor == 1.0 else one * factor
            yield f"{asked.operation} of many rows, result {number}", to_numpy(_repeated(right, axis, asked.times)), to_numpy(other)
        for name, one, other in zip(asked.wrt, of_few, of_many, strict=True):
            if name in asked.axes:  # a loss is a mean over all rows
                right = _repeated(one / (asked.times if asked.results[0] is None else 1), asked.axes[name], asked.times)
            else:
                right = one * asked.times
            yield f"{asked.operation} of many rows, gradient of {name}", to_numpy(right), to_numpy(other)


def _computed(operation: str, arguments: Mapping[str, Any], wrt: Sequence[str]) -> tuple[list[Tensor], Sequence[Tensor]]:
    leaves = {name: arguments[name].detach().requires_grad_() for name in wrt}
    with dispatch.backend("torch"):
        result = dispatch.call(operation, operation, **{**arguments, **leaves})
    results = [*result] if isinstance(result, tuple) else [result]
    above = results[0].detach() if results[0].dim() else torch.ones_like(results[0])
    gradients = torch.autograd.grad(results[0], [*leaves.values()], above) if leaves else ()
    return [each.detach() for each in results], gradients


def _repeated(value: Any, axis: int | None, times: int) -> Any:
    """The value so many times along an axis, or a number of rows times that."""
    if axis is None:
        return value
    if isinstance(value, int):
        return value * times
    return value.repeat(*(times if place == axis else 1 for place in range(value.dim())))


def _of_models() -> Iterator[Asked]:
    x, weight, bias = _drawn(FEW, 3), _drawn(2, 3), _drawn(2)
    up = x.flip(0)
    heads, sequence = _drawn(1, FEW, 1, 4), torch.arange(FEW)[None]
    yield Asked("embedding", {"input_ids": sequence % 7, "weight": _drawn(7, 3)}, {"input_ids": 1}, [1], ["weight"])
    linear = {"x": x, "weight": weight, "bias": bias}
    yield Asked("linear", linear, {"x": 0}, [0], ["x", "weight", "bias"])
    yield Asked("linear", {"x": _drawn(2, 3), "weight": x}, {"weight": 0}, [1], ["weight", "x"])
    yield Asked("residual_add", {"x": x, "branch": up}, {"x": 0, "branch": 0}, [0], ["x", "branch"])
    yield Asked("rms_norm", {"x": x, "weight": weight[0], "eps": 1e-6}, {"x": 0}, [0], ["x", "weight"])
    yield Asked("qk_norm", {"x": heads, "weight": _drawn(4), "eps": 1e-6}, {"x": 1}, [1], ["x", "weight"])
    yield Asked("rope", {"x": heads, "positions": sequence, "theta": 1e4}, {"x": 1, "positions": 1}, [1], ["x"])
    tokens, real = _drawn(FEW, 2, 3), torch.stack([torch.arange(FEW) % 3 > 0, torch.ones(FEW).bool()], dim=1)
    attended = {"q": tokens[:, :, None], "k": tokens.flip(0)[:, :, None], "v": tokens.flip(1)[:, :, None], "mask": real}
    yield Asked("attention", attended, dict.fromkeys(attended, 0), [0], ["q", "k", "v"])
    yield Asked("softmax", {"x": x}, {"x": 0}, [0], ["x"])
    yield Asked("swiglu", {"gate": x, "up": up}, {"gate": 0, "up": 0}, [0], ["gate", "up"])
    for mode in ("mean", "last", "first"):
        yield Asked("pool", {"x": tokens, "mask": real, "mode": mode}, {"x": 0, "mask": 0}, [0], ["x"])
    factors = {"lora_a": _drawn(2, 3), "lora_b": _drawn(2, 2), "alpha": 3.0}
    yield Asked("lora_linear", {**linear, **factors}, {"x": 0}, [0], ["x", "weight", "bias", "lora_a", "lora_b"])
    of_weight = {**factors, "weight": x, "lora_b": _drawn(FEW, 2)}
    for operation in ("lora_merge", "lora_unmerge"):
        yield Asked(operation, of_weight, {"weight": 0, "lora_b": 0}, [0])


def _of_losses() -> Iterator[Asked]:
    logits, labels = _drawn(FEW, 3), torch.arange(FEW) % 3
    rows = {"logits": 0, "labels": 0}
    weights = {"class_weights": _drawn(3).abs()}
    yield Asked("weighted_cross_entropy", {"logits": logits, "labels": labels, **weights}, rows, [None], ["logits"])
    yield Asked("cross_entropy_per_sample", {"logits": logits, "labels": labels}, rows, [0], ["logits"])
    yield Asked("bce_with_logits", {"logits": logits, "targets": logits.flip(0).sigmoid()}, {"logits": 0, "targets": 0}, [None], ["logits"])
    tokens = {"logits": _drawn(FEW, 2, 3), "input_ids": torch.stack([labels, labels.flip(0)], dim=1), "mask": torch.ones(FEW, 2).bool()}
    yield Asked("lm_cross_entropy", tokens, dict.fromkeys(tokens, 0), [None], ["logits"])


def _of_steps() -> Iterator[Asked]:
    moments = {name: _drawn(FEW).abs() for name in ("parameter", "gradient", "exp_avg", "exp_avg_sq")}
    yield Asked("adamw_step", {**moments, "step": 3, "learning_rate": 0.1}, dict.fromkeys(moments, 0), [0, 0, 0])
    gradients, longer = _drawn(3, FEW), math.sqrt(TIMES)
    clipped = {"gradients": gradients, "max_norm": 0.1}
    yield Asked("clip_by_global_norm", clipped, {"gradients": 1}, [1, None], factors=[1 / longer, longer])
    yield Asked("average_gradients", {"gradients": gradients, "counts": torch.tensor([1, 5, 2])}, {"gradients": 1}, [0])


def _of_nf4() -> Iterator[Asked]:
    weight, of_a_weight = _drawn(FEW, BLOCK).float(), {"codes": 0, "absmax": 0}
    codes, absmax = dispatch.call("few", "nf4_quantize", weight=weight, block_size=BLOCK)
    stored: dict[str, Any] = {"codes": codes, "absmax": absmax, "block_size": BLOCK}
    product = {**stored, "in_features": BLOCK, "out_features": FEW}
    yield Asked("nf4_quantize", {"weight": weight, "block_size": BLOCK}, {"weight": 0}, [0, 0], times=OF_A_WEIGHT)
    yield Asked("nf4_dequantize", {**stored, "rows": FEW, "columns": BLOCK}, {**of_a_weight, "rows": 0}, [0], times=OF_A_WEIGHT)
    yield Asked("nf4_linear", {**product, "x": _drawn(2, BLOCK)}, {**of_a_weight, "out_features": 0}, [1], ["x"], OF_A_WEIGHT)
    few = {**product, "codes": codes[: BLOCK // 2], "absmax": absmax[:1], "out_features": 1}
    yield Asked("nf4_linear", {**few, "x": _drawn(FEW, BLOCK)}, {"x": 0}, [0], ["x"], OF_A_WEIGHT)
    scales = _drawn(4 * GROUP).abs().float()
    doubled = dict(zip(("codes", "scales", "offset"), dispatch.call("few", "nf4_double_quantize", absmax=scales), strict=True))
    yield Asked("nf4_double_quantize", {"absmax": scales}, {"absmax": 0}, [0, 0, None])
    yield Asked("nf4_double_dequantize", doubled, {"codes": 0, "scales": 0}, [0])


def _drawn(*shape: int) -> Tensor:
    """Numbers in float64, others for another shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
