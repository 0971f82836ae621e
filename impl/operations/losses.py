"""Losses, in float32 (float64 for float64 logits) whatever the dtype of the logits."""

import torch
from torch import Tensor
from torch.nn import functional

from blackswan.impl import validation
from blackswan.impl.operations.precision import widen


def weighted_cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """(1/batch) Σ w[label] · (logsumexp(logits) − logits[label]); logits [batch, classes], labels [batch].

    Divided by the number of samples, not by Σ w. Raises what `require_classification` raises.
    """
    require_classification(logits, labels, class_weights)
    wide = widen(logits)
    weights = None if class_weights is None else class_weights.to(wide.dtype)
    return functional.cross_entropy(wide, labels.to(torch.int64), weight=weights, reduction="none").sum() / logits.shape[0]


def cross_entropy_per_sample(logits: Tensor, labels: Tensor) -> Tensor:
    """logsumexp(logits) − logits[label] of each sample; logits [rows, classes], labels [rows].

    Raises what `require_classification` raises.
    """
    require_classification(logits, labels, None)
    return functional.cross_entropy(widen(logits), labels.to(torch.int64), reduction="none")


def require_classification(logits: Tensor, labels: Tensor, class_weights: Tensor | None) -> None:
    """Raises a ValueError for an empty batch, fewer than two classes, a non-finite logit, a label outside the classes and weights that
    are not one positive number a class."""
    batch, classes = logits.shape
    if batch == 0:
        raise ValueError("the batch is empty: a mean over no samples is undefined")
    if classes < 2:
        raise ValueError(f"{classes} class: classification needs at least two")
    if class_weights is not None:
        require_class_weights(class_weights, classes)
    if labels.shape != (batch,):
        raise ValueError(f"labels has shape {list(labels.shape)}, expected one label for each of the {batch} samples")
    validation.require_finite("logits", logits)
    validation.require_below("labels", labels, classes, "classes")


def require_class_weights(weights: Tensor, classes: int) -> None:
    """Raises a ValueError for weights that are not one positive number a class."""
    if weights.shape != (classes,):
        raise ValueError(f"class_weights has shape {list(weights.shape)}, expected one weight for each of the {classes} classes")
    validation.require_above_zero("class_weights", weights)


def bce_with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over samples and classes of the binary cross-entropy; logits and targets [batch, classes].

    Raises a ValueError for an empty batch, a shape that differs, a non-finite logit and a target outside 0 … 1.
    """
    if logits.numel() == 0 or logits.shape != targets.shape:
        raise ValueError(f"logits {list(logits.shape)} and targets {list(targets.shape)} must have one shape, and not be empty")
    validation.require_finite("logits", logits)
    validation.require_between("targets", targets, 0.0, 1.0)
    return binary_cross_entropy(widen(logits), widen(targets)).mean()


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """t log(1 + e^(−z)) + (1 − t) log(1 + e^z) of each logit z and target t, in their dtype.

    Neither it nor its gradient cancels: torch's own (1 − t) z − log σ(z) leaves the rounding of z of a confident, correct sample.
    """
    # Beyond the threshold softplus(z) is z; its default of 20 would leave out 2e-9, which float64 holds. Below 88 no float32 overflows.
    return targets * functional.softplus(-logits, threshold=88) + (1 - targets) * functional.softplus(logits, threshold=88)


def lm_cross_entropy(logits: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Mean of −log p(input_ids[t + 1] | ≤ t) over the t where t and t + 1 are real; logits [batch, seq, vocab], the others [batch, seq].

    Raises a ValueError where there is no such position, for another shape, a token outside the vocabulary and a non-finite logit.
    """
    validation.require_shape("input_ids", input_ids, logits.shape[:2])
    validation.require_shape("mask", mask, logits.shape[:2])
    predicted = mask[:, :-1] & mask[:, 1:]
    if validation.enabled() and not bool(predicted.any()):
        raise ValueError("no two neighbouring real tokens in the batch: there is no next token to predict")
    validation.require_below("input_ids", input_ids, logits.shape[-1], "tokens of the vocabulary")
    validation.require_finite("logits", logits)
    targets = input_ids[:, 1:].to(torch.int64).masked_fill(~predicted, -100)
    wide = widen(logits[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(wide, targets.flatten(), ignore_index=-100, reduction="sum") / predicted.sum()
