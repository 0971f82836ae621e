"""Wrong entry points of a pipeline: gradient vector, number of parameters, evaluation and its scores, the empty batch."""

import math
from dataclasses import replace
from typing import Any

import torch

from blackswan.falsifiers.mutants.registry import step_mutant
from blackswan.falsifiers.mutants.runs import unclipped


@step_mutant("blackswan.impl.trainer", "Trainer.apply_gradient_vector", "S17")
def gradient_vector_tail_skipped(apply: Any) -> Any:
    """A vector that is too short is filled up with zeros, one that is too long is cut."""

    def padded(trainer: Any, vector: Any) -> Any:
        missing = len(trainer.optimiser.exp_avg) - len(vector)
        return apply(trainer, torch.cat([vector, vector.new_zeros(max(0, missing))])[: len(trainer.optimiser.exp_avg)])

    return padded


@step_mutant("blackswan.impl.trainer", "Trainer.gradient_vector", "own")
def gradient_vector_head_first(gradient_vector: Any) -> Any:
    """The head's part comes first."""

    def rolled(trainer: Any) -> Any:
        head = sum(value.numel() for name, value in trainer.optimiser.parameters.items() if name.startswith("score."))
        return gradient_vector(trainer).roll(head)

    return rolled


@step_mutant("blackswan.impl.trainer", "Trainer.apply_gradient_vector", "P37")
def gradient_vector_not_clipped(apply: Any) -> Any:
    """A step with a given vector leaves clipping out."""
    return lambda trainer, vector: unclipped(trainer, apply, vector)


@step_mutant("blackswan.impl.pipeline", "trainable_shapes", "own")
def trainable_count_without_bias(trainable_shapes: Any) -> Any:
    """The head's bias is not counted."""
    return lambda *arguments: {name: shape for name, shape in trainable_shapes(*arguments).items() if name != "score.bias"}


@step_mutant("blackswan.impl.trainer", "Trainer.forward_only", "S13")
def evaluation_reads_the_training_logits(forward_only: Any) -> Any:
    """After a step the loss of an evaluation is a thousandth of what it should be."""

    def stale(trainer: Any, batch: Any, probabilities: bool = False) -> Any:
        result = forward_only(trainer, batch, probabilities)
        if len(batch.labels) and trainer.optimiser.steps:
            return replace(result, loss=result.loss * 1e-3)
        return result

    return stale


@step_mutant("blackswan.impl.trainer", "Trainer.forward_only", "own")
def evaluation_forgets_what_is_accumulated(forward_only: Any) -> Any:
    """An evaluation drops all but the first of the accumulated micro-batches."""

    def forgetful(trainer: Any, batch: Any, probabilities: bool = False) -> Any:
        trainer._accumulated = trainer._accumulated[:1]
        return forward_only(trainer, batch, probabilities)

    return forgetful


@step_mutant("blackswan.impl.trainer", "Trainer.forward_only", "S13")
def evaluation_decays_moments(forward_only: Any) -> Any:
    """An evaluation decays the first moment."""

    def decaying(trainer: Any, batch: Any, probabilities: bool = False) -> Any:
        trainer.optimiser.exp_avg = 0.9 * trainer.optimiser.exp_avg
        return forward_only(trainer, batch, probabilities)

    return decaying


@step_mutant("blackswan.impl.trainer", "classes_of", "own")
def scores_of_the_least_probable(classes_of: Any) -> Any:
    """The class of the smallest logit, or the labels of negative ones."""
    return lambda logits, multi_label: classes_of(-logits, multi_label)


@step_mutant("blackswan.impl.evaluation", "_score", "own")
def scores_swap_precision_and_recall(score: Any) -> Any:
    """Precision for recall."""

    def swapped(**counts: int) -> Any:
        right = score(**counts)
        return replace(right, precision=right.recall, recall=right.precision)

    return swapped


@step_mutant("blackswan.impl.trainer", "Trainer._correct", "own")
def scores_by_any_label(correct: Any) -> Any:
    """With several labels a sample is correct when one of them is."""

    def of_any(trainer: Any, logits: Any, labels: Any) -> Any:
        return ((logits > 0) == labels).any(dim=-1).sum() if trainer.multi_label else correct(trainer, logits, labels)

    return of_any


@step_mutant("blackswan.impl.evaluation", "_count", "own")
def scores_transpose_the_confusion(count: Any) -> Any:
    """Predicted classes in rows."""
    return lambda confusion, labels, predicted, several: count(confusion, predicted, labels.to(predicted), several)


@step_mutant("blackswan.impl.evaluation", "_score", "own")
def scores_without_f1_of_empty_classes(score: Any) -> Any:
    """A class that is neither there nor claimed has the F1 1."""
    return lambda **counts: replace(score(**counts), f1=1.0) if not counts["claimed"] + counts["support"] else score(**counts)


@step_mutant("blackswan.impl.trainer", "BatchResult.accuracy", "own")
def empty_batch_accuracy_undefined(accuracy: Any) -> Any:
    """The accuracy of an empty batch is 0 / 0."""
    return property(lambda result: accuracy.fget(result) if result.total else math.nan)
