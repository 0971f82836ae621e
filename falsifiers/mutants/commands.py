"""Wrong commands: what they open, read, write and print."""

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer
from yaml import ScalarNode

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl.__main__ import parser

# Evaluating and predicting


def _opens_last(open_saved: Any, options: Any) -> Any:
    if options.adapter is not None and (options.adapter / "run.json").is_file():
        options.adapter = options.adapter / "last"
    return open_saved(options)


wrong_steps("impl.commands.evaluate:open_saved", evaluate_opens_last=("A run's folder is its last adapter.", _opens_last))
wrong_steps("impl.commands.predict:open_saved", predict_opens_last=("A run's folder is its last adapter.", _opens_last))
wrong_step("impl.saved:_settings", name="saved_settings_of_longer_texts", doc="What was saved reads 16 tokens more of a text.")(
    lambda settings, *given: replace(settings(*given), max_seq_len=settings(*given).max_seq_len + 16)
)
wrong_step("impl.commands.evaluate:macro_f1", name="macro_f1_of_seen_classes", doc="The mean over the classes that have a text.")(
    lambda _, found: sum(each.f1 for each in found.per_class if each.support) / sum(each.support > 0 for each in found.per_class)
)
wrong_step("impl.commands.evaluate:_table", name="confusion_table_transposed", doc="Predicted classes in rows, in the table alone.")(
    lambda table, confusion, columns: table(confusion if columns else tuple(zip(*confusion, strict=True)), columns)
)
wrong_step("impl.commands.evaluate:_most_frequent", name="confusions_transposed", doc="Of the confusions the predicted class comes first.")(
    lambda most, confusion, several: most(tuple(zip(*confusion, strict=True)), several)
)


@wrong_step("impl.commands.evaluate:as_json")
def sparse_confusion_transposed(as_json: Any, evaluation: Any) -> Any:
    """The list of counts has the predicted class before the true one, where there are many classes."""
    values = as_json(evaluation)
    counts = values.get("confusion_counts", [])
    return values | ({"confusion_counts": sorted([taken, true, count] for true, taken, count in counts)} if counts else {})


@wrong_step("impl.commands.evaluate:as_json")
def sparse_confusion_of_mistakes(as_json: Any, evaluation: Any) -> Any:
    """The list of counts leaves out what was right, where there are many classes."""
    values = as_json(evaluation)
    counts = values.get("confusion_counts", [])
    return values | ({"confusion_counts": [each for each in counts if each[0] != each[1]]} if counts else {})


@wrong_step("impl.pipeline:evaluate", "S12")
def evaluated_loss_of_batches(evaluate: Any, trainer: Any, samples: Any, tokens: Any, device: Any) -> Any:
    """The loss of an evaluation is the mean over batches, the last of which is smaller."""
    size = trainer.micro_batch
    parts = [samples.select(range(at, min(at + size, len(samples)))) for at in range(0, len(samples), size)]
    losses = [evaluate(trainer, part, tokens, device).loss for part in parts]
    return replace(evaluate(trainer, samples, tokens, device), loss=sum(losses) / len(losses))


@wrong_step("impl.commands.predict:predictions")
def predict_drops_the_rest(predictions: Any, pipeline: Any, texts: Any) -> Any:
    """A last batch that is not full is left out."""
    every = list(texts)
    size = pipeline.config.batch_size
    return predictions(pipeline, every[: max(1, len(every) // size) * size])


# Texts from a file


def _otherwise(change: Any) -> Any:
    """The lines of a file, changed as a list."""
    return lambda lines, name: iter(change(list(lines(name))))


wrong_steps(
    "impl.commands.predict:_lines",
    by=_otherwise,
    predict_strips_lines=("Lines of a file lose the white space at their ends.", lambda texts: [text.strip() for text in texts]),
    predict_skips_empty_lines=("Empty lines of a file are passed over.", lambda texts: [text for text in texts if text]),
    predict_splits_lines_as_text=(
        "Lines of a file end at every mark that ends a line of text.",
        lambda texts: "\n".join(texts).splitlines(),
    ),
    predict_drops_byte_order_marks=("A text loses the mark that it begins with.", lambda texts: [text.lstrip("\ufeff") for text in texts]),
)


@wrong_step("impl.commands.predict:_corpus")
def predict_strips_a_corpus(corpus: Any, path: Any) -> Any:
    """Texts of a corpus lose the white space at their ends."""
    return map(str.strip, corpus(path))


@wrong_step("impl.commands.predict:_text")
def predict_strips_arguments(text: Any, given: str) -> Any:
    """A text of the command line loses the white space at its ends."""
    return text(given).strip()


# Settings

wrong_step("impl.settings:_shown", name="written_settings_rounded", doc="Numbers in config.yaml have six digits.")(
    lambda shown, value: f"{value:g}" if isinstance(value, float) else shown(value)
)
wrong_step("impl.settings:resolve", name="file_before_options", doc="A file's settings come before those of the command line.")(
    lambda resolve, size, *sources: resolve(size, *reversed(sources))
)
wrong_step("impl.settings:given_options", name="options_that_say_no_ignored", doc="--no-quantize-nf4 has no effect.")(
    lambda given, options: {name: each for name, each in given(options).items() if each.value is not False}
)


@wrong_step("impl.settings:resolve")
def rank_of_an_option_overrides_alpha_of_a_file(resolve: Any, size: int, *sources: Any) -> Any:
    """Alpha is twice the rank of each source that has a rank and no alpha."""
    alone = [source for source in sources if "lora_rank" in source and "lora_alpha" not in source]
    twice = [{"lora_alpha": replace(source["lora_rank"], value=2.0 * source["lora_rank"].value)} for source in alone]
    return resolve(size, *sources, *twice)


wrong_steps(
    "impl.settings:_plain",
    by=lambda change: lambda plain, name, node: plain(name, change(node) if isinstance(node.value, str) else node),
    settings_octal_by_tens=("0o17 is 17.", lambda node: ScalarNode(node.tag, node.value.replace("0o", ""))),
    settings_true_in_small_letters=(
        "True and TRUE are false.",
        lambda node: ScalarNode(node.tag, "false") if node.value in ("True", "TRUE") else node,
    ),
    settings_octal_by_a_zero=(
        "017 is 15, as in YAML 1.1.",
        lambda node: ScalarNode(node.tag, f"0o{node.value[1:]}") if node.value[:1] == "0" and set(node.value) <= set("01234567") else node,
    ),
)
wrong_steps(
    "impl.settings:_converted",
    settings_projections_are_all=(
        "Of a list of projections nothing but their number is looked at.",
        lambda converted, name, value: "all" if name == "lora_targets" and isinstance(value, list) else converted(name, value),
    ),
)
wrong_steps(
    "impl.settings:_parsed",
    settings_none_in_small_letters=(
        "None on a command line is no null.",
        lambda parsed, name, text: parsed(name, text if text == "none" or text.lower() != "none" else "0"),
    ),
)


@wrong_step("impl.settings:read_file")
def file_numbers_in_single_precision(read_file: Any, path: Any) -> Any:
    """Numbers of a YAML file are float32."""
    import numpy as np

    found = read_file(path)
    return {
        name: replace(each, value=float(np.float32(each.value))) if isinstance(each.value, float) else each for name, each in found.items()
    }


wrong_steps(
    "impl.config:require_count",
    settings_may_be_zero=("A count may be 0.", lambda right, name, value: None if value == 0 else right(name, value)),
    settings_count_truth=("A truth value is a count.", lambda right, name, value: right(name, int(value) if value is True else value)),
    settings_without_an_upper_bound=("A count may be 2⁶³.", lambda right, name, value: right(name, value - (value == 2**63))),
)
wrong_step("impl.config:require_share", name="settings_just_above_one", doc="A share may be the next number above 1.")(
    lambda right, name, value: right(name, min(value, 1.0) if value == math.nextafter(1.0, 2.0) else value)
)
wrong_step("impl.config:require_number", name="settings_may_be_infinite", doc="A positive number may be infinite.")(
    lambda right, name, value, **bounds: None if value == math.inf else right(name, value, **bounds)
)
wrong_step("impl.config:ClassifyConfig._check_class_weights", name="settings_weigh_anything", doc="Class weights are not looked at.")(
    lambda *_: None
)
wrong_step("impl.settings:_converted", name="settings_say_yes_for_true", doc="A word stands for a switch.")(
    lambda right, name, value: right(name, {"yes": True, "on": True}.get(value, value) if isinstance(value, str) else value)
)
wrong_step("impl.settings:_entries", name="settings_of_the_last_line", doc="Of a key that a file gives twice the last counts.")(
    lambda entries, path: (
        {getattr(key, "value", ""): (key, value) for key, value in entries(path)}.values()
        if all(isinstance(getattr(key, "value", ""), str) for key, _ in entries(path))
        else entries(path)
    )
)
wrong_step("impl.pretrain_run:require_count", name="pretrain_settings_not_counted", doc="Steps and rows may be any number.")(
    lambda *_: None
)
wrong_step("impl.token_shards:TokenBatches", name="batches_of_no_pairs", doc="Rows of one token are rows of two.")(
    lambda batches, shards, *, seq, **given: batches(shards, seq=max(seq, 2), **given)
)

# Records


@wrong_step("impl.metrics:MetricsFile.step")
def metrics_count_samples_by_batch_size(step: Any, file: Any, record: Any) -> None:
    """Every step has the samples of a full one."""
    file.__dict__["_most"] = max(record.samples, file.__dict__.get("_most", 0))
    step(file, replace(record, samples=file.__dict__["_most"]))


@wrong_step("impl.metrics:MetricsFile.epoch")
def metrics_call_every_epoch_the_best(epoch: Any, file: Any, record: Any) -> None:
    """Every epoch is the best so far."""
    epoch(file, replace(record, best=record.validation_loss is not None))


wrong_step("impl.fit:StepRecord", name="steps_say_accuracy_for_loss", doc="A step's record has its accuracy for its loss.")(
    lambda record, *given: record(*given[:2], given[3], *given[3:])
)


@wrong_step("impl.fit:_Run._step")
def epoch_loss_of_means(step: Any, run: Any, indices: Any) -> None:
    """The training loss of an epoch is the mean over its steps, not over its samples."""
    before = run.progress
    step(run, indices)
    loss = (run.progress.loss_sum - before.loss_sum) / (run.progress.sample_count - before.sample_count)
    run.progress = replace(run.progress, loss_sum=before.loss_sum + loss, sample_count=before.sample_count + 1)


wrong_step(
    "impl.commands.train:_conclusion", name="conclusion_of_the_last_loss", doc="The best loss that is told is that of the last epoch."
)(lambda conclusion, output, result: conclusion(output, replace(result, best_validation_loss=result.epochs[-1].validation_loss)))


@wrong_step("impl.commands.train:_write_for_rules")
def statistics_after_truncation_written(write: Any, output: Any, config: Any, parameters: int, train: Any) -> None:
    """statistics.yaml has the lengths that the model reads."""
    write(output, config, parameters, replace(train, text_lengths=None))


@wrong_step("impl.commands.train:_write_for_rules")
def statistics_say_infinity_otherwise(write: Any, output: Any, *given: Any) -> None:
    """In statistics.yaml infinity is a word to a reader of YAML, and no number."""
    write(output, *given)
    file = output / "statistics.yaml"
    file.write_text(file.read_text().replace(".inf", "inf"))


@wrong_step("impl.apr_write:export_apr")
def export_folder_named_apr(_: Any, checkpoint: Any, source: Any, path: Any, *_dtype: Any) -> None:
    """What is asked for as an .apr file becomes a folder of that name."""
    from blackswan.impl.checkpoint import TOKENIZER, belonging, save_checkpoint

    save_checkpoint(path, checkpoint.config, checkpoint.tensors, belonging(source, TOKENIZER))


@wrong_step("impl.progress:Progress.step")
def progress_one_step_late(step: Any, progress: Any, record: Any) -> None:
    """Every log_interval-th step but one is shown."""
    step(progress, replace(record, step=record.step + 1 if record.step < progress.total_steps else record.step))


# Kills


@wrong_step("impl.metrics:_before")
def metrics_repeat_a_step(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The line of the step that a continuation begins with stays."""
    return bool(before(line, epoch, None if step is None else step + 1, where))


@wrong_step("impl.metrics:_before")
def metrics_repeat_an_epoch(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The line of the epoch that a continuation ends once more stays."""
    return bool(before(line, epoch, step, where) or before(line, epoch + 1, 0, where))


@wrong_step("impl.metrics:_before")
def metrics_keep_the_epoch_of_steps(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The line of an epoch stays, though a continuation begins with a step inside it."""
    return bool(before(line, epoch, step, where) or (step is not None and before(line, epoch + 1, 0, where)))


wrong_step("impl.metrics:cut_back", name="metrics_never_cut_back", doc="A continuation appends to what is there, torn lines too.")(
    lambda *_: None
)


@wrong_step("impl.metrics:_before")
def metrics_lose_a_step(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The line before that of the step that a continuation begins with is lost."""
    return bool(before(line, epoch, None if step is None else step - 1, where))


@wrong_step("impl.metrics:_before")
def metrics_lose_an_epochs_steps(before: Any, line: str, epoch: int, step: int | None, where: str) -> bool:
    """The lines of an epoch's steps are lost where a continuation begins with the epoch's own."""
    return bool(before(line, epoch - (step is None and '"kind": "step"' in line), step, where))


wrong_step("impl.pipeline:fit", name="state_every_other_time", doc="The state is written half as often as was asked for.")(
    lambda fit, *given, save_every=None, **named: fit(*given, save_every=None if save_every is None else 2 * save_every, **named)
)

# Workers


@wrong_step("impl.pipeline:evaluate")
def confusion_of_one_worker(evaluate: Any, trainer: Any, *given: Any) -> Any:
    """Counts are those of a worker's own share."""
    kept, add = trainer.group, trainer.group.sum
    trainer.group = SimpleNamespace(rank=kept.rank, size=kept.size, gather=kept.gather, gather_text=kept.gather_text, barrier=kept.barrier)
    trainer.group.sum = lambda tensor: add(tensor) if tensor.is_floating_point() else tensor
    try:
        return evaluate(trainer, *given)
    finally:
        trainer.group = kept


wrong_step("impl.evaluation:shard", name="workers_evaluate_everything", doc="Every worker evaluates every sample, and all are added.")(
    lambda _, indices, *__: indices
)

# Values that are not finite


@wrong_step("impl.pipeline:ClassifyPipeline._logits")
def finite_check_of_last_batch(logits: Any, pipeline: Any, texts: Any) -> Any:
    """The last batch alone is checked for values that are not finite."""
    import torch

    size = pipeline.config.batch_size
    starts = range(0, len(texts), size)
    with torch.no_grad():
        batches = [pipeline.tokens.batch(texts[at : at + size]) for at in starts[:-1]]
        found = [pipeline.classifier(*(each.to(pipeline.device) for each in batch)).cpu() for batch in batches]
    return torch.cat([*found, logits(pipeline, texts[starts[-1] :])]) if found else logits(pipeline, texts)


wrong_step("impl.pipeline:require_finite", "S9", name="answers_that_are_not_finite", doc="Answers are not checked.")(lambda *_: None)


@wrong_step("impl.trainer:Trainer.forward_only", "S9")
def evaluation_loss_made_up(forward_only: Any, trainer: Any, batch: Any, probabilities: bool = False) -> Any:
    """The loss of an evaluation that is not finite is 100, and every class the first."""
    from blackswan.impl.trainer import BatchResult

    try:
        return forward_only(trainer, batch, probabilities)
    except FloatingPointError:
        return BatchResult(100.0, 0, len(batch.labels), predicted=batch.labels * 0)


# Models

wrong_step("impl.merge:TOKENIZER_FILES", name="merged_without_tokenizer_files", doc="A merged model has tokenizer.json alone.")(
    lambda files: files[:1]
)
wrong_step("impl.checkpoint:TOKENIZER_CONFIG", name="export_without_tokenizer_config", doc="An exported folder has tokenizer.json alone.")(
    lambda name: f"no_{name}"
)


@wrong_step("impl.tensors:Converted.__getitem__")
def export_cuts_digits_off(getitem: Any, tensors: Any, name: str) -> Any:
    """Numbers of another dtype are cut to half of its digits."""
    right = getitem(tensors, name)
    return right.bfloat16().to(right.dtype)


wrong_steps(
    "impl.pipeline:save_merged",
    by=without_keyword,
    merged_from_weights_of_the_file=("A merge quantises weights in the dtype of their file.", "quantized_as"),
)
wrong_step("impl.pipeline:save_adapter", name="base_by_its_relative_name", doc="An adapter names its base as the user did.")(
    lambda save, *given, base, **named: save(*given, base=base and Path(os.path.relpath(base)), **named)
)
wrong_step("impl.pipeline:ClassifyPipeline._extra", name="balanced_weights_saved_as_a_word", doc="No numbers are saved with the adapter.")(
    lambda extra, pipeline: {**extra(pipeline), "settings": asdict(pipeline.config)}
)

# From texts to a decoder

wrong_step("impl.token_shards:_text", name="shards_of_stripped_texts", doc="A text loses the white space at its ends.")(
    lambda text, *given: text(*given).strip()
)
wrong_step("impl.token_shards:load_encoder", name="shards_of_cut_texts", doc="A text ends where the tokenizer was cutting others.")(
    lambda _, path: Tokenizer.from_file(str(path))
)
wrong_step("impl.token_shards:tokenize", name="documents_never_end", doc="No token ends a text.")(
    lambda tokenize, *given: (ids[:-1] for ids in tokenize(*given))
)
wrong_step("impl.commands.pretrain:_Shown.epoch", name="pretrain_shows_half_the_loss", doc="Half of the held-out loss is printed.")(
    lambda epoch, shown, record: epoch(shown, replace(record, validation_loss=record.validation_loss / 2))
)

# Bad input

wrong_step("impl.__main__:BAD_INPUT", name="bad_input_is_a_failure", doc="Bad input ends with the status of a failure.")(lambda _: 1)
wrong_step("impl.commands.train:_require_usable", name="output_written_over", doc="A run begins in a folder that holds something.")(
    lambda *_: None
)


@wrong_step("impl.folder:FileLock")
def two_processes_write_a_run(lock: Any, path: Any, **given: Any) -> Any:
    """The lock of a folder is one of its own in every process."""
    return lock(path.with_name(f"{path.name}{os.getpid()}"), **given)


wrong_step(
    "impl.classifier:Adaptation.__post_init__",
    name="targets_as_spelled",
    doc="Targets in another order than a block's have a name of their own.",
)(lambda *_: None)
wrong_step("impl.__main__:DISK_ERRORS", name="full_disk_is_bad_input", doc="A full disk ends with the status of bad input.")(lambda _: ())
wrong_step("impl.__main__:INTERRUPTED", name="interruption_is_bad_input", doc="Ctrl-C ends with the status of bad input.")(lambda _: 4)
wrong_step("impl.__main__:_say", name="full_disk_unnamed", doc="The message of a full disk names no file.")(
    lambda say, name, error, status: say(name, OSError(error.strerror) if isinstance(error, OSError) else error, status)
)
wrong_step("impl.commands.pretrain:Interrupted", name="interrupted_pretraining_unnamed", doc="Nothing is said of how a run goes on.")(
    lambda interrupted, _: interrupted("interrupted")
)
wrong_step("impl.__main__:_parsed", name="words_passed_over", doc="What is no option of a command is passed over.")(
    lambda _, arguments, prog: parser(prog).parse_known_args(arguments)[0]
)


wrong_step(
    "impl.agreement:_RAISED_ELSEWHERE", name="shared_errors_are_general", doc="Workers raise the most general kind of another's error."
)(lambda kinds: (OSError, ValueError, *kinds))
