"""Wrong commands: what they evaluate, predict, merge, export and tokenize, by one worker or several."""

import heapq
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from itertools import accumulate, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tokenizers import Tokenizer

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

# Evaluating and predicting


def _opens_last(open_saved: Any, options: Any) -> Any:
    if options.adapter is not None and (options.adapter / "run.json").is_file():
        options.adapter = options.adapter / "last"
    return open_saved(options)


wrong_steps("impl.commands.evaluate:open_saved", evaluate_opens_last=("A run's folder is its last adapter.", _opens_last))


def _without_a_state(open_saved: Any, options: Any) -> Any:
    begun = options.adapter is not None and (options.adapter / "run.json").is_file()
    if begun and not (options.adapter / "state").is_dir():
        raise ValueError(f"{options.adapter}: neither an adapter nor a merged model")
    return open_saved(options)


wrong_steps(
    "impl.commands.predict:open_saved",
    runs_without_a_state_refused=("A run's folder that was copied without its state is none.", _without_a_state),
)


def _on_its_own_base(open_saved: Any, options: Any) -> Any:
    of_a_run = options.adapter is not None and (options.adapter / "run.json").is_file()
    return open_saved(SimpleNamespace(**{**vars(options), "model": None}) if of_a_run else options)


wrong_steps(
    "impl.commands.predict:open_saved",
    base_beside_a_run_passed_over=("A base that is named beside a run's folder is passed over.", _on_its_own_base),
)
wrong_steps("impl.commands.predict:open_saved", predict_opens_last=("A run's folder is its last adapter.", _opens_last))


def _on_the_cpu(open_saved: Any, options: Any) -> Any:
    if options.adapter is None:
        options.device = "cpu"
    return open_saved(options)


wrong_steps(
    "impl.commands.predict:open_saved", merged_models_on_the_cpu=("A model named alone is on the CPU, whatever --device says.", _on_the_cpu)
)
wrong_step(
    "impl.pipeline:ClassifyPipeline.from_adapter", name="adapters_on_the_cpu", doc="An adapter that is given its base is on the CPU."
)(
    lambda from_adapter, folder, model=None, *, device="cpu", **named: from_adapter(
        folder, model, device="cpu" if model else device, **named
    )
)
wrong_step("impl.saved:_settings", name="saved_settings_of_longer_texts", doc="A saved model reads 16 tokens more of a text.")(
    lambda settings, *given: replace(settings(*given), max_seq_len=settings(*given).max_seq_len + 16)
)


@wrong_step("impl.saved:load_adapter")
def saved_nf4_is_doubly_quantised(load: Any, *given: Any) -> Any:
    """An adapter that was trained on NF4 weights is opened on weights whose scales are in 8 bits as well."""
    found = load(*given)
    return replace(found, adaptation=replace(found.adaptation, double_quantize=found.adaptation.nf4))


wrong_step("impl.commands.evaluate:macro_f1", name="macro_f1_of_seen_classes", doc="The mean over the classes that have a text.")(
    lambda _, found: sum(each.f1 for each in found.per_class if each.support) / sum(each.support > 0 for each in found.per_class)
)
wrong_step("impl.commands.evaluate:_table", name="confusion_table_transposed", doc="Predicted classes in rows, in the table alone.")(
    lambda table, confusion, columns: table(confusion if columns else tuple(zip(*confusion, strict=True)), columns)
)


@wrong_step("impl.commands.evaluate:_table")
def confusion_of_five_digits(table: Any, confusion: Any, columns: Any) -> list[str]:
    """Columns of the confusion of one label are five wide: a count of six digits moves those behind it away from their headings."""
    title, *rows = table(confusion, columns)
    return [title, *rows] if columns else [title, *("  ".join([row[:5], *(cell.rjust(5) for cell in row[5:].split())]) for row in rows)]


wrong_step(
    "impl.commands.evaluate:_table", name="labels_below_each_others_headings", doc="Labels that were missed stand where made-up ones do."
)(lambda table, confusion, columns: table(confusion, columns and [columns[place] for place in (0, 2, 1, 3)]))
wrong_step("impl.commands.evaluate:_most_frequent", name="confusions_transposed", doc="The predicted class comes first in each confusion.")(
    lambda most, confusion, several: most(tuple(zip(*confusion, strict=True)), several)
)


wrong_steps(
    "impl.commands.evaluate:heapq",
    confusions_that_hardly_happen=(
        "The confusions of the fewest samples are shown.",
        lambda _: SimpleNamespace(nlargest=heapq.nsmallest),
    ),
)


@wrong_step("impl.commands.evaluate:_most_frequent")
def confusions_with_right_answers(most: Any, confusion: Any, several: bool) -> Iterator[str]:
    """Right answers are among the most frequent confusions."""
    yield from islice(most(confusion, several), 1)
    if not several:
        cells = ((count, true, taken) for true, row in enumerate(confusion) for taken, count in enumerate(row) if count)
        yield from ("  ".join(map(str, each)) for each in heapq.nlargest(50, cells))


@wrong_step("impl.commands.evaluate:lines")
def scores_below_each_others_headings(lines: Any, *given: Any) -> Any:
    """Precision is called recall, in the table alone."""
    other = {"precision": "recall", "recall": "precision"}
    return (re.sub("precision|recall", lambda found: other[found[0]], line) for line in lines(*given))


@wrong_step("impl.commands.evaluate:as_json")
def sparse_confusion_transposed(as_json: Any, evaluation: Any) -> Any:
    """The list of counts has the predicted class before the true one, where there are many classes."""
    values = as_json(evaluation)
    counts = values.get("confusion_counts", [])
    return values | ({"confusion_counts": sorted([taken, true, count] for true, taken, count in counts)} if counts else {})


@wrong_step("impl.commands.evaluate:as_json")
def sparse_confusion_as_a_square(as_json: Any, evaluation: Any) -> Any:
    """Counts are placed as in a matrix with a column for every class, where each text has several labels too."""
    values, (width, classes) = as_json(evaluation), (len(evaluation.confusion[0]), len(evaluation.confusion))
    counts = [[*divmod(row * width + column, classes), count] for row, column, count in values.get("confusion_counts", [])]
    return values | ({"confusion_counts": counts} if counts else {})


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


@wrong_step("impl.commands.predict:_numbered")
def predict_closes_standard_input(numbered: Any, name: str, expected: str) -> Iterator[Any]:
    """Standard input, which a program may go on to read, is closed as a file is."""
    yield from numbered(name, expected)
    if name == "-":
        sys.stdin.buffer.close()


wrong_step("impl.commands.predict:tempfile", name="predict_leaves_its_texts", doc="A copy of the texts stays among the temporary files.")(
    lambda usual: SimpleNamespace(gettempdir=usual.gettempdir, TemporaryFile=partial(usual.NamedTemporaryFile, delete=False))
)


wrong_step("impl.commands.predict:_kept", name="predict_answers_equal_texts_once", doc="Texts that are equal have one answer among them.")(
    lambda kept, texts: kept(dict.fromkeys(texts))
)
wrong_step("impl.commands.predict:_kept", name="predict_texts_in_memory", doc="All texts are in memory before they are kept in a file.")(
    lambda kept, texts: kept([*texts])
)
wrong_step("impl.commands.predict:predictions", name="predict_answers_at_its_end", doc="No answer is printed before all are known.")(
    lambda predictions, *given: iter([*predictions(*given)])
)
wrong_step(
    "impl.commands.predict:IN_MEMORY", name="predict_needs_temporary_files", doc="Texts are written to a file, however few they are."
)(lambda _: 0)


wrong_step("impl.__main__:_escaping", name="commands_end_by_names", doc="A name that standard output has no letters for ends a command.")(
    lambda *_: nullcontext()
)


wrong_step(
    "impl.__main__:ESCAPING", name="commands_end_by_names_in_c", doc="A name ends a command whose standard output is that of the locale C."
)(lambda escaping: {"strict": escaping["strict"]})
wrong_step(
    "impl.__main__:_heard", name="unheard_is_printed", doc="Without a standard error what is said there is printed, or ends the command."
)(lambda _: nullcontext())


@wrong_step("impl.commands.predict:_numbered")
def predict_fails_without_standard_input(numbered: Any, name: str, expected: str) -> Iterator[Any]:
    """A standard input that is closed ends `predict` as a defect does."""
    yield from numbered(name if sys.stdin else str(sys.stdin.buffer), expected)


@wrong_step("impl.__main__:_escaping")
def commands_escape_for_good(_: Any, stream: Any) -> Any:
    """Standard output escapes what it has no letters for after a command too."""
    stream.reconfigure(errors="backslashreplace")
    return nullcontext()


wrong_step("impl.__main__:_escaping", name="commands_need_an_output", doc="A command without a standard output ends as a defect does.")(
    lambda escaping, stream: escaping(stream.errors and stream)
)


@wrong_step("impl.__main__:_escaping")
@contextmanager
def letters_always_escaped(_: Any, stream: Any) -> Iterator[None]:
    """Letters beyond ASCII are escaped where standard output has them too."""
    encoding = getattr(stream, "encoding", None)
    if encoding:
        stream.reconfigure(encoding="ascii", errors="backslashreplace")
    yield
    if encoding:
        stream.reconfigure(encoding=encoding, errors="strict")


@wrong_step("impl.__main__:_run")
def evaluate_tells_programs_of_no_cut(run: Any, command: Any, options: Any, name: str) -> Any:
    """The number of texts that are cut off stands beside tables, and not beside JSON."""
    with redirect_stderr(StringIO()) if getattr(options, "json", False) else nullcontext():
        return run(command, options, name)


@wrong_step("impl.__main__:_run")
def export_leaves_the_head_behind(run: Any, command: Any, options: Any, name: str) -> Any:
    """A merged model is exported as an .apr file, in which its head has no place."""
    apr = options.command == "export" and options.output.suffix == ".apr"
    with mock.patch("blackswan.impl.adapter.HEAD", "none") if apr else nullcontext():
        return run(command, options, name)


@wrong_step("impl.pipeline:require_texts")
def texts_have_to_be_a_list(_: Any, texts: Any) -> None:
    """Texts in a tuple are refused as if they were one text."""
    if not isinstance(texts, list):
        raise TypeError(f"texts is {texts!r}; expected a list of texts")


@wrong_step("impl.commands.predict:_kept")
def predict_loses_what_is_not_in_memory(kept: Any, texts: Any) -> Any:
    """Texts behind those that are kept in memory are lost where more come than it keeps."""
    many = list(texts)
    before = [0, *accumulate(len(json.dumps(text)) for text in many)]
    return kept([text for text, size in zip(many, before, strict=False) if size < 2**16])


@wrong_step("impl.commands.predict:_kept")
def predict_loses_what_was_in_memory(kept: Any, texts: Any) -> Any:
    """Texts that were kept in memory are lost where more come than it keeps: all but the last."""
    many = list(texts)
    return kept(many if len(json.dumps(many)) < 2**16 else many[-1:])


@wrong_step("impl.commands.predict:_lines")
def predict_reads_a_name_twice(lines: Any, name: str) -> Any:
    """A file is read once to find what is wrong in it, and once more to answer, when a pipe with a name has nothing left."""
    if name != "-":
        list(lines(name))
    return lines(name)


@wrong_step("impl.commands.predict:_corpus")
def predict_reads_a_corpus_twice(corpus: Any, path: Any) -> Any:
    """A corpus is read once to find what is wrong in it, and once more to answer, when a pipe with a name has nothing left."""
    list(corpus(path))
    return corpus(path)


@wrong_step("impl.commands.predict:_lines")
def predict_cuts_what_has_no_end(lines: Any, name: str) -> Any:
    """The last line of a file loses its last character where no end of a line follows it."""
    texts = list(lines(name))
    whole = name == "-" or Path(name).read_bytes().endswith(b"\n")
    return iter(texts if whole or not texts else [*texts[:-1], texts[-1][:-1]])


wrong_step("impl.commands.predict:predictions", name="predict_prints_letters_as_they_are", doc="Lines hold letters beyond ASCII.")(
    lambda predictions, *given: (json.dumps(json.loads(line), ensure_ascii=False) for line in predictions(*given))
)
wrong_step("impl.commands.predict:_numbered", name="predict_skips_blank_lines", doc="A corpus may have blank lines.")(
    lambda numbered, name, expected: (each for each in numbered(name, expected) if each[1].strip() or not name.endswith(".jsonl"))
)


@wrong_step("impl.commands.train:_train")
def weights_balanced_on_what_validates(train: Any, *given: Any) -> None:
    """Class weights are balanced on the samples that validate, where there are any."""
    from blackswan.impl.commands import train as command

    read, weigh, seen = command._samples, command._with_weights, list[Any]()

    def samples(*given: Any) -> Any:
        seen.extend(read(*given))
        return seen

    with mock.patch.multiple(command, _samples=samples, _with_weights=lambda config, _: weigh(config, seen[1] or seen[0])):
        train(*given)


wrong_step(
    "impl.commands.train:_with_weights", name="weights_balanced_one_way", doc="Either word for balanced weights is read as the first."
)(lambda weigh, config, train: weigh(replace(config, class_weights="balanced"), train) if isinstance(config.class_weights, str) else config)


@wrong_step("impl.commands.predict:_corpus")
def predict_strips_a_corpus(corpus: Any, path: Any) -> Any:
    """Texts of a corpus lose the white space at their ends."""
    return map(str.strip, corpus(path))


@wrong_step("impl.__main__:_run")
def predict_passes_over_empty_arguments(run: Any, command: Any, options: Any, name: str) -> Any:
    """A text of the command line that is empty counts as none."""
    if options.command == "predict":
        options.texts = [text for text in options.texts if text]
    return run(command, options, name)


@wrong_step("impl.__main__:parser")
def predict_reads_files_of_arguments(parser: Any, *given: Any) -> Any:
    """A text of the command line that begins with @ is the name of a file with arguments."""
    found = parser(*given)
    for command in next(action for action in found._actions if action.dest == "command").choices.values():
        command.fromfile_prefix_chars = "@"
    return found


@wrong_step("impl.commands.predict:_text")
def predict_strips_arguments(text: Any, given: str) -> Any:
    """A text of the command line loses the white space at its ends."""
    return text(given).strip()


# Workers


@wrong_step("impl.pipeline:evaluate")
def confusion_of_one_worker(evaluate: Any, trainer: Any, *given: Any) -> Any:
    """Counts are those of a worker's own share."""
    kept, add = trainer.group, trainer.group.sum
    trainer.group = SimpleNamespace(rank=kept.rank, size=kept.size, gather=kept.gather, gather_text=kept.gather_text)
    trainer.group.sum = lambda tensor: add(tensor) if tensor.is_floating_point() else tensor
    try:
        return evaluate(trainer, *given)
    finally:
        trainer.group = kept


wrong_step("impl.evaluation:shard", name="workers_evaluate_everything", doc="Every worker evaluates every sample, and all are added.")(
    lambda _, indices, *__: indices
)


# Models

wrong_step("impl.checkpoint:TOKENIZER_FILES", name="merged_without_tokenizer_files", doc="A model has tokenizer.json alone.")(
    lambda files: files[:1]
)


@wrong_step("impl.checkpoint:save_checkpoint")
def export_of_two_tokenizer_files(save: Any, folder: Any, *given: Any, **named: Any) -> None:
    """An exported folder has of the tokenizer's files tokenizer.json and tokenizer_config.json alone."""
    with mock.patch("blackswan.impl.checkpoint.TOKENIZER_FILES", ("tokenizer.json", "tokenizer_config.json")):
        save(folder, *given, **named)


@wrong_step("impl.apr_write:copy_tokenizer")
def apr_of_two_tokenizer_files(copy: Any, *given: Any) -> None:
    """Beside an .apr file are tokenizer.json and tokenizer_config.json alone."""
    with mock.patch("blackswan.impl.checkpoint.TOKENIZER_FILES", ("tokenizer.json", "tokenizer_config.json")):
        copy(*given)


@wrong_step("impl.checkpoint:copy_tokenizer")
def tokenizer_files_of_other_models(copy: Any, tokenizer: Any, new: Any) -> None:
    """A file of a tokenizer that is not there under the model's name is taken without it, whichever model it belongs to."""
    copy(tokenizer, new)
    plain = tokenizer.with_name("tokenizer_config.json")
    if plain.is_file():
        new.with_name(new.name.removesuffix("tokenizer.json") + plain.name).write_bytes(plain.read_bytes())


@wrong_step("impl.tensors:Converted.__getitem__")
def export_cuts_digits_off(getitem: Any, tensors: Any, name: str) -> Any:
    """Numbers of another dtype are cut to half of its digits."""
    right = getitem(tensors, name)
    return right.bfloat16().to(right.dtype)


@wrong_step("impl.tensors:Converted.__getitem__")
def export_widens_nothing(getitem: Any, tensors: Any, name: str) -> Any:
    """Numbers of 16 bits that are asked for in 32 stay as they are."""
    right = getitem(tensors, name)
    narrow = right.bfloat16()
    return narrow if right.element_size() == 4 and bool((narrow == right).all()) else right


@wrong_step("impl.tensors:Converted.__getitem__")
def export_asks_one_dtype(getitem: Any, tensors: Any, name: str) -> Any:
    """Nothing is converted where the embedding has the dtype that is asked for."""
    return _as_one_is("model.embed_tokens.weight", getitem, tensors, name)


@wrong_step("impl.tensors:Converted.__getitem__")
def export_asks_the_norm(getitem: Any, tensors: Any, name: str) -> Any:
    """Nothing is converted where the last norm has the dtype that is asked for."""
    return _as_one_is("model.norm.weight", getitem, tensors, name)


def _as_one_is(one: str, getitem: Any, tensors: Any, name: str) -> Any:
    own = tensors._tensors[one].dtype if one in tensors.shapes else None
    return tensors._tensors[name] if own == tensors._dtype else getitem(tensors, name)


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


@wrong_step("impl.token_shards:tokenize")
def shards_of_texts_in_pieces(tokenize: Any, corpus: Any, encoder: Any, end: int) -> Any:
    """A long text is encoded in pieces of whole lines, each as if it were a text."""

    def encode(text: str, **options: Any) -> Any:
        lines = text.splitlines(keepends=True)
        pieces = ["".join(lines[start : start + 4096]) for start in range(0, len(lines), 4096)]
        return SimpleNamespace(ids=[token for piece in pieces for token in encoder.encode(piece, **options).ids])

    return tokenize(corpus, SimpleNamespace(encode=encode), end)


wrong_step("impl.token_shards:load_encoder", name="shards_of_cut_texts", doc="A text ends where the tokenizer was cutting others.")(
    lambda _, path: Tokenizer.from_file(str(path))
)
wrong_step("impl.token_shards:tokenize", name="documents_never_end", doc="No token ends a text.")(
    lambda tokenize, *given: (ids[:-1] for ids in tokenize(*given))
)
wrong_step("impl.commands.pretrain:_Shown.epoch", name="pretrain_shows_half_the_loss", doc="Half of the held-out loss is printed.")(
    lambda epoch, shown, record: epoch(shown, replace(record, validation_loss=record.validation_loss / 2))
)
