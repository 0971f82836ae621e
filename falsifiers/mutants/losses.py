"""Wrong losses: weighted cross-entropy, binary cross-entropy, next-token loss."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import (
    Arguments,
    Change,
    Gradients,
    call,
    edited,
    first_rows,
    pull,
    scaled,
    through,
    with_arguments,
    with_gradients,
    without,
)
from blackswan.falsifiers.mutants.registry import mutants
from blackswan.reference.table import Array, Operation

LOSS = ("loss",)
NLL = "nll = _negative_log_likelihood(logits, labels)"
P = "softmax.forward(logits)"


def _batch(a: Arguments) -> int:
    return len(a["labels"])


def _weights_over_batch(a: Arguments) -> float:
    weights = a.get("class_weights")
    return 1.0 if weights is None else float(weights[a["labels"]].mean())


def _unweighted_gradient(correct: Operation) -> Operation:
    return with_gradients(logits=lambda _, dloss, a: pull(correct, dloss, {**a, "class_weights": None})["logits"])(correct)


mutants(
    "weighted_cross_entropy",
    cross_entropy_probability_floor=(
        "−ln max(p, 1e-10): saturates at 23.03.",
        edited((NLL, f"{NLL}.clip(max=-math.log(1e-10))"), only="forward"),
        "S8",
    ),
    cross_entropy_nan_swallowed=(
        "NaN logits give a finite loss.",
        through(
            "logits",
            by=lambda logits, _: np.where(np.isfinite(logits), logits, 0),
            back=lambda gradient, a: np.where(np.isfinite(a["logits"]), gradient, 0),
        ),
        "S9",
    ),
    cross_entropy_weight_by_prediction=(
        "Weight of the predicted class.",
        edited(("class_weights[labels]", "class_weights[logits.argmax(axis=1)]")),
        "P39",
    ),
    cross_entropy_divided_by_weights=("Divided by Σ w instead of the number of samples.", scaled(lambda a: 1 / _weights_over_batch(a))),
    cross_entropy_weights_add_up_to_classes=(
        "Class weights rescaled so that they add up to the number of classes.",
        scaled(lambda a: 1.0 if a.get("class_weights") is None else len(a["class_weights"]) / float(a["class_weights"].sum())),
    ),
    cross_entropy_sum=("Sum over samples instead of mean.", scaled(_batch)),
    cross_entropy_sum_in_float16=(
        "The losses of a batch added up in float16 before they are divided.",
        edited(("(weights * nll).sum()", "in_float16((weights * nll).sum())"), only="forward"),
    ),
    cross_entropy_weights_dropped=("Class weights ignored.", without("class_weights")),
    cross_entropy_base_two=("log2 instead of ln.", scaled(lambda _: 1 / math.log(2)), "S20"),
    cross_entropy_gradient_not_averaged=(
        "Gradient not divided by the batch.",
        with_gradients(logits=lambda gradient, _, a: gradient * _batch(a)),
    ),
    cross_entropy_gradient_unweighted=("Gradient without class weights.", _unweighted_gradient),
    cross_entropy_gradient_softmax_only=("Gradient p without − onehot.", edited((f"_minus_onehot({P}, labels)", P), only="backward")),
    cross_entropy_gradient_ignores_cotangent=(
        "The gradient of the loss, whatever share or multiple of it is differentiated.",
        edited(("dloss * (weights", "(weights"), only="backward"),
    ),
    cross_entropy_gradient_rounded_before_target=(
        "p rounded to bfloat16 before 1 is subtracted: of a confident sample that rounding is all that is left.",
        edited((f"_minus_onehot({P}, labels)", f"_minus_onehot(in_bfloat16({P}), labels)"), only="backward"),
        "P42",
    ),
    cross_entropy_gradient_rounded_before_weight=(
        "p − onehot rounded to bfloat16 before it meets the weight and the cotangent.",
        edited((f"_minus_onehot({P}, labels)", f"in_bfloat16(_minus_onehot({P}, labels))"), only="backward"),
    ),
    cross_entropy_gradient_floored=(
        "Probabilities below 1e-7 are raised to it in the gradient.",
        edited((f"_minus_onehot({P}, labels)", f"_minus_onehot(np.maximum({P}, 1e-7), labels)"), only="backward"),
    ),
    cross_entropy_label_clamped=(
        "A label out of range is clamped instead of refused.",
        with_arguments(labels=lambda a: np.clip(a["labels"], 0, a["logits"].shape[1] - 1)),
    ),
    cross_entropy_one_class_accepted=("One class gives loss 0 instead of a refusal.", edited(("if classes < 2:", "if False:"))),
    cross_entropy_label_smoothing=(
        "Label smoothing 0.1 left on.",
        edited(
            (NLL, f"{NLL} + 0.1 * (logits[np.arange(len(labels)), labels] - logits.mean(axis=1))"),
            (f"_minus_onehot({P}, labels)", f"0.9 * _minus_onehot({P}, labels) + 0.1 * ({P} - 1.0 / logits.shape[1])"),
        ),
    ),
    cross_entropy_without_max_shift=(
        "Exp overflows.",
        edited(
            ("shift = logits.max(axis=-1)", "shift = 0 * logits[:, 0]"),
            (f"_minus_onehot({P}, labels)", "_minus_onehot(np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True), labels)"),
        ),
        "P12",
    ),
)
mutants(
    "cross_entropy_per_sample",
    per_sample_loss_first_cotangent=(
        "Every sample's gradient times the cotangent of the first.",
        edited(("dlosses[:, None] * _minus", "dlosses[0] * _minus"), only="backward"),
        "P43",
    ),
    per_sample_loss_mean_cotangent=(
        "The gradient of the mean: every sample's times the mean of the cotangents.",
        edited(("dlosses[:, None] * _minus", "dlosses.mean() * _minus"), only="backward"),
    ),
    per_sample_loss_rounded_before_target=(
        "p rounded to bfloat16 before 1 is subtracted.",
        edited(("_minus_onehot(probabilities, labels)", "_minus_onehot(in_bfloat16(probabilities), labels)"), only="backward"),
        "P42",
    ),
    per_sample_loss_is_mean=(
        "The mean of the losses for each sample.",
        edited(
            (
                "    return _negative_log_likelihood(logits, labels)\n",
                "    return 0 * logits[:, 0] + _negative_log_likelihood(logits, labels).mean()\n",
            ),
            ("dlosses[:, None] * _minus", "dlosses.mean() * _minus"),
        ),
    ),
    per_sample_loss_base_two=("log2 instead of ln.", scaled(lambda _: 1 / math.log(2)), "S20"),
    per_sample_gradient_floored=(
        "Probabilities below 1e-7 are raised to it in the gradient.",
        edited(("_minus_onehot(probabilities, labels)", "_minus_onehot(np.maximum(probabilities, 1e-7), labels)"), only="backward"),
    ),
    per_sample_gradient_rounded_before_cotangent=(
        "p − onehot rounded to bfloat16 before it is multiplied by the cotangent.",
        edited(
            (
                "dlosses[:, None] * _minus_onehot(probabilities, labels)",
                "dlosses[:, None] * in_bfloat16(_minus_onehot(probabilities, labels))",
            ),
            only="backward",
        ),
    ),
)
BELOW = "np.log1p(np.exp(-np.abs(logits)))"
MEAN = "(np.maximum(logits, 0.0) - logits * targets + below).mean()"
SLOPE = "((1.0 - targets) * sigmoid(logits) - targets * complement(logits))"
mutants(
    "bce_with_logits",
    bce_unstable=(
        "−t ln σ(z) − (1−t) ln(1−σ(z)), infinite for large z.",
        edited(
            (BELOW, "1.0 / (1.0 + np.exp(-logits))"),
            (MEAN, "(-targets * np.log(below) - (1.0 - targets) * np.log(1.0 - below)).mean()"),
            only="forward",
        ),
        "P12",
    ),
    bce_targets_hardened=(
        "A target between 0 and 1 is rounded to one of them: labels that annotators disagree about become certain.",
        with_arguments(targets=lambda a: np.round(a["targets"])),
    ),
    bce_sum_over_classes=("Sum over classes instead of mean.", scaled(lambda a: a["logits"].shape[1])),
    bce_as_softmax=(
        "Softmax over classes instead of a sigmoid each.",
        edited(
            (BELOW, "(logits - logits.max(axis=1, keepdims=True))"),
            (MEAN, "(targets * (np.log(np.exp(below).sum(axis=1, keepdims=True)) - below)).mean()"),
            (SLOPE, "(targets.sum(axis=1, keepdims=True) * softmax.forward(logits) - targets)"),
            ("import numpy as np", "import numpy as np\nimport blackswan.reference.softmax as softmax"),
        ),
        "S24",
    ),
    bce_negatives_dropped=(
        "Only the positive targets count.",
        edited((MEAN, "(targets * (np.maximum(logits, 0.0) - logits + below)).mean()"), (SLOPE, "targets * (sigmoid(logits) - 1.0)")),
    ),
    bce_gradient_ignores_cotangent=(
        "The gradient of the loss, whatever share or multiple of it is differentiated.",
        edited(("dloss * " + SLOPE, SLOPE), only="backward"),
    ),
    bce_gradient_rounded_before_target=(
        "σ(z) rounded to bfloat16 before the target is subtracted.",
        edited((SLOPE, "(in_bfloat16(sigmoid(logits)) - targets)"), only="backward"),
        "P42",
    ),
    bce_log_of_one_plus=(
        "log(1 + e^(−|z|)): of a confident label nothing is left.",
        edited((BELOW, "np.log(1.0 + np.exp(-np.abs(logits)))"), only="forward"),
    ),
    bce_probability_floor=(
        "1e-7 is added to what the logarithm takes.",
        edited((BELOW, "np.log1p(np.exp(-np.abs(logits)) + 1e-7)"), only="forward"),
    ),
    bce_through_the_sum=(
        "max(z, 0) + log1p first, then less z t: of a confident label the rounding of z is left.",
        edited((MEAN, "(np.maximum(logits, 0.0) + below - logits * targets).mean()"), only="forward"),
    ),
    bce_gradient_of_target=(
        "σ(z) − t, of which nothing is left where σ(z) rounds to the target.",
        edited((SLOPE, "(sigmoid(logits) - targets)"), only="backward"),
    ),
    bce_gradient_one_sided=(
        "At z = 0 the derivative of max(z, 0) is taken for 1 and that of |z| for 0: 1 − t.",
        edited((SLOPE, f"np.where(logits == 0, 1.0 - targets, {SLOPE})"), only="backward"),
    ),
    bce_gradient_rounded_twice=(
        "The gradient of the sum rounded to bfloat16 before it is divided.",
        edited((SLOPE, f"in_bfloat16({SLOPE})"), only="backward"),
    ),
    bce_gradient_not_averaged=(
        "Gradient not divided by samples times classes.",
        with_gradients(logits=lambda gradient, _, a: gradient * a["logits"].size),
        "S24",
    ),
)


def _predicting(a: Arguments) -> Array:
    return np.asarray(a["mask"][:, :-1] & a["mask"][:, 1:])


def _in_parts(correct: Operation) -> Operation:
    """Samples of many logits are taken one by one, and their means averaged as if they had as many targets each."""
    apart = _mean_of_sample_means(correct)

    def forward(**a: Any) -> Array:
        return np.asarray(call(apart if a["logits"].size > 2**20 else correct, a))

    def backward(dloss: Array, **a: Any) -> Gradients:
        return pull(apart if a["logits"].size > 2**20 else correct, dloss, a)

    return Operation(forward, backward, correct.outputs)


def _mean_of_sample_means(correct: Operation) -> Operation:
    def samples(a: Arguments) -> list[slice]:
        return [slice(int(row), int(row) + 1) for row in np.flatnonzero(_predicting(a).any(axis=1))]

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


def _answering_when_empty(answer: str) -> Change:
    """Another loss than a refusal where nothing is predicted."""
    mean = "_negative_log_likelihood(logits[where], target).mean()"
    return edited(("if where[0].size == 0:", "if False:"), (mean, f"{mean} if len(target) else np.full_like(logits, {answer}, shape=())"))


def _other_tokens(shift: int) -> Callable[[Arguments], Array]:
    return lambda a: np.roll(a["input_ids"], shift, axis=1)


mutants(
    "lm_cross_entropy",
    lm_loss_unshifted=("A position predicts its own token.", with_arguments(input_ids=_other_tokens(1)), "P38"),
    lm_loss_shifted_twice=("A position predicts the token after the next.", with_arguments(input_ids=_other_tokens(-1)), "P38"),
    lm_loss_first_tokens_only=(
        "Only the first 65,536 tokens of the vocabulary count, as in one block of a kernel.",
        through(
            "logits",
            by=lambda logits, _: np.where(np.arange(logits.shape[-1]) < 65_536, logits, -1e4),
            back=lambda gradient, _: np.where(np.arange(gradient.shape[-1]) < 65_536, gradient, 0),
        ),
    ),
    lm_loss_of_first_wave=(
        "Positions beyond the first 1,024 are neither read nor counted: one wave of a kernel's programs.",
        with_arguments(mask=lambda a: a["mask"] & first_rows("mask", 2)(a)),
    ),
    lm_gradient_rounded_before_mean=(
        "p − onehot rounded to bfloat16 before it is divided by the number of positions.",
        edited(("dloss * difference / len(target)", "dloss * in_bfloat16(difference) / len(target)"), only="backward"),
    ),
    lm_loss_sum_in_float16=(
        "The losses of all positions added up in float16 before they are divided.",
        edited(
            (
                "_negative_log_likelihood(logits[where], target).mean()",
                "in_float16(_negative_log_likelihood(logits[where], target).sum()) / len(target)",
            ),
            only="forward",
        ),
    ),
    lm_loss_counts_padding=("Divided by all positions.", scaled(lambda a: float(_predicting(a).mean())), "S11"),
    lm_loss_mask_ignored=("Padding tokens are targets.", with_arguments(mask=lambda a: a["mask"] | True), "S11"),
    lm_loss_padding_predicts=(
        "The padding before a first real token predicts it.",
        with_arguments(mask=lambda a: a["mask"] | np.concatenate([a["mask"][:, 1:], a["mask"][:, -1:]], axis=1)),
    ),
    lm_loss_base_two=("log2 instead of ln.", scaled(lambda _: 1 / math.log(2)), "S20"),
    lm_loss_mean_of_sample_means=("Mean over samples of their means.", _mean_of_sample_means, "S12, P31"),
    lm_loss_in_parts=("Of more than a million logits the mean is over samples of their means.", _in_parts),
    lm_loss_gradient_ignores_cotangent=(
        "The gradient of the loss, whatever share or multiple of it is differentiated.",
        edited(("dloss * difference / len", "difference / len"), only="backward"),
    ),
    lm_loss_gradient_rounded_before_target=(
        "p rounded to bfloat16 before 1 is subtracted.",
        edited(
            ("_minus_onehot(softmax.forward(logits[where]), target)", "_minus_onehot(in_bfloat16(softmax.forward(logits[where])), target)"),
            only="backward",
        ),
        "P42",
    ),
    lm_loss_gradient_not_averaged=(
        "Gradient of the sum.",
        with_gradients(logits=lambda gradient, _, a: gradient * int(_predicting(a).sum())),
    ),
    lm_loss_made_up_when_empty=("Loss 1.0 where nothing is predicted.", _answering_when_empty("1.0"), "S11"),
    lm_loss_nan_when_empty=("0/0 where nothing is predicted.", _answering_when_empty("math.nan")),
)
