"""Weighted cross-entropy of a classifier: loss and gradient of the logits in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blackswan.impl.kernels.launch import buffer, launch, require_contiguous_rows, require_storage

WIDEST = 4096
TILE = 1024


@triton.jit
def _cross_entropy(
    logits, labels, weights, loss, gradient, batch, classes, logits_stride, gradient_stride,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS,), dtype=tl.float32)
    # One program: the samples of a batch are few, and the order of the sum is fixed.
    start = 0
    while start < batch:  # not a range over a tensor: with NumPy 2.4 that fails in the interpreter of Triton 3.6
        row = start + tl.arange(0, ROWS).to(tl.int64)
        there = (row[:, None] < batch) & (column < classes)
        z = tl.load(logits + row[:, None] * logits_stride + column, mask=there, other=float("-inf")).to(tl.float32)
        z = tl.where(row[:, None] < batch, z, 0.0)
        label = tl.load(labels + row, mask=row < batch, other=0)
        factor = tl.where(row < batch, 1.0, 0.0)
        if WEIGHTED:
            factor = tl.load(weights + label, mask=row < batch, other=0.0).to(tl.float32)
        shifted = z - tl.max(z, axis=1)[:, None]
        power = tl.exp(shifted)
        norm = tl.sum(power, axis=1)
        chosen = column == label[:, None]
        total += factor * (tl.log(norm) - tl.sum(tl.where(chosen, shifted, 0.0), axis=1))
        share = tl.div_rn(factor, batch * 1.0)
        slope = (power / norm[:, None] - tl.where(chosen, 1.0, 0.0)) * share[:, None]
        tl.store(gradient + row[:, None] * gradient_stride + column, slope, mask=there)
        start += ROWS
    tl.store(loss, tl.div_rn(tl.sum(total, axis=0), batch * 1.0))


def weighted_cross_entropy(
    logits: Tensor, labels: Tensor, class_weights: Tensor | None = None, loss: Tensor | None = None, dlogits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(1/batch) Σ w[label] · (logsumexp(logits) − logits[label]) and its gradient: (float32 [], float32 [batch, classes]).

    logits [batch, classes], labels int64 [batch], class_weights [classes]. Raises a ValueError for sizes or dtypes that do not fit; labels
    outside the classes and non-finite logits are for the caller to refuse, since looking at them would wait for the device.
    """
    require_storage("logits", logits.dtype)
    if logits.dim() != 2 or not 2 <= logits.shape[1] <= WIDEST or logits.shape[0] == 0:
        raise ValueError(f"logits have shape {list(logits.shape)}: expected [batch, classes] with a sample and 2 to {WIDEST} classes")
    require_contiguous_rows("logits", logits)
    batch, classes = logits.shape
    if tuple(labels.shape) != (batch,) or labels.dtype != torch.int64 or not labels.is_contiguous():
        raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}: expected contiguous torch.int64 [{batch}]")
    if class_weights is not None and (tuple(class_weights.shape) != (classes,) or not class_weights.is_contiguous()):
        raise ValueError(f"class_weights has shape {list(class_weights.shape)}: expected [{classes}]")
    loss = buffer("loss", loss, (), logits, torch.float32)
    dlogits = buffer("dlogits", dlogits, logits.shape, logits, torch.float32)
    block = triton.next_power_of_2(classes)
    weights = logits if class_weights is None else class_weights
    strides, constants = (logits.stride(0), dlogits.stride(0)), (class_weights is not None, max(1, TILE // block), block)
    launch(_cross_entropy, (1,), logits, labels, weights, loss, dlogits, batch, classes, *strides, *constants)
    return loss, dlogits
