"""Wrong readers of corpora, tokenizers, batches and plans of an epoch: one step of `impl` replaced each."""

import json
import math
import random
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.registry import named_step, step_mutant

CORPUS, TOKENS, SAMPLES = "blackswan.impl.corpus", "blackswan.impl.tokens", "blackswan.impl.samples"
Step = Callable[..., Any]
Indices = list[int]


def _of_samples(change: Callable[[list[Any]], list[Any]]) -> Callable[[Step], Step]:
    """A corpus whose samples are changed after they were read."""
    return lambda load: lambda *arguments: change(load(*arguments))


named_step(
    "corpus_lines_split_as_text",
    "own",
    "Lines cut at every Unicode line break, also inside a text.",
    lambda _: lambda path: [line.encode() for line in path.read_bytes().decode(errors="surrogateescape").splitlines()],
    CORPUS,
    "_lines",
)
named_step(
    "corpus_last_line_lost",
    "own",
    "A last line without a newline is left out.",
    lambda _: lambda path: path.read_bytes().split(b"\n")[:-1],
    CORPUS,
    "_lines",
)
named_step(
    "corpus_text_stripped",
    "own",
    "White space at both ends of a text removed.",
    _of_samples(lambda samples: [replace(sample, text=sample.text.strip()) for sample in samples]),
    CORPUS,
    "load_corpus",
)
named_step(
    "corpus_empty_text_dropped",
    "own",
    "A sample with an empty text is left out.",
    _of_samples(lambda samples: [sample for sample in samples if sample.text]),
    CORPUS,
    "load_corpus",
)
named_step(
    "corpus_duplicates_dropped",
    "own",
    "A sample that is there twice is read once.",
    _of_samples(lambda samples: list(dict.fromkeys(samples))),
    CORPUS,
    "load_corpus",
)
named_step(
    "corpus_labels_off_by_one",
    "own",
    "Labels taken to count from one.",
    _of_samples(
        lambda samples: [replace(sample, label=sample.label - 1) if isinstance(sample.label, int) else sample for sample in samples]
    ),
    CORPUS,
    "load_corpus",
)
named_step(
    "corpus_multi_hot_reversed",
    "own",
    "Classes of a list counted from its end.",
    lambda read: lambda *arguments: read(*arguments)[::-1],
    CORPUS,
    "_multi_hot",
)


@step_mutant(CORPUS, "_lines", "own")
def corpus_read_as_latin_1(read: Step) -> Step:
    """UTF-8 read in the encoding of some platform."""
    return lambda path: [line.decode("latin-1").encode() for line in read(path)]


@step_mutant(CORPUS, "_sample", "own")
def corpus_single_label_all_zero(read: Step) -> Step:
    """A single label gives no class where several are asked for."""

    def changed(value: Any, num_classes: int, multi_label: bool) -> Any:
        sample = read(value, num_classes, multi_label)
        return replace(sample, label=(0,) * num_classes) if multi_label and "label" in value else sample

    return changed


@step_mutant(CORPUS, "load_corpus", "own")
def corpus_bad_line_skipped(load: Step) -> Step:
    """A line that cannot be used is left out in silence."""

    def changed(path: Path, *others: Any) -> list[Any]:
        samples: list[Any] = []
        with TemporaryDirectory() as folder:
            alone = Path(folder) / path.name
            for line in path.read_bytes().splitlines():
                alone.write_bytes(line)
                with suppress(ValueError):
                    samples += load(alone, *others)
        return samples

    return changed


@step_mutant(CORPUS, "load_corpus", "own")
def corpus_line_not_named(load: Step) -> Step:
    """The refusal names the file and not the line."""

    def changed(path: Path, *others: Any) -> Any:
        try:
            return load(path, *others)
        except ValueError as error:
            raise ValueError(f"{path}: not a corpus") from error

    return changed


@step_mutant(CORPUS, "_sample", "own")
def corpus_label_clamped(read: Step) -> Step:
    """A label out of range becomes the nearest class."""

    def changed(value: Any, num_classes: int, multi_label: bool) -> Any:
        whole = isinstance(value, dict) and type(value.get("label")) is int
        return read({**value, "label": min(max(value["label"], 0), num_classes - 1)} if whole else value, num_classes, multi_label)

    return changed


def _lenient(repair: Callable[[Any, int], Any]) -> Callable[[Step], Step]:
    """A list of labels repaired where it should be refused."""
    return lambda read: (
        lambda labels, num_classes, multi_label: read(
            repair(labels, num_classes) if isinstance(labels, list) else labels, num_classes, multi_label
        )
    )


named_step(
    "corpus_multi_hot_cut",
    "own",
    "Entries beyond the last class left out.",
    _lenient(lambda labels, classes: labels[:classes]),
    CORPUS,
    "_multi_hot",
)
named_step(
    "corpus_multi_hot_filled_up",
    "own",
    "A list that is too short filled up with zeros.",
    _lenient(lambda labels, classes: labels + [0] * (classes - len(labels))),
    CORPUS,
    "_multi_hot",
)
named_step(
    "corpus_multi_hot_by_truth",
    "own",
    '2, 0.5, true and "1" all count as 1.',
    _lenient(lambda labels, _: [int(bool(entry)) for entry in labels]),
    CORPUS,
    "_multi_hot",
)


@step_mutant(CORPUS, "_sample", "own")
def corpus_first_of_several_labels(read: Step) -> Step:
    """The first of several labels where one was asked for."""

    def changed(value: Any, num_classes: int, multi_label: bool) -> Any:
        if not multi_label and isinstance(value, dict) and "labels" in value:
            return read({"input": value["input"], "label": value["labels"].index(1)}, num_classes, multi_label)
        return read(value, num_classes, multi_label)

    return changed


@step_mutant(CORPUS, "load_corpus", "own")
def corpus_bad_multi_label_line_skipped(load: Step) -> Step:
    """Bad lists of labels left out in silence."""

    def changed(path: Path, num_classes: int, multi_label: bool = False) -> Any:
        try:
            return load(path, num_classes, multi_label)
        except ValueError:
            if not multi_label:
                raise
            return []

    return changed


def _measuring(change: Callable[[Any, str, list[int], int], tuple[list[int], int]]) -> Callable[[Step], Step]:
    """The ids of a text and their number before truncation, changed: (tokens, text, ids, number)."""
    return lambda measure: lambda self, text: change(self, text, *measure(self, text))


def _after(change: Callable[[Any, Path], None]) -> Callable[[Step], Step]:
    """A tokenizer changed once it is made."""

    @wraps(change)
    def of(initialise: Step) -> Step:
        def changed(self: Any, path: Path, *arguments: Any) -> None:
            initialise(self, path, *arguments)
            change(self, path)

        return changed

    return of


MEASURE = "CheckpointTokens.measure"
INITIALISE = "CheckpointTokens.__init__"
named_step(
    "tokens_cut_from_the_left",
    "own",
    "The beginning of a longer text is cut off.",
    _after(lambda self, _: self._tokenizer.enable_truncation(self.max_seq_len, direction="left")),
    TOKENS,
    INITIALISE,
)
named_step(
    "tokens_limit_exclusive",
    "own",
    "One token fewer than max_seq_len.",
    _measuring(lambda self, _, ids, length: (ids[: max(1, self.max_seq_len - 1)], length)),
    TOKENS,
    MEASURE,
)
named_step(
    "tokens_empty_text_gives_none",
    "own",
    "An empty text has no token.",
    _measuring(lambda _, text, ids, length: (ids if text else [], length)),
    TOKENS,
    MEASURE,
)
named_step(
    "tokens_text_normalised",
    "own",
    "Texts brought to NFC first.",
    lambda measure: lambda self, text: measure(self, unicodedata.normalize("NFC", text)),
    TOKENS,
    MEASURE,
)
named_step(
    "tokens_with_bpe_dropout",
    "own",
    "Merges left out at random.",
    _after(lambda self, _: setattr(self._tokenizer.model, "dropout", 0.3)),
    TOKENS,
    INITIALISE,
)
named_step(
    "statistics_of_characters",
    "own",
    "Lengths in characters.",
    _measuring(lambda _, text, ids, __: (ids, max(1, len(text)))),
    TOKENS,
    MEASURE,
)
named_step(
    "statistics_after_truncation",
    "own",
    "Lengths after truncation: the 99th percentile never exceeds max_seq_len.",
    _measuring(lambda _, __, ids, ___: (ids, len(ids))),
    TOKENS,
    MEASURE,
)


@step_mutant(TOKENS, MEASURE, "own")
def tokens_end_token_cut_off(_: Step) -> Step:
    """Truncation takes the closing token."""

    def changed(self: Any, text: str) -> tuple[list[int], int]:
        self._tokenizer.no_truncation()
        ids = self._tokenizer.encode(text).ids or [self.fill]
        return ids[: self.max_seq_len], len(ids)

    return changed


@step_mutant(TOKENS, INITIALISE, "own")
@_after
def tokens_padding_of_the_file_kept(self: Any, path: Path) -> None:
    """The padding that tokenizer.json asks for becomes tokens of the text."""
    padding = json.loads(path.read_text(encoding="utf-8"))["padding"]
    if padding:
        self._tokenizer.enable_padding(length=padding["strategy"]["Fixed"], pad_id=padding["pad_id"])


named_step("byte_tokens_pad_with_a_byte", "own", "Padding is the byte 0.", lambda _: 0, TOKENS, "ByteTokens.fill")
named_step(
    "byte_tokens_say_nothing",
    "own",
    "No word that there is no tokenizer.",
    lambda _: "tokenizer (257 tokens)",
    TOKENS,
    "ByteTokens.description",
)
named_step(
    "byte_tokens_of_characters",
    "own",
    "Code points instead of bytes.",
    lambda _: lambda self, text: ([min(ord(character), 255) for character in text][: self.max_seq_len] or [self.fill], max(1, len(text))),
    TOKENS,
    "ByteTokens.measure",
)


@step_mutant(TOKENS, "load_tokenizer", "own")
def tokenizer_falls_back_to_bytes(load: Step) -> Step:
    """Bytes instead of a tokenizer that is missing or broken."""

    def changed(folder: Path, max_seq_len: int, padding_side: str = "right") -> Any:
        from blackswan.impl.tokens import ByteTokens

        try:
            return load(folder, max_seq_len, padding_side)
        except (FileNotFoundError, ValueError):
            return ByteTokens(max_seq_len, padding_side)

    return changed


def _percentiles(rank: Callable[[list[int], int], int]) -> Callable[[Step], Step]:
    """Statistics with other percentiles: (sorted lengths, percent)."""

    def of(statistics: Step) -> Step:
        def changed(labels: Any, num_classes: int, lengths: Sequence[int], truncated: int = 0) -> Any:
            found = statistics(labels, num_classes, lengths, truncated)
            return replace(found, length_percentiles={percent: rank(sorted(lengths), percent) for percent in found.length_percentiles})

        return changed

    return of


def _interpolated(ranked: list[int], percent: int) -> int:
    at = percent / 100 * (len(ranked) - 1)
    low = ranked[math.floor(at)]
    return round(low + (at - math.floor(at)) * (ranked[math.ceil(at)] - low))


named_step(
    "statistics_after_truncation_of_a_part",
    "own",
    "Lengths after truncation where samples were selected: the training part of a split is never said to be cut.",
    lambda select: lambda self, indices: replace(select(self, indices), text_lengths=None),
    SAMPLES,
    "Samples.select",
)
named_step("statistics_interpolated", "own", "Percentiles interpolated.", _percentiles(_interpolated), SAMPLES, "statistics")
named_step(
    "statistics_rank_rounded_down",
    "own",
    "Percentiles one rank low.",
    _percentiles(lambda ranked, percent: ranked[max(0, percent * len(ranked) // 100 - 1)]),
    SAMPLES,
    "statistics",
)
named_step(
    "statistics_first_of_several_labels",
    "own",
    "A sample of several classes counts for the first.",
    lambda statistics: (
        lambda labels, *others: statistics(
            [label if isinstance(label, int) else tuple(int(on and not any(label[:i])) for i, on in enumerate(label)) for label in labels],
            *others,
        )
    ),
    SAMPLES,
    "statistics",
)
named_step(
    "statistics_empty_class_ignored",
    "own",
    "The rarest class is the rarest that has samples.",
    lambda _: property(lambda self: min(count for count in self.class_counts if count)),
    CORPUS,
    "Statistics.minority",
)


def _padding(change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[[Step], Step]:
    """A padded batch changed: (tokens, ids, mask)."""
    return lambda pad: lambda self, rows: change(self, *pad(self, rows))


named_step(
    "batch_padding_counts_as_real",
    "P11",
    "Padding is true in the mask.",
    _padding(lambda _, ids, mask: (ids, mask | True)),
    TOKENS,
    "Tokens.pad",
)
named_step(
    "batch_mask_from_padding_id",
    "P8",
    "Mask from the padding id, which is also a token.",
    _padding(lambda self, ids, _: (ids, ids != self.fill)),
    TOKENS,
    "Tokens.pad",
)
named_step(
    "batch_mask_off_by_one",
    "P9",
    "Mask of left padding one column off.",
    _padding(lambda self, ids, mask: (ids, mask.roll(1, 1) if self.padding_side == "left" else mask)),
    TOKENS,
    "Tokens.pad",
)
named_step(
    "batch_raw_text_stripped",
    "own",
    "Raw texts are not treated as pre-tokenised ones.",
    lambda batch: lambda self, texts: batch(self, [text.strip() for text in texts]),
    TOKENS,
    "Tokens.batch",
)


@step_mutant(TOKENS, "Tokens.pad", "own")
def batch_padding_side_ignored(pad: Step) -> Step:
    """Padded on the right whatever the settings say."""

    def changed(self: Any, rows: Any) -> Any:
        side, self.padding_side = self.padding_side, "right"
        try:
            return pad(self, rows)
        finally:
            self.padding_side = side

    return changed


named_step(
    "batch_labels_of_the_next_sample",
    "own",
    "Labels one sample off.",
    lambda batch: lambda *arguments: replace(found := batch(*arguments), labels=found.labels.roll(1, 0)),
    SAMPLES,
    "Samples.batch",
)
named_step(
    "batch_multi_hot_in_integers",
    "own",
    "Multi-hot labels are integers.",
    lambda batch: lambda *arguments: replace(found := batch(*arguments), labels=found.labels.long()),
    SAMPLES,
    "Samples.batch",
)


def _shuffled(count: int, seed: int) -> Indices:
    order: Indices = np.random.default_rng(seed).permutation(count).tolist()
    return order


named_step(
    "order_same_in_each_epoch", "own", "Shuffled once.", lambda order: lambda count, seed, _: order(count, seed, 0), SAMPLES, "epoch_order"
)
named_step(
    "order_ignores_seed",
    "own",
    "The same order for every seed.",
    lambda order: lambda count, _, epoch: order(count, 0, epoch),
    SAMPLES,
    "epoch_order",
)
named_step(
    "order_of_seed_plus_epoch",
    "own",
    "The second epoch of one seed is the first of the next.",
    lambda _: lambda count, seed, epoch: _shuffled(count, seed + epoch),
    SAMPLES,
    "epoch_order",
)
named_step(
    "order_from_global_state",
    "own",
    "The order depends on what drew random numbers before, and is lost on resume.",
    lambda _: lambda count, *__: random.sample(range(count), count),
    SAMPLES,
    "epoch_order",
)
named_step(
    "order_with_replacement",
    "own",
    "Some samples twice in an epoch and some not at all.",
    lambda _: lambda count, seed, epoch: np.random.default_rng([seed, epoch]).integers(0, count, count).tolist(),
    SAMPLES,
    "epoch_order",
)
named_step(
    "order_rotated",
    "own",
    "Only the beginning is random.",
    lambda order: lambda count, seed, epoch: [(index + order(count, seed, epoch)[0]) % count for index in range(count)],
    SAMPLES,
    "epoch_order",
)
named_step(
    "order_without_the_last_sample",
    "own",
    "The last sample of the corpus is never seen.",
    lambda order: lambda count, *others: order(count - 1, *others),
    SAMPLES,
    "epoch_order",
)
named_step(
    "batches_last_dropped",
    "own",
    "The last batch is left out when it is not full.",
    lambda batches: lambda order, size: [batch for batch in batches(order, size) if len(batch) == size],
    SAMPLES,
    "effective_batches",
)
named_step(
    "batches_last_filled_up",
    "own",
    "The last batch repeats samples of the first.",
    lambda batches: lambda order, size: [(batch + list(order) * size)[:size] for batch in batches(order, size)],
    SAMPLES,
    "effective_batches",
)
named_step(
    "batches_empty_at_the_end",
    "own",
    "An empty batch where the epoch divides evenly.",
    lambda batches: lambda order, size: batches(order, size) + [[]] * (len(order) % size == 0),
    SAMPLES,
    "effective_batches",
)


def _splitting(choose: Callable[[Any, float, int], set[int]]) -> Callable[[Step], Step]:
    """A split whose validation part is chosen so: (samples, fraction, seed)."""

    def of(split: Step) -> Step:
        def changed(samples: Any, fraction: float, seed: int) -> Any:
            split(samples, fraction, seed)
            chosen = choose(samples, fraction, seed)
            return samples.select([i for i in range(len(samples)) if i not in chosen]), samples.select(sorted(chosen))

        return changed

    return of


def _share_of_each_class(samples: Any, fraction: float, order: Indices) -> set[int]:
    """Of each class the first ones in that order, rounded down."""
    chosen: set[int] = set()
    for label in set(samples.targets):
        members = [index for index in order if samples.targets[index] == label]
        chosen.update(members[: math.floor(fraction * len(members))])
    return chosen


named_step(
    "split_not_stratified",
    "own",
    "Drawn from all samples alike.",
    _splitting(lambda samples, fraction, seed: set(_shuffled(len(samples), seed)[: round(fraction * len(samples))])),
    SAMPLES,
    "split_validation",
)
named_step(
    "split_takes_the_first",
    "own",
    "The first samples of each class.",
    lambda _: lambda count, *__: list(range(count)),
    SAMPLES,
    "_shuffled",
)
named_step(
    "split_shares_rounded_down",
    "own",
    "Every class rounded down.",
    _splitting(lambda samples, fraction, seed: _share_of_each_class(samples, fraction, _shuffled(len(samples), seed))),
    SAMPLES,
    "split_validation",
)
named_step(
    "split_from_global_state",
    "own",
    "Another split after a resume: training samples in the validation part.",
    lambda _: lambda count, *__: random.sample(range(count), count),
    SAMPLES,
    "_shuffled",
)
named_step(
    "split_takes_the_last_of_a_class",
    "own",
    "The only sample of a class is held out.",
    lambda shares: (
        lambda counts, fraction, total, spare_last: [
            1 if count == 1 else share for count, share in zip(counts, shares(counts, fraction, total, spare_last=spare_last), strict=True)
        ]
    ),
    SAMPLES,
    "_shares",
)
named_step(
    "split_overlaps",
    "own",
    "Validation samples are trained on as well.",
    lambda split: lambda samples, fraction, seed: (samples, split(samples, fraction, seed)[1]),
    SAMPLES,
    "split_validation",
)


@step_mutant(SAMPLES, "Samples.select", "own")
def split_leaves_labels_behind(select: Step) -> Step:
    """Texts are selected and labels are not."""

    def changed(self: Any, indices: Sequence[int]) -> Any:
        found = select(self, indices)
        return replace(found, targets=self.targets[: len(found)])

    return changed


@step_mutant(SAMPLES, "split_validation", "own")
def split_empty_in_silence(split: Step) -> Step:
    """An empty validation part where one was asked for."""

    def changed(samples: Any, fraction: float, seed: int) -> Any:
        try:
            return split(samples, fraction, seed)
        except ValueError:
            return samples, samples.select([])

    return changed


def _of_a_run(change: Callable[..., Any]) -> Callable[[Step], Step]:
    """Another division of what a run has: (the right one, samples, those given for validation, fraction, seed)."""
    return lambda divide: lambda *given: change(divide, *given)


PARTS = "training_and_validation"
_trains_on_all = _of_a_run(lambda divide, samples, *others: (samples, divide(samples, *others)[1]))
named_step(
    "run_trains_on_its_validation",
    "own",
    "The pipeline holds samples out for validation, and trains on them too.",
    _trains_on_all,
    "blackswan.impl.pipeline",
    PARTS,
)
named_step(
    "command_trains_on_its_validation",
    "own",
    "The command holds samples out for validation, and trains on them too.",
    _trains_on_all,
    SAMPLES,
    PARTS,
)
named_step(
    "run_split_swapped",
    "own",
    "The part for validation is trained on, and the other validates.",
    _of_a_run(lambda divide, *given: divide(*given)[::-1]),
    "blackswan.impl.pipeline",
    PARTS,
)
named_step(
    "run_split_of_another_seed",
    "own",
    "The split ignores the run's seed.",
    _of_a_run(lambda divide, *given: divide(*given[:3], given[3] + 1)),
    "blackswan.impl.pipeline",
    PARTS,
)
named_step(
    "run_split_although_given",
    "own",
    "Training samples are held out although there is a validation corpus, and lost.",
    _of_a_run(lambda divide, samples, apart, *others: (divide(samples, None, *others)[0], divide(samples, apart, *others)[1])),
    "blackswan.impl.pipeline",
    PARTS,
)
named_step(
    "command_ignores_validation_corpus",
    "own",
    "--validation is read, and a part of --corpus validates.",
    _of_a_run(lambda divide, samples, _, *others: divide(samples, None, *others)),
    SAMPLES,
    PARTS,
)


def _weighing(weigh: Callable[[int, int, int], float]) -> Callable[[Step], Step]:
    """Weights of each class: (samples of it, samples in all, classes)."""

    def of(_: Step) -> Step:
        def changed(samples: Any) -> Any:
            counts = samples.statistics().class_counts
            return tuple(weigh(count, sum(counts), len(counts)) for count in counts)

        return changed

    return of


named_step(
    "weights_proportional",
    "own",
    "Frequent classes weigh more.",
    _weighing(lambda count, total, classes: classes * count / total),
    SAMPLES,
    "balanced_weights",
)
named_step(
    "weights_not_normalised",
    "own",
    "n / (classes · n_c), which does not add up to the number of classes.",
    _weighing(lambda count, total, classes: total / (classes * max(count, 1))),
    SAMPLES,
    "balanced_weights",
)
named_step(
    "weights_of_an_empty_class",
    "own",
    "A class without samples gets a weight.",
    _weighing(lambda count, *_: 1 / max(count, 1)),
    SAMPLES,
    "balanced_weights",
)


@step_mutant(SAMPLES, "balanced_weights", "own")
def weights_of_the_root(_: Step) -> Step:
    """Inverse to the root of the number of samples."""

    def changed(samples: Any) -> Any:
        roots = [count**-0.5 for count in samples.statistics().class_counts]
        return tuple(len(roots) * root / sum(roots) for root in roots)

    return changed
