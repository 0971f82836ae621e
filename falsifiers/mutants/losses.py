"""Wrong losses: weighted cross-entropy, binary cross-entropy, next-token loss."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import Arguments, Gradients, call, dropped, pull, scaled, with_arguments, with_gradients
from blackswan.falsifiers.mutants.registry import mutant
from blackswan.reference import softmax
from blackswan.reference.sigmoid import sigmoid
from blackswan.reference.table import Array, Operation

FLOOR = 1e-10
LOSS = ("loss",)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _of_label(values: Array, labels: Array) -> Array:
    return values[np.arange(len(labels)), labels]


def _onehot(logits: Array, labels: Array) -> Array:
    return np.asarray(labels[:, None] == np.arange(logits.shape[1]), logits.dtype)


def _sample_weights(a: Arguments) -> Array:
    weights = a.get("class_weights")
    return np.ones_like(a["logits"][:, 0]) if weights is None else weights[a["labels"]]


def _batch(a: Arguments) -> int:
    return len(a["labels"])


@mutant("cross_entropy_probability_floor")
def _(correct: Operation) -> Operation:
    def forward(**a: Any) -> Array:
        call(correct, a)
        probability = _of_label(np.exp(_log_softmax(a["logits"])), a["labels"])
        return np.asarray(-(_sample_weights(a) * np.log(np.maximum(probability, FLOOR))).sum() / _batch(a))

    return Operation(forward, correct.backward, LOSS)


@mutant("cross_entropy_nan_swallowed")
def _(correct: Operation) -> Operation:
    def finite_rows(a: Arguments) -> Array:
        return np.asarray(np.isfinite(a["logits"]).all(axis=1))

    def forward(**a: Any) -> Array:
        finite = finite_rows(a)
        if finite.all():
            return np.asarray(call(correct, a))
        nll = -_of_label(_log_softmax(np.where(finite[:, None], a["logits"], 0.0)), a["labels"])
        return np.asarray((_sample_weights(a) * np.where(finite, nll, -math.log(FLOOR))).sum() / _batch(a))

    def backward(dloss: Array, **a: Any) -> Gradients:
        finite = finite_rows(a)[:, None]
        gradient = pull(correct, dloss, {**a, "logits": np.where(finite, a["logits"], 0.0)})["logits"]
        return {"logits": np.where(finite, gradient, 0.0)}

    return Operation(forward, backward, LOSS)


@mutant("cross_entropy_weight_by_prediction")
def _(correct: Operation) -> Operation:
    def ratio(a: Arguments) -> Array:
        """What a sample's weight must be multiplied with to become that of the predicted class."""
        if a.get("class_weights") is None:
            return np.ones_like(a["logits"][:, 0])
        return np.asarray(a["class_weights"][a["logits"].argmax(axis=1)] / _sample_weights(a))

    def forward(**a: Any) -> Array:
        call(correct, a)
        nll = -_of_label(_log_softmax(a["logits"]), a["labels"])
        return np.asarray((ratio(a) * _sample_weights(a) * nll).sum() / _batch(a))

    def backward(dloss: Array, **a: Any) -> Gradients:
        return {"logits": pull(correct, dloss, a)["logits"] * ratio(a)[:, None]}

    return Operation(forward, backward, LOSS)


@mutant("cross_entropy_divided_by_weights")
def _(correct: Operation) -> Operation:
    return scaled(correct, lambda a: _batch(a) / float(_sample_weights(a).sum()))


@mutant("cross_entropy_sum")
def _(correct: Operation) -> Operation:
    return scaled(correct, _batch)


@mutant("cross_entropy_weights_dropped")
def _(correct: Operation) -> Operation:
    return dropped(correct, "class_weights")


@mutant("cross_entropy_base_two")
def _(correct: Operation) -> Operation:
    return scaled(correct, lambda _: 1 / math.log(2))


@mutant("cross_entropy_gradient_not_averaged")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda g, _, a: {"logits": g["logits"] * _batch(a)})


@mutant("cross_entropy_gradient_unweighted")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda _, dloss, a: pull(correct, dloss, {**a, "class_weights": None}))


@mutant("cross_entropy_gradient_softmax_only")
def _(correct: Operation) -> Operation:
    def softmax_only(_: Gradients, dloss: Array, a: Arguments) -> Gradients:
        return {"logits": dloss * (_sample_weights(a) / _batch(a))[:, None] * softmax.forward(a["logits"])}

    return with_gradients(correct, softmax_only)


@mutant("cross_entropy_label_clamped")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, labels=lambda a: np.clip(a["labels"], 0, a["logits"].shape[1] - 1))


@mutant("cross_entropy_one_class_accepted")
def _(correct: Operation) -> Operation:
    def forward(**a: Any) -> Array:
        return a["logits"].sum() * 0 if a["logits"].shape[1] == 1 else np.asarray(call(correct, a))

    def backward(dloss: Array, **a: Any) -> Gradients:
        return {"logits": np.zeros_like(a["logits"])} if a["logits"].shape[1] == 1 else pull(correct, dloss, a)

    return Operation(forward, backward, LOSS)


@mutant("cross_entropy_label_smoothing")
def _(correct: Operation) -> Operation:
    def forward(**a: Any) -> Array:
        spread = -(_sample_weights(a) * _log_softmax(a["logits"]).mean(axis=1)).sum() / _batch(a)
        return np.asarray(0.9 * call(correct, a) + 0.1 * spread)

    def backward(dloss: Array, **a: Any) -> Gradients:
        logits = a["logits"]
        target = 0.9 * _onehot(logits, a["labels"]) + 0.1 / logits.shape[1]
        return {"logits": dloss * (_sample_weights(a) / _batch(a))[:, None] * (softmax.forward(logits) - target)}

    return Operation(forward, backward, LOSS)


@mutant("cross_entropy_without_max_shift")
def _(correct: Operation) -> Operation:
    def forward(**a: Any) -> Array:
        call(correct, a)
        nll = np.log(np.exp(a["logits"]).sum(axis=1)) - _of_label(a["logits"], a["labels"])
        return np.asarray((_sample_weights(a) * nll).sum() / _batch(a))

    def backward(dloss: Array, **a: Any) -> Gradients:
        exponential = np.exp(a["logits"])
        p = exponential / exponential.sum(axis=1, keepdims=True)
        return {"logits": dloss * (_sample_weights(a) / _batch(a))[:, None] * (p - _onehot(p, a["labels"]))}

    return Operation(forward, backward, LOSS)


@mutant("bce_unstable")
def _(correct: Operation) -> Operation:
    def forward(logits: Array, targets: Array) -> Array:
        call(correct, {"logits": logits, "targets": targets})
        p = 1.0 / (1.0 + np.exp(-logits))
        return np.asarray((-targets * np.log(p) - (1.0 - targets) * np.log(1.0 - p)).mean())

    return Operation(forward, correct.backward, LOSS)


@mutant("bce_sum_over_classes")
def _(correct: Operation) -> Operation:
    return scaled(correct, lambda a: a["logits"].shape[1])


@mutant("bce_as_softmax")
def _(_: Operation) -> Operation:
    def forward(logits: Array, targets: Array) -> Array:
        return np.asarray(-(targets * _log_softmax(logits)).mean())

    def backward(dloss: Array, logits: Array, targets: Array) -> Gradients:
        return {"logits": dloss * (targets.sum(axis=1, keepdims=True) * softmax.forward(logits) - targets) / logits.size}

    return Operation(forward, backward, LOSS)


@mutant("bce_negatives_dropped")
def _(_: Operation) -> Operation:
    def forward(logits: Array, targets: Array) -> Array:
        return np.asarray((targets * (np.maximum(-logits, 0.0) + np.log1p(np.exp(-np.abs(logits))))).mean())

    def backward(dloss: Array, logits: Array, targets: Array) -> Gradients:
        return {"logits": -dloss * targets * sigmoid(-logits) / logits.size}

    return Operation(forward, backward, LOSS)


@mutant("bce_gradient_not_averaged")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda g, _, a: {"logits": g["logits"] * a["logits"].size})


def _predicting(mask: Array) -> Array:
    return np.asarray(mask[:, :-1] & mask[:, 1:])


def _predictions(a: Arguments) -> int:
    return int(_predicting(a["mask"]).sum())


@mutant("lm_loss_unshifted")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, input_ids=lambda a: np.roll(a["input_ids"], 1, axis=1))


@mutant("lm_loss_shifted_twice")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, input_ids=lambda a: np.roll(a["input_ids"], -1, axis=1))


@mutant("lm_loss_counts_padding")
def _(correct: Operation) -> Operation:
    return scaled(correct, lambda a: _predictions(a) / _predicting(a["mask"]).size)


@mutant("lm_loss_mask_ignored")
def _(correct: Operation) -> Operation:
    return with_arguments(correct, mask=lambda a: np.ones_like(a["mask"]))


@mutant("lm_loss_padding_predicts")
def _(correct: Operation) -> Operation:
    def also_before(mask: Array) -> Array:
        """Real tokens, and the padding just before a real token."""
        return np.asarray(mask | np.concatenate([mask[:, 1:], mask[:, -1:]], axis=1))

    return with_arguments(correct, mask=lambda a: also_before(a["mask"]))


@mutant("lm_loss_base_two")
def _(correct: Operation) -> Operation:
    return scaled(correct, lambda _: 1 / math.log(2))


@mutant("lm_loss_mean_of_sample_means")
def _(correct: Operation) -> Operation:
    def samples(a: Arguments) -> list[slice]:
        return [slice(int(row), int(row) + 1) for row in np.flatnonzero(_predicting(a["mask"]).any(axis=1))]

    def alone(a: Arguments, sample: slice) -> Arguments:
        return {name: value[sample] for name, value in a.items()}

    def forward(**a: Any) -> Array:
        call(correct, a)
        return np.asarray(np.stack([call(correct, alone(a, sample)) for sample in samples(a)]).mean())

    def backward(dloss: Array, **a: Any) -> Gradients:
        chosen, gradient = samples(a), np.zeros_like(a["logits"])
        for sample in chosen:
            gradient[sample] = pull(correct, dloss / len(chosen), alone(a, sample))["logits"]
        return {"logits": gradient}

    return Operation(forward, backward, LOSS)


@mutant("lm_loss_gradient_not_averaged")
def _(correct: Operation) -> Operation:
    return with_gradients(correct, lambda g, _, a: {"logits": g["logits"] * _predictions(a)})


def _answering_when_empty(correct: Operation, answer: Callable[[Array], Array]) -> Operation:
    def forward(**a: Any) -> Array:
        return np.asarray(call(correct, a)) if _predictions(a) else answer(a["logits"])

    def backward(dloss: Array, **a: Any) -> Gradients:
        return pull(correct, dloss, a) if _predictions(a) else {"logits": np.zeros_like(a["logits"])}

    return Operation(forward, backward, LOSS)


@mutant("lm_loss_made_up_when_empty")
def _(correct: Operation) -> Operation:
    return _answering_when_empty(correct, lambda logits: np.ones_like(logits, shape=()))


@mutant("lm_loss_nan_when_empty")
def _(correct: Operation) -> Operation:
    return _answering_when_empty(correct, lambda logits: np.full_like(logits, np.nan, shape=()))
