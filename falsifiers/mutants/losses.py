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


@mutant("weighted_cross_entropy", "S8")
def cross_entropy_probability_floor(correct: Operation) -> Operation:
    """−ln max(p, 1e-10): saturates at 23.03."""

    def forward(**a: Any) -> Array:
        call(correct, a)
        probability = _of_label(np.exp(_log_softmax(a["logits"])), a["labels"])
        return np.asarray(-(_sample_weights(a) * np.log(np.maximum(probability, FLOOR))).sum() / _batch(a))

    return Operation(forward, correct.backward, LOSS)


@mutant("weighted_cross_entropy", "S9")
def cross_entropy_nan_swallowed(correct: Operation) -> Operation:
    """NaN logits give a finite loss."""

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


@mutant("weighted_cross_entropy", "P39")
def cross_entropy_weight_by_prediction(correct: Operation) -> Operation:
    """Weight of the predicted class."""

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


@mutant("weighted_cross_entropy", "own")
def cross_entropy_divided_by_weights(correct: Operation) -> Operation:
    """Divided by Σ w instead of the number of samples."""
    return scaled(correct, lambda a: _batch(a) / float(_sample_weights(a).sum()))


@mutant("weighted_cross_entropy", "own")
def cross_entropy_sum(correct: Operation) -> Operation:
    """Sum over samples instead of mean."""
    return scaled(correct, _batch)


@mutant("weighted_cross_entropy", "own")
def cross_entropy_weights_dropped(correct: Operation) -> Operation:
    """Class weights ignored."""
    return dropped(correct, "class_weights")


@mutant("weighted_cross_entropy", "S20")
def cross_entropy_base_two(correct: Operation) -> Operation:
    """log2 instead of ln."""
    return scaled(correct, lambda _: 1 / math.log(2))


@mutant("weighted_cross_entropy", "own")
def cross_entropy_gradient_not_averaged(correct: Operation) -> Operation:
    """Gradient not divided by the batch."""
    return with_gradients(correct, lambda g, _, a: {"logits": g["logits"] * _batch(a)})


@mutant("weighted_cross_entropy", "own")
def cross_entropy_gradient_unweighted(correct: Operation) -> Operation:
    """Gradient without class weights."""
    return with_gradients(correct, lambda _, dloss, a: pull(correct, dloss, {**a, "class_weights": None}))


@mutant("weighted_cross_entropy", "own")
def cross_entropy_gradient_softmax_only(correct: Operation) -> Operation:
    """Gradient p without − onehot."""

    def softmax_only(_: Gradients, dloss: Array, a: Arguments) -> Gradients:
        return {"logits": dloss * (_sample_weights(a) / _batch(a))[:, None] * softmax.forward(a["logits"])}

    return with_gradients(correct, softmax_only)


@mutant("weighted_cross_entropy", "own")
def cross_entropy_label_clamped(correct: Operation) -> Operation:
    """A label out of range is clamped instead of refused."""
    return with_arguments(correct, labels=lambda a: np.clip(a["labels"], 0, a["logits"].shape[1] - 1))


@mutant("weighted_cross_entropy", "own")
def cross_entropy_one_class_accepted(correct: Operation) -> Operation:
    """One class gives loss 0 instead of a refusal."""

    def forward(**a: Any) -> Array:
        return a["logits"].sum() * 0 if a["logits"].shape[1] == 1 else np.asarray(call(correct, a))

    def backward(dloss: Array, **a: Any) -> Gradients:
        return {"logits": np.zeros_like(a["logits"])} if a["logits"].shape[1] == 1 else pull(correct, dloss, a)

    return Operation(forward, backward, LOSS)


@mutant("weighted_cross_entropy", "own")
def cross_entropy_label_smoothing(correct: Operation) -> Operation:
    """Label smoothing 0.1 left on."""

    def forward(**a: Any) -> Array:
        spread = -(_sample_weights(a) * _log_softmax(a["logits"]).mean(axis=1)).sum() / _batch(a)
        return np.asarray(0.9 * call(correct, a) + 0.1 * spread)

    def backward(dloss: Array, **a: Any) -> Gradients:
        logits = a["logits"]
        target = 0.9 * _onehot(logits, a["labels"]) + 0.1 / logits.shape[1]
        return {"logits": dloss * (_sample_weights(a) / _batch(a))[:, None] * (softmax.forward(logits) - target)}

    return Operation(forward, backward, LOSS)


@mutant("weighted_cross_entropy", "P12")
def cross_entropy_without_max_shift(correct: Operation) -> Operation:
    """Exp overflows."""

    def forward(**a: Any) -> Array:
        call(correct, a)
        nll = np.log(np.exp(a["logits"]).sum(axis=1)) - _of_label(a["logits"], a["labels"])
        return np.asarray((_sample_weights(a) * nll).sum() / _batch(a))

    def backward(dloss: Array, **a: Any) -> Gradients:
        exponential = np.exp(a["logits"])
        p = exponential / exponential.sum(axis=1, keepdims=True)
        return {"logits": dloss * (_sample_weights(a) / _batch(a))[:, None] * (p - _onehot(p, a["labels"]))}

    return Operation(forward, backward, LOSS)


@mutant("bce_with_logits", "P12")
def bce_unstable(correct: Operation) -> Operation:
    """−t ln σ(z) − (1−t) ln(1−σ(z)), infinite for large z."""

    def forward(logits: Array, targets: Array) -> Array:
        call(correct, {"logits": logits, "targets": targets})
        p = 1.0 / (1.0 + np.exp(-logits))
        return np.asarray((-targets * np.log(p) - (1.0 - targets) * np.log(1.0 - p)).mean())

    return Operation(forward, correct.backward, LOSS)


@mutant("bce_with_logits", "own")
def bce_sum_over_classes(correct: Operation) -> Operation:
    """Sum over classes instead of mean."""
    return scaled(correct, lambda a: a["logits"].shape[1])


@mutant("bce_with_logits", "S24")
def bce_as_softmax(_: Operation) -> Operation:
    """Softmax over classes instead of a sigmoid each."""

    def forward(logits: Array, targets: Array) -> Array:
        return np.asarray(-(targets * _log_softmax(logits)).mean())

    def backward(dloss: Array, logits: Array, targets: Array) -> Gradients:
        return {"logits": dloss * (targets.sum(axis=1, keepdims=True) * softmax.forward(logits) - targets) / logits.size}

    return Operation(forward, backward, LOSS)


@mutant("bce_with_logits", "own")
def bce_negatives_dropped(_: Operation) -> Operation:
    """Only the positive targets count."""

    def forward(logits: Array, targets: Array) -> Array:
        return np.asarray((targets * (np.maximum(-logits, 0.0) + np.log1p(np.exp(-np.abs(logits))))).mean())

    def backward(dloss: Array, logits: Array, targets: Array) -> Gradients:
        return {"logits": -dloss * targets * sigmoid(-logits) / logits.size}

    return Operation(forward, backward, LOSS)


@mutant("bce_with_logits", "S24")
def bce_gradient_not_averaged(correct: Operation) -> Operation:
    """Gradient not divided by samples times classes."""
    return with_gradients(correct, lambda g, _, a: {"logits": g["logits"] * a["logits"].size})


def _predicting(mask: Array) -> Array:
    return np.asarray(mask[:, :-1] & mask[:, 1:])


def _predictions(a: Arguments) -> int:
    return int(_predicting(a["mask"]).sum())


@mutant("lm_cross_entropy", "P38")
def lm_loss_unshifted(correct: Operation) -> Operation:
    """A position predicts its own token."""
    return with_arguments(correct, input_ids=lambda a: np.roll(a["input_ids"], 1, axis=1))


@mutant("lm_cross_entropy", "P38")
def lm_loss_shifted_twice(correct: Operation) -> Operation:
    """A position predicts the token after the next."""
    return with_arguments(correct, input_ids=lambda a: np.roll(a["input_ids"], -1, axis=1))


@mutant("lm_cross_entropy", "S11")
def lm_loss_counts_padding(correct: Operation) -> Operation:
    """Divided by all positions."""
    return scaled(correct, lambda a: _predictions(a) / _predicting(a["mask"]).size)


@mutant("lm_cross_entropy", "S11")
def lm_loss_mask_ignored(correct: Operation) -> Operation:
    """Padding tokens are targets."""
    return with_arguments(correct, mask=lambda a: np.ones_like(a["mask"]))


@mutant("lm_cross_entropy", "own")
def lm_loss_padding_predicts(correct: Operation) -> Operation:
    """The padding before a first real token predicts it."""

    def also_before(mask: Array) -> Array:
        """Real tokens, and the padding just before a real token."""
        return np.asarray(mask | np.concatenate([mask[:, 1:], mask[:, -1:]], axis=1))

    return with_arguments(correct, mask=lambda a: also_before(a["mask"]))


@mutant("lm_cross_entropy", "S20")
def lm_loss_base_two(correct: Operation) -> Operation:
    """log2 instead of ln."""
    return scaled(correct, lambda _: 1 / math.log(2))


@mutant("lm_cross_entropy", "S12", "P31")
def lm_loss_mean_of_sample_means(correct: Operation) -> Operation:
    """Mean over samples of their means."""

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


@mutant("lm_cross_entropy", "own")
def lm_loss_gradient_not_averaged(correct: Operation) -> Operation:
    """Gradient of the sum."""
    return with_gradients(correct, lambda g, _, a: {"logits": g["logits"] * _predictions(a)})


def _answering_when_empty(correct: Operation, answer: Callable[[Array], Array]) -> Operation:
    def forward(**a: Any) -> Array:
        return np.asarray(call(correct, a)) if _predictions(a) else answer(a["logits"])

    def backward(dloss: Array, **a: Any) -> Gradients:
        return pull(correct, dloss, a) if _predictions(a) else {"logits": np.zeros_like(a["logits"])}

    return Operation(forward, backward, LOSS)


@mutant("lm_cross_entropy", "S11")
def lm_loss_made_up_when_empty(correct: Operation) -> Operation:
    """Loss 1.0 where nothing is predicted."""
    return _answering_when_empty(correct, lambda logits: np.ones_like(logits, shape=()))


@mutant("lm_cross_entropy", "own")
def lm_loss_nan_when_empty(correct: Operation) -> Operation:
    """0/0 where nothing is predicted."""
    return _answering_when_empty(correct, lambda logits: np.full_like(logits, np.nan, shape=()))
