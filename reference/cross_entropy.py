"""Softmax cross-entropy: of a classifier, weighted by class, and of a language model's next token.

With p = softmax(z): −log p_label = logsumexp(z) − z_label, and its gradient is p − onehot(label). logsumexp shifts by the maximum
(Blanchard, Higham & Higham 2021, "Accurately computing the log-sum-exp and softmax functions").
"""

from typing import Any

import numpy as np

import blackswan.reference.softmax as softmax
from blackswan.reference.table import Array


def require_finite(logits: Array) -> None:
    """ValueError that names the first non-finite logit."""
    finite = np.isfinite(logits)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(f"logits{list(where)} is {float(logits[where])}; a loss needs finite logits")


def _require_labels(labels: Array, classes: int, name: str) -> None:
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        where = tuple(int(i) for i in np.argwhere(outside)[0])
        raise ValueError(f"{name}{list(where)} is {int(labels[where])}; expected 0 to {classes - 1}")


def _negative_log_likelihood(logits: Array, labels: Array) -> Array:
    """logits [n, classes], labels [n] → [n]."""
    shift = logits.max(axis=-1)  # [n]
    log_sum_exp = shift + np.log(np.exp(logits - shift[:, None]).sum(axis=-1))  # [n]
    nll: Array = log_sum_exp - logits[np.arange(len(labels)), labels]
    return nll


def _minus_onehot(probabilities: Array, labels: Array) -> Array:
    """p − onehot(label), [n, classes]."""
    difference = probabilities.copy()
    difference[np.arange(len(labels)), labels] -= 1.0
    return difference


def _sample_weights(logits: Array, labels: Array, class_weights: Array | None) -> Array:
    """Checks the arguments; the weight of each sample [batch], that of its class."""
    batch, classes = logits.shape
    if classes < 2:
        raise ValueError(f"logits have shape {list(logits.shape)}: {classes} class; a classifier needs at least 2")
    if batch == 0:
        raise ValueError("logits have shape [0, ...]: the mean loss of no sample is undefined")
    if labels.shape != (batch,):
        raise ValueError(f"labels have shape {list(labels.shape)}; expected [{batch}], one for each sample")
    require_finite(logits)
    _require_labels(labels, classes, "labels")
    if class_weights is None:
        return np.ones_like(logits[:, 0])
    if class_weights.shape != (classes,):
        raise ValueError(f"class_weights have shape {list(class_weights.shape)}; expected [{classes}], one for each class")
    bad = np.flatnonzero(~(np.isfinite(class_weights) & (class_weights > 0)))
    if bad.size:
        raise ValueError(f"class_weights[{int(bad[0])}] is {float(class_weights[bad[0]])}; expected a positive finite number")
    return class_weights[labels]


def weighted_forward(logits: Array, labels: Array, class_weights: Array | None = None, reduction: str = "samples") -> Array:
    """(1/batch) Σ w[label] · (logsumexp(z) − z_label) for logits [batch, classes], labels [batch], class_weights [classes].

    Divided by the number of samples; with `reduction` weights by Σ w[label]. ValueError for a non-finite logit, a label outside of them,
    fewer than two classes, or weights that are not one positive number for each class.
    """
    weights = _sample_weights(logits, labels, class_weights)  # [batch]
    nll = _negative_log_likelihood(logits, labels)  # [batch]
    loss: Array = (weights * nll).sum() / _divisor(weights, reduction)
    return loss


def weighted_backward(
    dloss: Array, logits: Array, labels: Array, class_weights: Array | None = None, reduction: str = "samples"
) -> dict[str, Array]:
    """Gradient of logits: w[label] / batch · (p − onehot(label)), or with Σ w[label] for batch; dloss []."""
    weights = _sample_weights(logits, labels, class_weights)  # [batch]
    difference = _minus_onehot(softmax.forward(logits), labels)  # [batch, classes]
    return {"logits": dloss * (weights / _divisor(weights, reduction))[:, None] * difference}


def _divisor(weights: Array, reduction: str) -> Any:
    return weights.sum() if reduction == "weights" else len(weights)


def per_sample_forward(logits: Array, labels: Array) -> Array:
    """logsumexp(z) − z_label of each sample: logits [rows, classes], labels [rows] → [rows]. ValueError as of `weighted_forward`."""
    _sample_weights(logits, labels, None)
    return _negative_log_likelihood(logits, labels)


def per_sample_backward(dlosses: Array, logits: Array, labels: Array) -> dict[str, Array]:
    """Gradient of logits: each sample's p − onehot(label) times its own cotangent; dlosses [rows]."""
    _sample_weights(logits, labels, None)
    probabilities = softmax.forward(logits)  # [rows, classes]
    return {"logits": dlosses[:, None] * _minus_onehot(probabilities, labels)}


def _predicted(logits: Array, input_ids: Array, mask: Array) -> tuple[tuple[Array, Array], Array]:
    """The positions (b, t) where t and t + 1 are real tokens, and the token that each predicts."""
    where = np.nonzero(mask[:, :-1] & mask[:, 1:])  # ([n], [n])
    if where[0].size == 0:
        raise ValueError("no position has a real token after it: a language-model loss needs a sample with two consecutive real tokens")
    b, t = where
    _require_labels(input_ids, logits.shape[-1], "input_ids")
    return (b, t), input_ids[b, t + 1]


def lm_forward(logits: Array, input_ids: Array, mask: Array) -> Array:
    """Mean of −log p(input_ids[t + 1]) over the positions where t and t + 1 are real.

    logits [batch, seq, vocab], input_ids and mask [batch, seq]. ValueError where there is no such position, for a token outside the
    vocabulary, and for a non-finite logit.
    """
    where, target = _predicted(logits, input_ids, mask)
    require_finite(logits)
    loss: Array = _negative_log_likelihood(logits[where], target).mean()
    return loss


def lm_backward(dloss: Array, logits: Array, input_ids: Array, mask: Array) -> dict[str, Array]:
    """Gradient of logits: (p − onehot(target)) / n at the n positions that predict, zero elsewhere; dloss []."""
    where, target = _predicted(logits, input_ids, mask)
    require_finite(logits)
    difference = _minus_onehot(softmax.forward(logits[where]), target)  # [n, vocab]
    dlogits = np.zeros_like(logits)
    dlogits[where] = dloss * difference / len(target)
    return {"logits": dlogits}
