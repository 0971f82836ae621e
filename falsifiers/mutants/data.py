"""Wrong readers of corpora, tokenizers, batches and plans of an epoch: one step of `impl` replaced each."""

import json
import math
import random
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.patches import step_mutant

CORPUS, TOKENS, SAMPLES = "blackswan.impl.corpus", "blackswan.impl.tokens", "blackswan.impl.samples"
Step = Callable[..., Any]
Indices = list[int]


def _of_samples(change: Callable[[list[Any]], list[Any]]) -> Callable[[Step], Step]:
    """A corpus whose samples are changed after they were read."""
    return lambda load: lambda *arguments: change(load(*arguments))


step_mutant("corpus_lines_split_as_text", CORPUS, "_lines")(
    lambda _: lambda path: [line.encode() for line in path.read_bytes().decode(errors="surrogateescape").splitlines()]
)
step_mutant("corpus_last_line_lost", CORPUS, "_lines")(lambda _: lambda path: path.read_bytes().split(b"\n")[:-1])
step_mutant("corpus_text_stripped", CORPUS, "load_corpus")(
    _of_samples(lambda samples: [replace(sample, text=sample.text.strip()) for sample in samples])
)
step_mutant("corpus_empty_text_dropped", CORPUS, "load_corpus")(_of_samples(lambda samples: [sample for sample in samples if sample.text]))
step_mutant("corpus_duplicates_dropped", CORPUS, "load_corpus")(_of_samples(lambda samples: list(dict.fromkeys(samples))))
step_mutant("corpus_labels_off_by_one", CORPUS, "load_corpus")(
    _of_samples(
        lambda samples: [replace(sample, label=sample.label - 1) if isinstance(sample.label, int) else sample for sample in samples]
    )
)
step_mutant("corpus_multi_hot_reversed", CORPUS, "_multi_hot")(lambda read: lambda *arguments: read(*arguments)[::-1])


@step_mutant("corpus_read_as_latin_1", CORPUS, "_lines")
def _(read: Step) -> Step:
    return lambda path: [line.decode("latin-1").encode() for line in read(path)]


@step_mutant("corpus_single_label_all_zero", CORPUS, "_sample")
def _(read: Step) -> Step:
    def changed(value: Any, num_classes: int, multi_label: bool) -> Any:
        sample = read(value, num_classes, multi_label)
        return replace(sample, label=(0,) * num_classes) if multi_label and "label" in value else sample

    return changed


def _lenient(repair: Callable[[Any, int], Any]) -> Callable[[Step], Step]:
    """A list of labels repaired where it should be refused."""
    return lambda read: (
        lambda labels, num_classes, multi_label: read(
            repair(labels, num_classes) if isinstance(labels, list) else labels, num_classes, multi_label
        )
    )


step_mutant("corpus_multi_hot_cut", CORPUS, "_multi_hot")(_lenient(lambda labels, classes: labels[:classes]))
step_mutant("corpus_multi_hot_filled_up", CORPUS, "_multi_hot")(_lenient(lambda labels, classes: labels + [0] * (classes - len(labels))))
step_mutant("corpus_multi_hot_by_truth", CORPUS, "_multi_hot")(_lenient(lambda labels, _: [int(bool(entry)) for entry in labels]))


@step_mutant("corpus_first_of_several_labels", CORPUS, "_sample")
def _(read: Step) -> Step:
    def changed(value: Any, num_classes: int, multi_label: bool) -> Any:
        if not multi_label and isinstance(value, dict) and "labels" in value:
            return read({"input": value["input"], "label": value["labels"].index(1)}, num_classes, multi_label)
        return read(value, num_classes, multi_label)

    return changed


@step_mutant("corpus_bad_multi_label_line_skipped", CORPUS, "load_corpus")
def _(load: Step) -> Step:
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

    def of(initialise: Step) -> Step:
        def changed(self: Any, path: Path, *arguments: Any) -> None:
            initialise(self, path, *arguments)
            change(self, path)

        return changed

    return of


MEASURE = "CheckpointTokens.measure"
INITIALISE = "CheckpointTokens.__init__"
step_mutant("tokens_cut_from_the_left", TOKENS, INITIALISE)(
    _after(lambda self, _: self._tokenizer.enable_truncation(self.max_seq_len, direction="left"))
)
step_mutant("tokens_limit_exclusive", TOKENS, MEASURE)(
    _measuring(lambda self, _, ids, length: (ids[: max(1, self.max_seq_len - 1)], length))
)
step_mutant("tokens_empty_text_gives_none", TOKENS, MEASURE)(_measuring(lambda _, text, ids, length: (ids if text else [], length)))
step_mutant("tokens_text_normalised", TOKENS, MEASURE)(lambda measure: lambda self, text: measure(self, unicodedata.normalize("NFC", text)))
step_mutant("tokens_with_bpe_dropout", TOKENS, INITIALISE)(_after(lambda self, _: setattr(self._tokenizer.model, "dropout", 0.3)))
step_mutant("statistics_of_characters", TOKENS, MEASURE)(_measuring(lambda _, text, ids, __: (ids, max(1, len(text)))))
step_mutant("statistics_after_truncation", TOKENS, MEASURE)(_measuring(lambda _, __, ids, ___: (ids, len(ids))))


@step_mutant("tokens_end_token_cut_off", TOKENS, MEASURE)
def _(_: Step) -> Step:
    def changed(self: Any, text: str) -> tuple[list[int], int]:
        self._tokenizer.no_truncation()
        ids = self._tokenizer.encode(text).ids or [self.fill]
        return ids[: self.max_seq_len], len(ids)

    return changed


@step_mutant("tokens_padding_of_the_file_kept", TOKENS, INITIALISE)
@_after
def _(self: Any, path: Path) -> None:
    padding = json.loads(path.read_text(encoding="utf-8"))["padding"]
    if padding:
        self._tokenizer.enable_padding(length=padding["strategy"]["Fixed"], pad_id=padding["pad_id"])


step_mutant("byte_tokens_pad_with_a_byte", TOKENS, "ByteTokens.fill")(lambda _: 0)
step_mutant("byte_tokens_say_nothing", TOKENS, "ByteTokens.description")(lambda _: "tokenizer (257 tokens)")
step_mutant("byte_tokens_of_characters", TOKENS, "ByteTokens.measure")(
    lambda _: lambda self, text: ([min(ord(character), 255) for character in text][: self.max_seq_len] or [self.fill], max(1, len(text)))
)


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


step_mutant("statistics_after_truncation_of_a_part", SAMPLES, "Samples.select")(
    lambda select: lambda self, indices: replace(select(self, indices), text_lengths=None)
)
step_mutant("statistics_interpolated", SAMPLES, "statistics")(_percentiles(_interpolated))
step_mutant("statistics_rank_rounded_down", SAMPLES, "statistics")(
    _percentiles(lambda ranked, percent: ranked[max(0, percent * len(ranked) // 100 - 1)])
)
step_mutant("statistics_first_of_several_labels", SAMPLES, "statistics")(
    lambda statistics: (
        lambda labels, *others: statistics(
            [label if isinstance(label, int) else tuple(int(on and not any(label[:i])) for i, on in enumerate(label)) for label in labels],
            *others,
        )
    )
)
step_mutant("statistics_empty_class_ignored", CORPUS, "Statistics.minority")(
    lambda _: property(lambda self: min(count for count in self.class_counts if count))
)


def _padding(change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[[Step], Step]:
    """A padded batch changed: (tokens, ids, mask)."""
    return lambda pad: lambda self, rows: change(self, *pad(self, rows))


step_mutant("batch_padding_counts_as_real", TOKENS, "Tokens.pad")(_padding(lambda _, ids, mask: (ids, mask | True)))
step_mutant("batch_mask_from_padding_id", TOKENS, "Tokens.pad")(_padding(lambda self, ids, _: (ids, ids != self.fill)))
step_mutant("batch_mask_off_by_one", TOKENS, "Tokens.pad")(
    _padding(lambda self, ids, mask: (ids, mask.roll(1, 1) if self.padding_side == "left" else mask))
)
step_mutant("batch_raw_text_stripped", TOKENS, "Tokens.batch")(
    lambda batch: lambda self, texts: batch(self, [text.strip() for text in texts])
)


@step_mutant("batch_padding_side_ignored", TOKENS, "Tokens.pad")
def _(pad: Step) -> Step:
    def changed(self: Any, rows: Any) -> Any:
        side, self.padding_side = self.padding_side, "right"
        try:
            return pad(self, rows)
        finally:
            self.padding_side = side

    return changed


step_mutant("batch_labels_of_the_next_sample", SAMPLES, "Samples.batch")(
    lambda batch: lambda *arguments: replace(found := batch(*arguments), labels=found.labels.roll(1, 0))
)
step_mutant("batch_multi_hot_in_integers", SAMPLES, "Samples.batch")(
    lambda batch: lambda *arguments: replace(found := batch(*arguments), labels=found.labels.long())
)


def _shuffled(count: int, seed: int) -> Indices:
    order: Indices = np.random.default_rng(seed).permutation(count).tolist()
    return order


step_mutant("order_same_in_each_epoch", SAMPLES, "epoch_order")(lambda order: lambda count, seed, _: order(count, seed, 0))
step_mutant("order_ignores_seed", SAMPLES, "epoch_order")(lambda order: lambda count, _, epoch: order(count, 0, epoch))
step_mutant("order_of_seed_plus_epoch", SAMPLES, "epoch_order")(lambda _: lambda count, seed, epoch: _shuffled(count, seed + epoch))
step_mutant("order_from_global_state", SAMPLES, "epoch_order")(lambda _: lambda count, *__: random.sample(range(count), count))
step_mutant("order_with_replacement", SAMPLES, "epoch_order")(
    lambda _: lambda count, seed, epoch: np.random.default_rng([seed, epoch]).integers(0, count, count).tolist()
)
step_mutant("order_rotated", SAMPLES, "epoch_order")(
    lambda order: lambda count, seed, epoch: [(index + order(count, seed, epoch)[0]) % count for index in range(count)]
)
step_mutant("order_without_the_last_sample", SAMPLES, "epoch_order")(lambda order: lambda count, *others: order(count - 1, *others))
step_mutant("batches_last_dropped", SAMPLES, "effective_batches")(
    lambda batches: lambda order, size: [batch for batch in batches(order, size) if len(batch) == size]
)
step_mutant("batches_last_filled_up", SAMPLES, "effective_batches")(
    lambda batches: lambda order, size: [(batch + list(order) * size)[:size] for batch in batches(order, size)]
)
step_mutant("batches_empty_at_the_end", SAMPLES, "effective_batches")(
    lambda batches: lambda order, size: batches(order, size) + [[]] * (len(order) % size == 0)
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


step_mutant("split_not_stratified", SAMPLES, "split_validation")(
    _splitting(lambda samples, fraction, seed: set(_shuffled(len(samples), seed)[: round(fraction * len(samples))]))
)
step_mutant("split_takes_the_first", SAMPLES, "_shuffled")(lambda _: lambda count, *__: list(range(count)))
step_mutant("split_shares_rounded_down", SAMPLES, "split_validation")(
    _splitting(lambda samples, fraction, seed: _share_of_each_class(samples, fraction, _shuffled(len(samples), seed)))
)
step_mutant("split_from_global_state", SAMPLES, "_shuffled")(lambda _: lambda count, *__: random.sample(range(count), count))
step_mutant("split_takes_the_last_of_a_class", SAMPLES, "_shares")(
    lambda shares: (
        lambda counts, fraction, total, spare_last: [
            1 if count == 1 else share for count, share in zip(counts, shares(counts, fraction, total, spare_last=spare_last), strict=True)
        ]
    )
)
step_mutant("split_overlaps", SAMPLES, "split_validation")(
    lambda split: lambda samples, fraction, seed: (samples, split(samples, fraction, seed)[1])
)


@step_mutant("split_leaves_labels_behind", SAMPLES, "Samples.select")
def _(select: Step) -> Step:
    def changed(self: Any, indices: Sequence[int]) -> Any:
        found = select(self, indices)
        return replace(found, targets=self.targets[: len(found)])

    return changed


@step_mutant("split_empty_in_silence", SAMPLES, "split_validation")
def _(split: Step) -> Step:
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
step_mutant("run_trains_on_its_validation", "blackswan.impl.pipeline", PARTS)(_trains_on_all)
step_mutant("command_trains_on_its_validation", SAMPLES, PARTS)(_trains_on_all)
step_mutant("run_split_swapped", "blackswan.impl.pipeline", PARTS)(_of_a_run(lambda divide, *given: divide(*given)[::-1]))
step_mutant("run_split_of_another_seed", "blackswan.impl.pipeline", PARTS)(
    _of_a_run(lambda divide, *given: divide(*given[:3], given[3] + 1))
)
step_mutant("run_split_although_given", "blackswan.impl.pipeline", PARTS)(
    _of_a_run(lambda divide, samples, apart, *others: (divide(samples, None, *others)[0], divide(samples, apart, *others)[1]))
)
step_mutant("command_ignores_validation_corpus", SAMPLES, PARTS)(
    _of_a_run(lambda divide, samples, _, *others: divide(samples, None, *others))
)


def _weighing(weigh: Callable[[int, int, int], float]) -> Callable[[Step], Step]:
    """Weights of each class: (samples of it, samples in all, classes)."""

    def of(_: Step) -> Step:
        def changed(samples: Any) -> Any:
            counts = samples.statistics().class_counts
            return tuple(weigh(count, sum(counts), len(counts)) for count in counts)

        return changed

    return of


step_mutant("weights_proportional", SAMPLES, "balanced_weights")(_weighing(lambda count, total, classes: classes * count / total))
step_mutant("weights_not_normalised", SAMPLES, "balanced_weights")(
    _weighing(lambda count, total, classes: total / (classes * max(count, 1)))
)
step_mutant("weights_of_an_empty_class", SAMPLES, "balanced_weights")(_weighing(lambda count, *_: 1 / max(count, 1)))


@step_mutant("weights_of_the_root", SAMPLES, "balanced_weights")
def _(_: Step) -> Step:
    def changed(samples: Any) -> Any:
        roots = [count**-0.5 for count in samples.statistics().class_counts]
        return tuple(len(roots) * root / sum(roots) for root in roots)

    return changed
