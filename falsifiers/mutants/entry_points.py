"""Wrong entry points of a pipeline: gradient vector, number of parameters, evaluation and its scores, the empty batch."""

import math
from dataclasses import replace
from typing import Any

import torch

from blackswan.falsifiers.mutants.patches import step_mutant
from blackswan.falsifiers.mutants.runs import unclipped


@step_mutant("gradient_vector_tail_skipped", "blackswan.impl.trainer", "Trainer.apply_gradient_vector")
def _(apply: Any) -> Any:
    def padded(trainer: Any, vector: Any) -> Any:
        missing = len(trainer.optimiser.exp_avg) - len(vector)
        return apply(trainer, torch.cat([vector, vector.new_zeros(max(0, missing))])[: len(trainer.optimiser.exp_avg)])

    return padded


@step_mutant("gradient_vector_head_first", "blackswan.impl.trainer", "Trainer.gradient_vector")
def _(gradient_vector: Any) -> Any:
    def rolled(trainer: Any) -> Any:
        head = sum(value.numel() for name, value in trainer.optimiser.parameters.items() if name.startswith("score."))
        return gradient_vector(trainer).roll(head)

    return rolled


@step_mutant("gradient_vector_not_clipped", "blackswan.impl.trainer", "Trainer.apply_gradient_vector")
def _(apply: Any) -> Any:
    return lambda trainer, vector: unclipped(trainer, apply, vector)


@step_mutant("trainable_count_without_bias", "blackswan.impl.pipeline", "trainable_shapes")
def _(trainable_shapes: Any) -> Any:
    return lambda *arguments: {name: shape for name, shape in trainable_shapes(*arguments).items() if name != "score.bias"}


@step_mutant("evaluation_reads_the_training_logits", "blackswan.impl.trainer", "Trainer.forward_only")
def _(forward_only: Any) -> Any:
    def stale(trainer: Any, batch: Any, probabilities: bool = False) -> Any:
        result = forward_only(trainer, batch, probabilities)
        if len(batch.labels) and trainer.optimiser.steps:
            return replace(result, loss=result.loss * 1e-3)
        return result

    return stale


@step_mutant("evaluation_forgets_what_is_accumulated", "blackswan.impl.trainer", "Trainer.forward_only")
def _(forward_only: Any) -> Any:
    def forgetful(trainer: Any, batch: Any, probabilities: bool = False) -> Any:
        trainer._accumulated = trainer._accumulated[:1]
        return forward_only(trainer, batch, probabilities)

    return forgetful


@step_mutant("evaluation_decays_moments", "blackswan.impl.trainer", "Trainer.forward_only")
def _(forward_only: Any) -> Any:
    def decaying(trainer: Any, batch: Any, probabilities: bool = False) -> Any:
        trainer.optimiser.exp_avg = 0.9 * trainer.optimiser.exp_avg
        return forward_only(trainer, batch, probabilities)

    return decaying


@step_mutant("scores_of_the_least_probable", "blackswan.impl.trainer", "classes_of")
def _(classes_of: Any) -> Any:
    return lambda logits, multi_label: classes_of(-logits, multi_label)


@step_mutant("scores_swap_precision_and_recall", "blackswan.impl.evaluation", "_score")
def _(score: Any) -> Any:
    def swapped(**counts: int) -> Any:
        right = score(**counts)
        return replace(right, precision=right.recall, recall=right.precision)

    return swapped


@step_mutant("scores_by_any_label", "blackswan.impl.trainer", "Trainer._correct")
def _(correct: Any) -> Any:
    def of_any(trainer: Any, logits: Any, labels: Any) -> Any:
        return ((logits > 0) == labels).any(dim=-1).sum() if trainer.multi_label else correct(trainer, logits, labels)

    return of_any


@step_mutant("scores_transpose_the_confusion", "blackswan.impl.evaluation", "_count")
def _(count: Any) -> Any:
    return lambda confusion, labels, predicted, several: count(confusion, predicted, labels.to(predicted), several)


@step_mutant("scores_without_f1_of_empty_classes", "blackswan.impl.evaluation", "_score")
def _(score: Any) -> Any:
    return lambda **counts: replace(score(**counts), f1=1.0) if not counts["claimed"] + counts["support"] else score(**counts)


@step_mutant("empty_batch_accuracy_undefined", "blackswan.impl.trainer", "BatchResult.accuracy")
def _(accuracy: Any) -> Any:
    return property(lambda result: accuracy.fget(result) if result.total else math.nan)
