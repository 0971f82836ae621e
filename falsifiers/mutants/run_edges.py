"""Wrong runs at the bounds of their settings, where a number is not finite, and after their end."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step

# Settings of zero or none, many micro-batches


@wrong_step("impl.trainer:Trainer.__init__")
def fit_settings_of_zero_left_out(init: Any, *given: Any, weight_decay: float = 0.01, max_norm: Any = 1.0, **options: Any) -> None:
    """A weight decay of 0 is the default's, and no limit of the norm a limit of 1."""
    init(*given, weight_decay=weight_decay or 0.01, max_norm=max_norm or 1.0, **options)


wrong_step(
    "impl.trainer:_joined",
    name="fit_joins_the_last_micro_batch",
    doc="All gradients but one are lost where they are joined to save memory.",
)(lambda joined, results: joined(results[-1:] if len(results) == 4 else results))


# A number that is not finite


@wrong_step("impl.nonfinite:_own")
def origin_of_forward_passes_alone(own: Any, path: str, operation: str, name: str, value: Any) -> Any:
    """No call is named where the backward pass is not finite."""
    del own, path, operation, name
    return value


wrong_step("impl.fit:origin", name="origin_of_the_first_micro_batch", doc="Micro-batches after the first of a step are not searched.")(
    lambda origin, classifier, batch, weights: origin(classifier, batch, weights) or "unknown"
)


wrong_step("impl.fit:origin", name="fit_origin_of_unweighted_losses", doc="The class weights are left out where an origin is looked for.")(
    lambda origin, classifier, batch, _: origin(classifier, batch)
)


@wrong_step("impl.nonfinite:_described")
def origin_swaps_nan_and_infinity(described: Any, value: Any) -> str:
    """Infinite numbers are called NaN."""
    return str(described(value).replace("infinite", "NaN"))


# After the end


@wrong_step("impl.pipeline:ClassifyPipeline.fit")
def fit_leaves_its_trainer(fit: Any, pipeline: Any, *given: Any, **options: Any) -> Any:
    """The pipeline keeps the schedule and the moments of a run that is over."""
    start = pipeline.start
    kept = mock.patch.object(pipeline, "start", lambda steps, weights=None: None if steps is None else start(steps, weights))
    with kept:
        return fit(pipeline, *given, **options)


@wrong_step("impl.pipeline:ClassifyPipeline.fit")
def fit_balanced_weights_forgotten_after_it(fit: Any, pipeline: Any, *given: Any, **options: Any) -> Any:
    """Balanced class weights hold during the run and not after it."""
    kept = pipeline.class_weights
    try:
        return fit(pipeline, *given, **options)
    finally:
        pipeline.class_weights = kept
        pipeline.start(None)


@wrong_step("impl.pipeline:ClassifyPipeline.start")
def refused_fit_leaves_its_weights(start: Any, pipeline: Any, steps: Any, weights: Any = None) -> Any:
    """Balanced class weights of a run that is refused hold in the steps after it."""
    trainer = start(pipeline, steps, weights)
    pipeline.class_weights = weights or pipeline.class_weights
    return trainer


wrong_step(
    "impl.pipeline:ClassifyPipeline.start",
    name="fit_keeps_the_first_weights",
    doc="The balanced weights of the first of two runs hold in the second.",
)(lambda start, pipeline, steps, weights=None: start(pipeline, steps, weights if pipeline.class_weights is None else None))


wrong_step(
    "impl.pipeline:ClassifyPipeline._extra",
    name="fit_saves_the_first_weights",
    doc="The weights of the first of two runs are saved after the second.",
)(lambda extra, pipeline: vars(pipeline).setdefault("said_at_first", extra(pipeline)))


# What a run finds and leaves in its folder


wrong_step("impl.group:restarted", name="restarts_begin_anew", doc="A worker that torchrun starts again begins a new run.")(
    lambda *_: False
)


wrong_step(
    "impl.group:restarted",
    name="first_restart_alone_goes_on",
    doc="A worker that torchrun starts a third time begins a new run instead of going on.",
)(lambda _, environment=os.environ: environment.get("TORCHELASTIC_RESTART_COUNT") == "1")


wrong_step("impl.group:restarted", name="first_starts_go_on", doc="A worker that torchrun starts for the first time goes on with a run.")(
    lambda _, environment=os.environ: "TORCHELASTIC_RESTART_COUNT" in environment
)


@wrong_step("impl.group:connected")
@contextmanager
def attempts_under_one_prefix(connected: Any, *given: Any, **named: Any) -> Iterator[Any]:
    """Workers that torchrun starts again read the addresses of those that are dead."""
    with connected(*given, **named | {"attempt": "0"}) as group:
        yield group


wrong_step("impl.training_state:flush", name="state_renamed_in_memory", doc="A new state's name may not be on the disk yet.")(
    lambda *_: None
)


@wrong_step("impl.training_state:write_atomically")
def state_content_in_memory(_: Any, path: Path, content: bytes) -> None:
    """A new state takes the old one's place before its content is on the disk."""
    partial = path.with_name(f".partial-{path.name}.{os.urandom(4).hex()}")
    partial.write_bytes(content)
    partial.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@wrong_step("impl.fit:_Run._finish_epoch")
def epochs_told_before_their_adapters(finish: Any, run: Any) -> None:
    """An epoch is told before its adapters are written."""
    kept, export, save = list[str](), run._export, run._save

    def late() -> None:
        for name in kept:
            export(name)
        save()

    with mock.patch.multiple(run, _export=kept.append, _save=late):
        finish(run)


# What is refused, and what is written beside


@wrong_step("impl.fit:write_atomically")
def run_says_no_model(write: Any, path: Path, content: bytes) -> None:
    """run.json does not say which model and tokens a run is of."""
    write(path, json.dumps({**json.loads(content), "source_model": None, "tokens": None}).encode())


@wrong_step("impl.fit:_Run.open")
def run_takes_given_weights_with_it(open_run: Any, run: Any, resume: bool) -> None:
    """Class weights that the settings give are no longer there after a run, as if only balanced ones were."""
    open_run(run, resume)
    run.pipeline.class_weights = run._balanced


@wrong_step("impl.training_state:write_atomically")
def state_for_its_owner_alone(write: Any, path: Path, content: bytes) -> None:
    """A new state keeps the mode of a temporary file, which nobody else can read."""
    write(path, content)
    path.chmod(0o600)


@wrong_step("impl.fit:_Run._identity")
def identity_with_the_place_of_the_model(identity: Any, run: Any) -> Any:
    """A run is not continued where its model has moved, though its weights are the same."""
    return identity(run) | {"source": str(run.pipeline.source)}


@wrong_step("impl.fit:_Run._require_fitting_samples")
def labels_of_the_first_thousand(require: Any, run: Any) -> None:
    """Labels after the first thousand are not looked at, so that a run on many samples fails in the middle of an epoch."""
    kept = run.train_samples, run.validation
    run.train_samples, run.validation = (each and each.select(range(min(len(each), 1000))) for each in kept)
    try:
        require(run)
    finally:
        run.train_samples, run.validation = kept


@wrong_step("impl.fit:_Run._require_fitting_samples")
def samples_counted_from_zero(require: Any, run: Any) -> None:
    """The sample whose label does not fit is counted from 0."""
    try:
        require(run)
    except ValueError as error:
        raise ValueError(re.sub(r"sample (\d+)", lambda found: f"sample {int(found[1]) - 1}", str(error))) from None


wrong_step("impl.fit:require_a_rate", name="fit_learns_nothing", doc="A run whose every rate is 0 is made.")(lambda *_: None)


wrong_step("impl.fit:MOST_STEPS", name="fit_of_any_length", doc="A run may have more steps than rates can be kept.")(lambda most: 2 * most)


wrong_step("impl.fit:MOST_STEPS", name="fit_of_fewer_steps", doc="The most steps that a run may have are refused.")(lambda most: most - 1)


wrong_step("impl.fit:total_steps", name="fit_of_so_many_epochs", doc="The number of epochs alone is limited, not that of steps.")(
    lambda total, config, samples: total(replace(config, epochs=1), samples) * config.epochs
)


wrong_step("impl.commands.train:_require_a_rate", name="rates_looked_at_late", doc="A run that learns nothing is refused in its folder.")(
    lambda *_: None
)


@wrong_step("impl.commands.train:_samples")
def validation_by_another_name(samples: Any, *given: Any) -> Any:
    """A corpus may be trained on and validate too, by a link or another path."""
    with mock.patch.object(Path, "samefile", lambda path, other: path.absolute() == other.absolute()):
        return samples(*given)


@wrong_step("impl.commands.train:_samples")
def validation_by_a_hard_link(samples: Any, *given: Any) -> Any:
    """A corpus may be trained on and validate too, by another name that the same file has."""
    with mock.patch.object(Path, "samefile", lambda path, other: path.resolve() == other.resolve()):
        return samples(*given)


@wrong_step("impl.commands.train:_samples")
def workers_share_a_pipe(samples: Any, *given: Any) -> Any:
    """Each of several workers reads a part of a corpus that comes from a pipe, and trains on it as if it were all."""
    with mock.patch.object(Path, "is_fifo", return_value=False):
        return samples(*given)


@wrong_step("impl.commands.train:_samples")
def corpora_from_pipes_of_one_worker_refused(samples: Any, options: Any, *given: Any) -> Any:
    """A corpus that comes from a pipe is refused also of the one worker that there is."""
    if options.corpus.is_fifo():
        raise ValueError(f"{options.corpus} is a pipe; expected a file")
    return samples(options, *given)


def _of_no_sample() -> Any:
    from blackswan.impl.evaluation import Evaluation

    return Evaluation(0.0, 0.0, 0, (), ())


wrong_step("impl.pipeline:ClassifyPipeline._logits", name="no_text_has_no_answer", doc="There is no answer to an empty list of texts.")(
    lambda logits, pipeline, texts: logits(pipeline, [*texts, *(["", ""] if not texts else [])])
)


wrong_step("impl.pipeline:ClassifyPipeline.evaluate", name="no_sample_is_evaluated", doc="No sample has a loss and an accuracy of zero.")(
    lambda evaluate, pipeline, samples: evaluate(pipeline, samples) if len(samples) else _of_no_sample()
)


wrong_step(
    "impl.group:DistributedGroup.gather_text", name="workers_talk_in_16_bits", doc="The end of a long text is not sent or compared."
)(lambda gather, group, text: gather(group, text[: 2**16 - 1]))


wrong_step("impl.group:DistributedGroup.gather_text", name="workers_talk_in_ascii", doc="A worker's message with other letters fails.")(
    lambda gather, group, text: gather(group, text.encode("ascii").decode())
)


wrong_step("impl.evaluation:_count", name="confusion_of_fifty_labels", doc="Only the first fifty labels of a text are counted.")(
    lambda count, confusion, labels, predicted, several: (
        count(confusion[:50], labels[:, :50], predicted[:, :50], several) if several else count(confusion, labels, predicted, several)
    )
)


wrong_step("impl.commands.evaluate:_table", name="confusion_of_exactly_fifty_left_out", doc="Fifty classes are too many for a matrix.")(
    lambda table, confusion, *given: iter(()) if len(confusion) == 50 else table(confusion, *given)
)


wrong_step("impl.commands.evaluate:MOST_CLASSES", name="json_matrix_ends_a_class_early", doc="A thousand classes have a sparse confusion.")(
    lambda most: most - 1
)


# Calls by hand, and workers


@wrong_step("impl.trainer:Trainer.accumulate")
def accumulate_reports_all_that_waits(accumulate: Any, trainer: Any, batch: Any) -> Any:
    """A call reports the loss of all accumulated samples for that of its own."""
    from blackswan.impl.trainer import _summary

    accumulate(trainer, batch)
    return _summary(trainer._accumulated)


@wrong_step("impl.trainer:Trainer.apply_gradient_vector")
def vector_without_a_loss(apply: Any, trainer: Any, vector: Any) -> Any:
    """A step with a given gradient says a loss of 0."""
    return replace(apply(trainer, vector), loss=0.0)


wrong_step("impl.commands.train:_foreign", name="train_over_an_adapter", doc="A run begins in a folder with another one's adapters.")(
    lambda foreign, name: foreign(name) and name not in ("last", "best", "state", "metrics.jsonl")
)


wrong_step("impl.commands.train:_foreign", name="train_over_metrics", doc="A run begins in a folder with another one's metrics.")(
    lambda foreign, name: foreign(name) and name != "metrics.jsonl"
)


wrong_step("impl.commands.train:_foreign", name="killed_start_is_in_the_way", doc="The files that a killed start left stop the next one.")(
    lambda foreign, name: foreign(name) or name in ("config.yaml", "statistics.yaml")
)


@wrong_step("impl.agreement:_raise_first")
def every_worker_is_blamed(raise_first: Any, texts: Any, rank: int, own: Any) -> None:
    """Workers that failed because another one did are said to have failed as well."""
    first = next(text for text in texts if text)
    blamed = ", ".join(str(other) for other, text in enumerate(texts) if text != first)
    raise_first([text and f"{text} (also on rank {blamed})" for text in texts], rank, own)


@wrong_step("impl.commands.train:_train")
def first_worker_alone_goes_on(train: Any, options: Any, given: Any, group: Any, device: Any, resume: bool) -> None:
    """The first worker goes on after a restart, and the others begin."""
    train(options, given, group, device, resume if group.rank == 0 else options.resume)


@wrong_step("impl.commands.train:_train")
def first_worker_alone_writes_states(train: Any, options: Any, given: Any, group: Any, *rest: Any) -> None:
    """The other workers do not know after how many steps a state is written."""
    options.save_every = options.save_every if group.rank == 0 else None
    train(options, given, group, *rest)


wrong_step("impl.fit:_Run._update", name="steps_named_within_their_epoch", doc="A bad step is counted from its epoch's first.")(
    lambda update, run, indices, _: update(run, indices, run.progress.position + 1)
)


wrong_step("impl.fit:_Run._explained", name="validations_named_as_the_first", doc="Each bad validation is called the first one.")(
    lambda explained, run, when, batches: explained(run, re.sub(r"epoch \d+", "epoch 1", when), batches)
)
