"""Wrong pipelines that are used by hand: how they are opened, and their steps; and what a run says and takes beside its steps."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Any


@wrong_step("impl.pipeline:ClassifyPipeline._trainer")
def weights_of_classes_rounded(make: Step, pipeline: Any, *given: Any) -> Any:
    """Class weights have the dtype of the model."""
    import torch

    trainer = make(pipeline, *given)
    if trainer.class_weights is not None:
        trainer.class_weights = trainer.class_weights.to(getattr(torch, pipeline.config.dtype)).float()
    return trainer


@wrong_step("impl.pipeline:ClassifyPipeline._trainer")
def weights_of_classes_by_default(make: Step, pipeline: Any, *given: Any) -> Any:
    """Class weights have torch's default dtype, which a library may have set for the process."""
    import torch

    trainer = make(pipeline, *given)
    if trainer.class_weights is not None:
        trainer.class_weights = trainer.class_weights.to(torch.get_default_dtype()).float()
    return trainer


@wrong_step("impl.pipeline:ClassifyPipeline._trainer")
def steps_by_hand_without_decay(make: Step, pipeline: Any, *given: Any) -> Any:
    """Nothing decays where there is no schedule."""
    trainer = make(pipeline, *given)
    if trainer.endless:
        trainer.optimiser.weight_decay = 0.0
    return trainer


@wrong_step("impl.pipeline:ClassifyPipeline._trainer")
def steps_by_hand_not_clipped(make: Step, pipeline: Any, *given: Any) -> Any:
    """A gradient has any norm where there is no schedule."""
    trainer = make(pipeline, *given)
    if trainer.endless:
        trainer.max_norm = math.inf
    return trainer


wrong_step("impl.pipeline:tokenize", name="texts_of_one_label", doc="Samples that are given as texts have one label each.")(
    lambda tokenize, samples, tokens, classes, _: tokenize(samples, tokens, classes)
)


@wrong_step("impl.config:ClassifyConfig._check_class_weights")
def weights_in_a_list_passed_over(check: Step, config: Any) -> None:
    """Class weights that Python gives as a list, and not as a tuple, count as none."""
    in_a_list = isinstance(config.class_weights, list)
    check(config)
    if in_a_list:
        object.__setattr__(config, "class_weights", None)


wrong_step(
    "impl.pipeline:ClassifyPipeline.train_step", name="one_sample_in_a_list_alone", doc="A sample by itself makes no step, but in a list."
)(lambda _, pipeline, sample: pipeline._ready().train_step(pipeline._batch(sample)))


@wrong_step("impl.fit:_Run._finish_epoch")
def fit_seconds_of_steps_alone(finish: Step, run: Any) -> Any:
    """The seconds of an epoch leave its validation out."""
    told = run.on_epoch
    with mock.patch.object(run, "on_epoch", told and (lambda record: told(replace(record, seconds=run.progress.epoch_seconds)))):
        return finish(run)


@wrong_step("impl.fit:_Run._require_fitting_samples")
def fit_patient_without_validation(require: Step, run: Any) -> None:
    """A run waits for a better validation loss where there is none, and never stops early."""
    with mock.patch.object(run, "config", replace(run.config, early_stop_patience=None)):
        require(run)


wrong_step(
    "impl.trainer:Trainer._accumulate",
    name="accumulate_reports_the_last_four",
    doc="Of many micro-batches a call reports those that are still side by side.",
)(lambda accumulate, trainer, batch: accumulate(trainer, batch)[-4:])


@wrong_step("impl.pretrain:StepFn.train")
def pretrain_beyond_the_schedule(train: Step, step: Any, batch: Any) -> Any:
    """Steps after the last one of the schedule have its rate."""
    if step.optimiser.steps == len(step.learning_rates):
        step.learning_rates.append(step.learning_rates[-1])
    return train(step, batch)


@wrong_step("impl.pretrain:StepFn.train")
def pretrain_on_nothing(train: Step, step: Any, batch: Any) -> Any:
    """A step on rows that predict nothing is counted, and its loss is 0."""
    from blackswan.impl.pretrain import StepResult

    if batch.predicted:
        return train(step, batch)
    step.optimiser.steps += 1
    return StepResult(0.0, 0.0, 0)


wrong_step(
    "impl.pipeline:ClassifyPipeline.encode",
    name="encode_whole_texts",
    doc="The token ids of a text are all of them, also of one that is longer than the model reads.",
)(lambda _, pipeline, texts: [pipeline.tokens._whole.encode(text).ids or [pipeline.tokens.fill] for text in texts])
wrong_step("impl.pipeline:ClassifyPipeline.from_apr", name="apr_file_for_one_worker", doc="A model from an .apr file forgets its group.")(
    lambda open_file, path, config, *, device, **_: open_file(path, config, device=device)
)
wrong_step("impl.pipeline:ClassifyPipeline.from_merged", name="merged_for_one_worker", doc="A merged model forgets its group.")(
    lambda open_folder, folder, *, device, **_: open_folder(folder, device=device)
)
wrong_step("impl.pipeline:ClassifyPipeline.from_apr", name="apr_file_on_the_cpu", doc="A model from an .apr file is put on the CPU.")(
    lambda open_file, path, config, **named: open_file(path, config, **{**named, "device": "cpu"})
)
wrong_step("impl.pipeline:ClassifyPipeline.from_random", name="random_model_on_the_cpu", doc="Random weights are put on the CPU.")(
    lambda make, architecture, config, **named: make(architecture, config, **{**named, "device": "cpu"})
)
wrong_step("impl.pipeline:load_tokenizer", name="fresh_texts_padded_on_the_right", doc="A fresh model pads on the right, whatever is set.")(
    lambda load, folder, limit, _: load(folder, limit)
)
wrong_step("impl.saved:load_tokenizer", name="opened_texts_padded_on_the_right", doc="What was saved pads on the right, whatever was set.")(
    lambda load, folder, limit, _: load(folder, limit)
)
wrong_step("impl.pipeline:partial", name="layers_for_texts_of_512", doc="The hand-written layers take 512 tokens of a text at most.")(
    lambda partial, *given, **named: partial(
        *given, **{key: min(value, 512) if key == "longest" else value for key, value in named.items()}
    )
)
wrong_step("impl.pipeline:ByteTokens", name="bytes_padded_on_the_right", doc="Random weights pad on the right, whatever is set.")(
    lambda tokens, limit, _: tokens(limit)
)


@wrong_step("impl.group:connected")
@contextmanager
def worker_stays_in_the_group(connected: Step, *given: Any, **named: Any) -> Iterator[Any]:
    """A worker that ends with an error does not leave the group."""
    from torch import distributed

    with connected(*given, **named) as group:
        try:
            yield group
        except BaseException:
            mock.patch.object(distributed, "destroy_process_group").start()  # in a process of its own
            raise


@wrong_step("impl.samples:Samples.select")
def samples_selected_in_order(select: Step, samples: Any, indices: Any) -> Any:
    """Samples that are selected stand in the order of the corpus."""
    return select(samples, sorted(indices))


@wrong_step("impl.commands.predict:predictions")
def predict_prints_seven_digits(predictions: Step, *given: Any) -> Iterator[str]:
    """A probability is printed with digits that do not hold a float32."""
    for line in predictions(*given):
        values = json.loads(line)
        yield json.dumps({**values, "probabilities": [float(f"{value:.7g}") for value in values["probabilities"]]})
