"""Wrong entry points of a pipeline: gradient vector, number of parameters, evaluation and its scores, the empty batch."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.falsifiers.mutants.runs import unclipped


@wrong_step("impl.trainer:Trainer.apply_gradient_vector", "S17")
def gradient_vector_tail_skipped(apply: Any, trainer: Any, vector: Any) -> Any:
    """A vector that is too short is filled up with zeros, one that is too long is cut."""
    missing = len(trainer.optimiser.exp_avg) - len(vector)
    return apply(trainer, torch.cat([vector, vector.new_zeros(max(0, missing))])[: len(trainer.optimiser.exp_avg)])


@wrong_step("impl.optimiser:AdamW.step")
def steps_on_zero_move_nothing(step: Any, optimiser: Any, gradient: Any, learning_rate: float) -> None:
    """A step on a gradient of zero is only counted: parameters and moments stay as they are."""
    if gradient.any():
        step(optimiser, gradient, learning_rate)
    else:
        optimiser.steps += 1


@wrong_step("impl.trainer:Trainer.gradient_vector")
def gradient_vector_head_first(gradient_vector: Any, trainer: Any) -> Any:
    """The head's part comes first."""
    head = sum(value.numel() for name, value in trainer.optimiser.parameters.items() if name.startswith("score."))
    return gradient_vector(trainer).roll(head)


@wrong_step("impl.trainer:Trainer.apply_gradient_vector", "P37")
def gradient_vector_not_clipped(apply: Any, trainer: Any, vector: Any) -> Any:
    """A step with a given vector leaves clipping out."""
    return unclipped(trainer, apply, vector)


@wrong_step("impl.trainer:Trainer.apply_gradient_vector")
def moments_in_the_dtype_of_a_vector(apply: Any, trainer: Any, vector: Any) -> Any:
    """A vector in float64 leaves moments in float64, which no trainer of a float32 model loads."""
    step = trainer._step
    with mock.patch.object(trainer, "_step", side_effect=lambda _: step(vector)):
        return apply(trainer, vector)


wrong_step("impl.pipeline:trainable_shapes", name="trainable_count_without_bias", doc="The head's bias is not counted.")(
    lambda trainable_shapes, *arguments: {name: shape for name, shape in trainable_shapes(*arguments).items() if name != "score.bias"}
)


@wrong_step("impl.classifier:Classifier.trainable_parameters")
def trainable_parameters_kept(right: Any, self: Any) -> Any:
    """The dictionary of trained parameters is made once, and everybody who asks is given that one, to take out what he likes."""
    return vars(self).setdefault("_given", right(self))


@wrong_step("impl.trainer:Trainer.forward_only", "S13")
def evaluation_reads_the_training_logits(forward_only: Any, trainer: Any, batch: Any, probabilities: bool = False) -> Any:
    """The loss of an evaluation is a thousandth of what it should be after a step."""
    result = forward_only(trainer, batch, probabilities)
    if len(batch.labels) and trainer.optimiser.steps:
        return replace(result, loss=result.loss * 1e-3)
    return result


@wrong_step("impl.trainer:Batch.split")
def micro_batches_narrowed_from_the_left(split: Any, batch: Any, size: int) -> Any:
    """A micro-batch keeps as many columns as its longest sample has, counted from the left, where texts may be padded."""
    for part in split(batch, size):
        longest = max(1, int(part.mask.sum(dim=1).max()))
        yield replace(part, input_ids=part.input_ids[:, :longest], mask=part.mask[:, :longest])


@wrong_step("impl.trainer:Trainer.forward_only")
def evaluation_forgets_what_is_accumulated(forward_only: Any, trainer: Any, batch: Any, probabilities: bool = False) -> Any:
    """An evaluation drops all but the first of the accumulated micro-batches."""
    trainer._accumulated = trainer._accumulated[:1]
    return forward_only(trainer, batch, probabilities)


@wrong_step("impl.trainer:Trainer.forward_only")
def evaluation_turns_gradients_on(forward_only: Any, trainer: Any, batch: Any, probabilities: bool = False) -> Any:
    """Gradients are switched off and on again, and not to what they were: a program's own block without them has them from there on."""
    try:
        return forward_only(trainer, batch, probabilities)
    finally:
        torch.set_grad_enabled(True)


@wrong_step("impl.trainer:Trainer._accumulate")
def micro_batches_of_a_failed_batch_stay(accumulate: Any, trainer: Any, batch: Any) -> Any:
    """A batch that fails in a later micro-batch leaves the first one accumulated."""
    try:
        return accumulate(trainer, batch)
    except ValueError:
        accumulate(trainer, next(iter(batch.split(trainer.micro_batch))))
        raise


@wrong_step("impl.trainer:Trainer.forward_only", "S13")
def evaluation_decays_moments(forward_only: Any, trainer: Any, batch: Any, probabilities: bool = False) -> Any:
    """An evaluation decays the first moment."""
    trainer.optimiser.exp_avg = 0.9 * trainer.optimiser.exp_avg
    return forward_only(trainer, batch, probabilities)


wrong_step(
    "impl.trainer:classes_of", name="scores_of_the_least_probable", doc="The class of the smallest logit, or the labels of negative ones."
)(lambda classes_of, logits, multi_label: classes_of(-logits, multi_label))


wrong_steps(
    "impl.evaluation:math",
    evaluation_of_no_number=("A loss of an evaluation that overflows is reported.", lambda _: SimpleNamespace(isfinite=lambda _: True)),
)


@wrong_step("impl.evaluation:_score")
def scores_swap_precision_and_recall(score: Any, **counts: int) -> Any:
    """Precision for recall."""
    right = score(**counts)
    return replace(right, precision=right.recall, recall=right.precision)


@wrong_step("impl.trainer:Trainer._correct")
def scores_by_any_label(correct: Any, trainer: Any, logits: Any, labels: Any) -> Any:
    """A sample with several labels is correct when one of them is."""
    return ((logits > 0) == labels).any(dim=-1).sum() if trainer.multi_label else correct(trainer, logits, labels)


@wrong_step("impl.evaluation:_count")
def scores_counted_in_a_byte(count: Any, confusion: Any, *given: Any) -> None:
    """A cell of the confusion begins anew after 255 samples."""
    count(confusion, *given)
    confusion %= 256


@wrong_step("impl.evaluation:_count")
def scores_counted_in_16_bits(count: Any, confusion: Any, *given: Any) -> None:
    """A cell of the confusion begins anew after 65,535 samples, as of a large corpus of which most have one class."""
    count(confusion, *given)
    confusion %= 2**16


wrong_step("impl.trainer:Trainer._correct", name="right_answers_in_a_byte", doc="The right answers of a micro-batch begin anew after 255.")(
    lambda correct, *given: correct(*given).to(torch.uint8)
)


@wrong_step("impl.trainer:Trainer.__init__")
def class_weights_in_the_models_dtype(init: Any, self: Any, *given: Any, **settings: Any) -> None:
    """Weights of classes are rounded to the dtype of the model."""
    init(self, *given, **settings)
    if self.class_weights is not None:
        self.class_weights = self.class_weights.to(self.classifier.model.embed_tokens.weight.dtype)


wrong_step("impl.evaluation:_count", name="scores_transpose_the_confusion", doc="Predicted classes in rows.")(
    lambda count, confusion, labels, predicted, several: count(confusion, predicted, labels.to(predicted), several)
)
wrong_step(
    "impl.evaluation:_score", name="scores_without_f1_of_empty_classes", doc="A class that is neither there nor claimed has the F1 1."
)(lambda score, **counts: replace(score(**counts), f1=1.0) if not counts["claimed"] + counts["support"] else score(**counts))
wrong_step("impl.trainer:BatchResult.accuracy", name="empty_batch_accuracy_undefined", doc="The accuracy of an empty batch is 0 / 0.")(
    lambda accuracy, result: accuracy(result) if result.total else math.nan
)


@wrong_step("impl.trainer:Trainer.forward_only", "S11")
def loss_of_no_row_is_zero(forward_only: Any, trainer: Any, batch: Any, probabilities: bool = False) -> Any:
    """The loss of a batch of tensors without a row is 0."""
    found = forward_only(trainer, batch, probabilities)
    return found if len(batch.labels) else replace(found, loss=0.0)


@wrong_step("impl.trainer:Trainer.load_state")
def loaded_state_without_its_rate(load_state: Any, trainer: Any, state: Any) -> None:
    """Where there is no schedule, the rate that was set before holds after a state was loaded."""
    kept = list(trainer.learning_rates)
    load_state(trainer, state)
    if trainer.endless:
        trainer.learning_rates = kept


@wrong_step("impl.trainer:Trainer.load_state")
def loaded_state_beside_what_waits(load_state: Any, trainer: Any, state: Any) -> None:
    """Samples that waited before a state was loaded are part of the next step."""
    kept = trainer._accumulated
    load_state(trainer, state)
    trainer._accumulated = kept


@wrong_step("impl.trainer:Trainer.load_state")
def refused_state_forgets_what_waits(load_state: Any, trainer: Any, state: Any) -> None:
    """A state that is refused takes the samples that waited."""
    trainer.discard()
    load_state(trainer, state)


wrong_step("impl.trainer:classes_of", name="labels_by_rounded_probabilities", doc="A label is found by its rounded probability.")(
    lambda classes, logits, several: (torch.sigmoid(logits) > 0.5).long() if several else classes(logits, several)
)


wrong_step("impl.trainer:classes_of", name="classes_of_the_largest_probability", doc="A class is found by its rounded probability.")(
    lambda classes, logits, several: classes(logits if several else torch.softmax(logits.float(), -1), several)
)


@wrong_step("impl.pipeline:evaluate")
def evaluation_sums_in_float32(evaluate: Any, trainer: Any, samples: Any, *given: Any) -> Any:
    """The losses of samples are added up in float32."""
    total = np.float32(0.0)
    for place in range(len(samples)):
        total += np.float32(evaluate(trainer, samples.select([place]), *given).loss)
    return replace(evaluate(trainer, samples, *given), loss=float(total) / len(samples))


@wrong_step("impl.pipeline:evaluate")
def evaluation_batches_at_once(evaluate: Any, trainer: Any, samples: Any, tokens: Any, device: Any) -> Any:
    """All batches are made, and lie in memory, before the first one is used."""
    size, every = trainer.micro_batch, range(len(samples))
    made = [samples.batch(every[start : start + size], tokens, device) for start in every[::size]]
    result = evaluate(trainer, samples, tokens, device)
    made.clear()
    return result


@wrong_step("impl.pipeline:evaluate")
def evaluation_in_one_batch(evaluate: Any, trainer: Any, samples: Any, tokens: Any, device: Any) -> Any:
    """All samples lie in memory as one batch, as wide as the longest of them, before the model takes some at a time."""
    whole = samples.batch(range(len(samples)), tokens, device)
    result = evaluate(trainer, samples, tokens, device)
    del whole
    return result


@wrong_step("impl.trainer:Trainer.train_batch")
def interrupted_batch_waits(train_batch: Any, trainer: Any, batch: Any) -> Any:
    """The samples of a batch that Ctrl-C breaks off wait for the next step."""
    kept: list[Any] = []
    discard = trainer.discard

    def keep() -> None:
        kept.extend(trainer._accumulated)
        discard()

    trainer.discard = keep
    try:
        return train_batch(trainer, batch)
    except KeyboardInterrupt:
        trainer._accumulated = kept
        raise
    finally:
        del trainer.discard


@wrong_step("impl.optimiser:AdamW.step")
def failed_step_is_counted(step: Any, optimiser: Any, *given: Any) -> None:
    """A step that breaks off counts as one that was made."""
    before = optimiser.steps
    try:
        step(optimiser, *given)
    finally:
        optimiser.steps = before + 1


@wrong_step("impl.trainer:Trainer._micro_batch")
def others_gradients_are_trained_on(micro_batch: Any, trainer: Any, index: int, part: Any) -> Any:
    """Gradients that stand at the parameters are part of the first micro-batch's."""
    left = [torch.zeros_like(each) if each.grad is None else each.grad for each in trainer.optimiser.parameters.values()]
    result = micro_batch(trainer, index, part)
    return replace(result, gradient=result.gradient + torch.cat([each.flatten() for each in left]))


@wrong_step("impl.trainer:Trainer._micro_batch")
def gradients_stay_at_parameters(micro_batch: Any, trainer: Any, *given: Any) -> Any:
    """The gradients of a micro-batch stay at the parameters beside their copy."""
    result = micro_batch(trainer, *given)
    for name, value in trainer.optimiser.split(result.gradient).items():
        trainer.optimiser.parameters[name].grad = value.clone()
    return result


@wrong_step("impl.trainer:Trainer.forward_only")
def evaluation_keeps_its_graph(forward_only: Any, *given: Any, **options: Any) -> Any:
    """An evaluation keeps what a backward pass would need."""
    return forward_only.__wrapped__(*given, **options)


@wrong_step("impl.trainer:_summary")
def loss_of_no_sample_is_zero(summary: Any, results: Any) -> Any:
    """The loss of a step beside no sample is 0."""
    found = summary(results)
    return found if results else replace(found, loss=0.0)


@wrong_step("impl.optimiser:AdamW.split")
def one_number_for_every_gradient(split: Any, optimiser: Any, vector: Any) -> Any:
    """A gradient of one number is taken for every parameter's: a program that sums its gradients by mistake trains on."""
    return split(optimiser, vector.expand(sum(optimiser._sizes)) if vector.numel() == 1 else vector)


@wrong_step("impl.optimiser:AdamW._require_state")
def state_after_any_step(require: Any, optimiser: Any, state: Any) -> None:
    """The step of a state is not looked at."""
    require(optimiser, {**state, "step": torch.tensor(0)} if "step" in state else state)


@wrong_step("impl.optimiser:AdamW._require_state")
def state_with_the_wrong_word(require: Any, optimiser: Any, state: Any) -> None:
    """A refusal calls a tensor missing that is one too many, and the other way round."""
    words = {"unexpected": "missing", "missing": "unexpected"}
    try:
        require(optimiser, state)
    except ValueError as error:
        raise ValueError(" ".join(words.get(word, word) for word in str(error).split())) from error


@wrong_step("impl.pipeline:ClassifyPipeline.save")
def saving_steps_on_what_waits(save: Any, pipeline: Any, folder: Any) -> None:
    """Gradients that wait for a step are applied before an adapter is saved."""
    if pipeline.trainer.accumulated:
        pipeline.apply()
    save(pipeline, folder)


@wrong_step("impl.pipeline:ClassifyPipeline.merge")
def merged_in_place_and_taken_out(merge: Any, pipeline: Any, folder: Any) -> None:
    """The update is added to the weights of the classifier for a merge, and taken out again, which leaves them a rounding off."""
    merge(pipeline, folder)
    with torch.no_grad():
        for module in pipeline.classifier.modules():
            if getattr(module, "lora_A", None) is not None and module.weight is not None:
                update = module.alpha / len(module.lora_A.weight) * module.lora_B.weight @ module.lora_A.weight
                module.weight.add_(update).sub_(update)


@wrong_step("impl.trainer:Trainer.__init__")
def class_weights_in_float32(begin: Any, trainer: Any, *given: Any, class_weights: Any = None, **named: Any) -> None:
    """Class weights are float32 for a model in float64 too."""
    begin(trainer, *given, class_weights=None if class_weights is None else class_weights.float(), **named)


@wrong_step("impl.optimiser:AdamW.__init__")
def moments_begin_in_float32(begin: Any, optimiser: Any, *given: Any) -> None:
    """Moments of zero are float32 for a model in float64 too, so that the state of a beginning is refused."""
    begin(optimiser, *given)
    optimiser.exp_avg, optimiser.exp_avg_sq = optimiser.exp_avg.float(), optimiser.exp_avg_sq.float()


wrong_step(
    "impl.trainer:Trainer.apply_gradient_vector",
    name="vectors_in_float32",
    doc="A gradient vector is rounded to float32 before its step.",
)(lambda apply, trainer, vector: apply(trainer, vector.float()))


@wrong_step("impl.evaluation:_count")
def evaluation_keeps_its_answers(count: Any, confusion: Any, labels: Any, predicted: Any, multi_label: bool) -> None:
    """The answers of all batches are there until the last one is evaluated."""
    confusion.answers = [*getattr(confusion, "answers", ()), predicted]
    count(confusion, labels, predicted, multi_label)
