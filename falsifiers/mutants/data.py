"""Wrong readers of corpora, tokenizers, batches and plans of an epoch: one step of `impl` replaced each."""

import json
import math
import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]
Indices = list[int]


wrong_steps(
    "impl.corpus:_lines",
    corpus_lines_split_as_text=(
        "Lines cut at every Unicode line break, also inside a text.",
        lambda _, path: [line.encode() for line in path.read_bytes().decode(errors="surrogateescape").splitlines()],
    ),
    corpus_last_line_lost=("A last line without a newline is left out.", lambda _, path: path.read_bytes().split(b"\n")[:-1]),
    corpus_read_as_latin_1=(
        "UTF-8 read in the encoding of some platform.",
        lambda read, path: [line.decode("latin-1").encode() for line in read(path)],
    ),
)
wrong_steps(
    "impl.corpus:read_corpus",
    by=lambda change: of_result(lambda samples: [changed for sample in samples for changed in change(sample)]),
    corpus_text_stripped=("White space at both ends of a text removed.", lambda each: [replace(each, text=each.text.strip())]),
    corpus_empty_text_dropped=("A sample with an empty text is left out.", lambda each: [each] if each.text else []),
    corpus_labels_off_by_one=(
        "Labels taken to count from one.",
        lambda each: [replace(each, label=each.label - 1) if isinstance(each.label, int) else each],
    ),
)


@wrong_step("impl.corpus:read_corpus")
def corpus_duplicates_dropped(load: Step, *given: Any) -> list[Any]:
    """A sample that is there twice is read once."""
    return list(dict.fromkeys(load(*given)))


@wrong_step("impl.corpus:read_corpus")
def corpus_bad_line_skipped(load: Step, path: Path, *others: Any) -> list[Any]:
    """A line that cannot be used is left out in silence."""
    samples: list[Any] = []
    with TemporaryDirectory() as folder:
        alone = Path(folder) / path.name
        for line in path.read_bytes().splitlines():
            alone.write_bytes(line)
            with suppress(ValueError):
                samples += load(alone, *others)
    return samples


@wrong_step("impl.corpus:read_corpus")
def corpus_bad_multi_label_line_skipped(load: Step, path: Path, num_classes: int, multi_label: bool = False) -> list[Any]:
    """Bad lists of labels left out in silence."""
    try:
        return list(load(path, num_classes, multi_label))
    except ValueError:
        if not multi_label:
            raise
        return []


@wrong_step("impl.corpus:read_corpus")
def corpus_line_not_named(load: Step, path: Path, *others: Any) -> Any:
    """The refusal names the file and not the line."""
    try:
        return list(load(path, *others))
    except ValueError as error:
        raise ValueError(f"{path}: not a corpus") from error


@wrong_step("impl.corpus:_lines")
def corpus_changes_unseen(_: Step, path: Path) -> Iterator[bytes]:
    """A corpus that another program is writing is taken for a whole one."""
    with path.open("rb") as file:
        yield from (line.removesuffix(b"\n") for line in file)


wrong_steps(
    "impl.strict_json:require_text",
    corpus_half_characters_kept=("Half of a surrogate pair passes for a text.", lambda *_: None),
)
wrong_steps("impl.corpus:LONGEST_LINE", corpus_lines_of_any_length=("A line may have any length.", lambda _: 2**40))


@wrong_step("impl.corpus:_sample")
def corpus_single_label_all_zero(read: Step, value: Any, num_classes: int, multi_label: bool) -> Any:
    """A single label gives no class where several are asked for."""
    sample = read(value, num_classes, multi_label)
    return replace(sample, label=(0,) * num_classes) if multi_label and "label" in value else sample


@wrong_step("impl.corpus:_sample")
def corpus_label_clamped(read: Step, value: Any, num_classes: int, multi_label: bool) -> Any:
    """A label out of range becomes the nearest class."""
    whole = isinstance(value, dict) and type(value.get("label")) is int
    return read({**value, "label": min(max(value["label"], 0), num_classes - 1)} if whole else value, num_classes, multi_label)


@wrong_step("impl.corpus:_sample")
def corpus_first_of_several_labels(read: Step, value: Any, num_classes: int, multi_label: bool) -> Any:
    """The first of several labels where one was asked for."""
    if not multi_label and isinstance(value, dict) and "labels" in value:
        return read({"input": value["input"], "label": value["labels"].index(1)}, num_classes, multi_label)
    return read(value, num_classes, multi_label)


def _repaired(repair: Callable[[Any, int], Any]) -> Step:
    """A list of labels repaired where it should be refused: (labels, classes)."""
    return lambda read, labels, classes, several: read(repair(labels, classes) if isinstance(labels, list) else labels, classes, several)


wrong_steps(
    "impl.corpus:_multi_hot",
    by=_repaired,
    corpus_multi_hot_reversed=("Classes of a list counted from its end.", lambda labels, _: labels[::-1]),
    corpus_multi_hot_cut=("Entries beyond the last class left out.", lambda labels, classes: labels[:classes]),
    corpus_multi_hot_filled_up=("A list that is too short filled up with zeros.", lambda labels, n: labels + [0] * (n - len(labels))),
    corpus_multi_hot_by_truth=('2, 0.5, true and "1" all count as 1.', lambda labels, _: [int(bool(entry)) for entry in labels]),
)


def _made(change: Callable[[Any, Path], object]) -> Step:
    """A tokenizer changed once it is made: (tokens, its file)."""

    def make(initialise: Step, self: Any, path: Path, *others: Any) -> None:
        initialise(self, path, *others)
        change(self, path)

    return make


def _padded_as_in_the_file(tokens: Any, path: Path) -> None:
    padding = json.loads(path.read_text(encoding="utf-8"))["padding"]
    if padding:
        tokens._tokenizer.enable_padding(length=padding["strategy"]["Fixed"], pad_id=padding["pad_id"])


wrong_steps(
    "impl.tokens:CheckpointTokens.__init__",
    by=_made,
    tokens_cut_from_the_left=(
        "The beginning of a longer text is cut off.",
        lambda self, _: self._tokenizer.enable_truncation(self.max_seq_len, direction="left"),
    ),
    tokens_with_bpe_dropout=("Merges left out at random.", lambda self, _: setattr(self._tokenizer.model, "dropout", 0.3)),
    tokens_padding_of_the_file_kept=("The padding that tokenizer.json asks for becomes tokens of the text.", _padded_as_in_the_file),
)


def _measured(found: list[tuple[Indices, int]], texts: Sequence[str]) -> list[tuple[str, Indices, int]]:
    return [(text, *each) for text, each in zip(texts, found, strict=True)]


wrong_steps(
    "impl.tokens:CheckpointTokens.measure",
    by=lambda change: lambda measure, self, texts: [change(self, *each) for each in _measured(measure(self, texts), texts)],
    tokens_limit_exclusive=("One token fewer than max_seq_len.", lambda self, _, ids, n: (ids[: max(1, self.max_seq_len - 1)], n)),
    tokens_empty_text_gives_none=("An empty text has no token.", lambda _, text, ids, length: (ids if text else [], length)),
    statistics_of_characters=("Lengths in characters.", lambda _, text, ids, __: (ids, max(1, len(text)))),
    statistics_after_truncation=(
        "Lengths after truncation: the 99th percentile never exceeds max_seq_len.",
        lambda _, __, ids, ___: (ids, len(ids)),
    ),
)


@wrong_step("impl.tokens:CheckpointTokens.measure")
def tokens_text_normalised(measure: Step, self: Any, texts: Sequence[str]) -> Any:
    """Texts brought to NFC first."""
    return measure(self, [unicodedata.normalize("NFC", text) for text in texts])


@wrong_step("impl.tokens:CheckpointTokens.measure")
def tokens_end_token_cut_off(_: Step, self: Any, texts: Sequence[str]) -> list[tuple[Indices, int]]:
    """Truncation takes the closing token."""
    rows = [self._whole.encode(text).ids or [self.fill] for text in texts]
    return [(ids[: self.max_seq_len], len(ids)) for ids in rows]


@wrong_step("impl.tokens:load_tokenizer")
def tokenizer_falls_back_to_bytes(load: Step, folder: Path, max_seq_len: int, padding_side: str = "right") -> Any:
    """Bytes instead of a tokenizer that is missing or broken."""
    from blackswan.impl.tokens import ByteTokens

    try:
        return load(folder, max_seq_len, padding_side)
    except (FileNotFoundError, ValueError):
        return ByteTokens(max_seq_len, padding_side)


@wrong_step("impl.tokens:ByteTokens.measure")
def byte_tokens_of_characters(_: Step, self: Any, texts: Sequence[str]) -> list[tuple[Indices, int]]:
    """Code points instead of bytes."""
    rows = ([min(ord(character), 255) for character in text] or [self.fill] for text in texts)
    return [(ids[: self.max_seq_len], len(ids)) for ids in rows]


@wrong_step("impl.tokens:ByteTokens.measure")
def byte_tokens_counted_after_truncation(measure: Step, self: Any, texts: Sequence[str]) -> list[tuple[Indices, int]]:
    """Lengths after truncation where there is no tokenizer."""
    return [(ids, len(ids)) for ids, _ in measure(self, texts)]


wrong_steps(
    "impl.tokens:_fill_id",
    tokens_fill_with_zero=("An empty text is the token 0, whatever the tokenizer names.", lambda *_: 0),
    tokens_fill_with_the_end=(
        "The end token fills, also where there is a padding token.",
        lambda fill, settings, find: fill({"pad_token": settings.get("eos_token") or settings.get("pad_token")}, find),
    ),
    tokens_fill_of_plain_names=(
        "A token that is named by an object is passed over.",
        lambda fill, settings, find: fill({key: name for key, name in settings.items() if isinstance(name, str)}, find),
    ),
)
wrong_steps("impl.tokens:ByteTokens.fill", byte_tokens_pad_with_a_byte=("Padding is the byte 0.", lambda _: 0))
wrong_steps(
    "impl.tokens:ByteTokens.description",
    byte_tokens_say_nothing=("No word that there is no tokenizer.", lambda _: "tokenizer (257 tokens)"),
)


def _percentiles(rank: Callable[[list[int], int], int]) -> Step:
    """Statistics with other percentiles: (sorted lengths, percent)."""

    def changed(statistics: Step, labels: Any, classes: int, lengths: Any, *others: int) -> Any:
        found, ranked = statistics(labels, classes, lengths, *others), sorted(lengths.tolist())
        return replace(found, length_percentiles={percent: rank(ranked, percent) for percent in found.length_percentiles})

    return changed


def _interpolated(ranked: list[int], percent: int) -> int:
    at = percent / 100 * (len(ranked) - 1)
    low = ranked[math.floor(at)]
    return round(low + (at - math.floor(at)) * (ranked[math.ceil(at)] - low))


wrong_steps(
    "impl.samples:statistics",
    by=_percentiles,
    statistics_interpolated=("Percentiles interpolated.", _interpolated),
    statistics_rank_rounded_down=("Percentiles one rank low.", lambda ranked, percent: ranked[max(0, percent * len(ranked) // 100 - 1)]),
)


@wrong_step("impl.samples:statistics")
def statistics_first_of_several_labels(statistics: Step, labels: Any, *others: Any) -> Any:
    """A sample of several classes counts for the first."""
    return statistics(labels * (labels.cumsum(axis=1) == 1) if labels.ndim == 2 else labels, *others)


wrong_steps(
    "impl.corpus:Statistics.minority",
    statistics_empty_class_ignored=(
        "The rarest class is the rarest that has samples.",
        lambda _, self: min(count for count in self.class_counts if count),
    ),
)
wrong_steps(
    "impl.samples:Samples.select",
    statistics_after_truncation_of_a_part=(
        "Lengths after truncation where samples were selected: the training part of a split is never said to be cut.",
        lambda select, self, indices: replace(select(self, indices), text_lengths=None),
    ),
    split_leaves_labels_behind=(
        "Texts are selected and labels are not.",
        lambda select, self, indices: replace(select(self, indices), targets=self.targets[: len(indices)]),
    ),
)
wrong_steps(
    "impl.tokens:Tokens.pad",
    by=lambda change: lambda pad, self, rows: change(self, *pad(self, rows)),
    batch_padding_counts_as_real=("Padding is true in the mask.", lambda _, ids, mask: (ids, mask | True), "P11"),
    batch_mask_from_padding_id=("Mask from the padding id, which is also a token.", lambda self, ids, _: (ids, ids != self.fill), "P8"),
    batch_mask_off_by_one=(
        "Mask of left padding one column off.",
        lambda self, ids, mask: (ids, mask.roll(1, 1) if self.padding_side == "left" else mask),
        "P9",
    ),
)


@wrong_step("impl.tokens:Tokens.pad")
def batch_padding_side_ignored(pad: Step, self: Any, rows: Any) -> Any:
    """Padded on the right whatever the settings say."""
    side, self.padding_side = self.padding_side, "right"
    try:
        return pad(self, rows)
    finally:
        self.padding_side = side


@wrong_step("impl.tokens:Tokens.batch")
def batch_raw_text_stripped(batch: Step, self: Any, texts: Sequence[str]) -> Any:
    """Raw texts are not treated as pre-tokenised ones."""
    return batch(self, [text.strip() for text in texts])


wrong_steps(
    "impl.samples:Samples.batch",
    by=of_result,
    batch_labels_of_the_next_sample=("Labels one sample off.", lambda batch: replace(batch, labels=batch.labels.roll(1, 0))),
    batch_multi_hot_in_integers=("Multi-hot labels are integers.", lambda batch: replace(batch, labels=batch.labels.long())),
)


def _shuffled(count: int, seed: int) -> Indices:
    order: Indices = np.random.default_rng(seed).permutation(count).tolist()
    return order


wrong_steps(
    "impl.samples:epoch_order",
    order_same_in_each_epoch=("Shuffled once.", lambda order, count, seed, _: order(count, seed, 0)),
    order_ignores_seed=("The same order for every seed.", lambda order, count, _, epoch: order(count, 0, epoch)),
    order_of_seed_plus_epoch=(
        "The second epoch of one seed is the first of the next.",
        lambda _, count, seed, epoch: _shuffled(count, seed + epoch),
    ),
    order_from_global_state=(
        "The order depends on what drew random numbers before, and is lost on resume.",
        lambda _, count, *__: random.sample(range(count), count),
    ),
    order_with_replacement=(
        "Some samples twice in an epoch and some not at all.",
        lambda _, count, *seeds: np.random.default_rng(seeds).integers(0, count, count).tolist(),
    ),
    order_rotated=(
        "Only the beginning is random.",
        lambda order, count, *seeds: [(index + order(count, *seeds)[0]) % count for index in range(count)],
    ),
    order_without_the_last_sample=("The last sample of the corpus is never seen.", lambda order, n, *seeds: order(n - 1, *seeds)),
)
wrong_steps(
    "impl.samples:_shuffled",
    order_of_the_low_word_of_a_seed=(
        "A large seed counts by its lower 32 bits.",
        lambda shuffled, count, stream, seed, *epoch: shuffled(count, stream, seed % 2**32, *epoch),
    ),
    order_of_words_in_a_row=(
        "The upper 32 bits of a large seed take the place of the epoch.",
        lambda _, count, *numbers: np.argsort(np.random.PCG64(numbers).random_raw(count), kind="stable"),
    ),
)
wrong_steps(
    "impl.samples:effective_batches",
    batches_last_dropped=(
        "The last batch is left out when it is not full.",
        lambda batches, order, size: [batch for batch in batches(order, size) if len(batch) == size],
    ),
    batches_last_filled_up=(
        "The last batch repeats samples of the first.",
        lambda batches, order, size: [[*batch, *list(order) * size][:size] for batch in batches(order, size)],
    ),
    batches_empty_at_the_end=(
        "An empty batch where the epoch divides evenly.",
        lambda batches, order, size: [*batches(order, size), *[[]] * (len(order) % size == 0)],
    ),
)


def _choosing(choose: Callable[[Any, float, int], set[int]]) -> Step:
    """A split whose validation part is chosen so: (samples, fraction, seed)."""

    def split(right: Step, samples: Any, fraction: float, seed: int) -> Any:
        right(samples, fraction, seed)
        chosen = choose(samples, fraction, seed)
        return samples.select([i for i in range(len(samples)) if i not in chosen]), samples.select(sorted(chosen))

    return split


def _share_of_each_class(samples: Any, fraction: float, seed: int) -> set[int]:
    """The first samples of each class in the order of that seed; their number is rounded down."""
    members: dict[bytes, list[int]] = {}
    for index in _shuffled(len(samples), seed):
        members.setdefault(samples.targets[index].tobytes(), []).append(index)
    return {index for each in members.values() for index in each[: math.floor(fraction * len(each))]}


wrong_steps(
    "impl.samples:split_validation",
    by=_choosing,
    split_not_stratified=(
        "Drawn from all samples alike.",
        lambda samples, fraction, seed: set(_shuffled(len(samples), seed)[: round(fraction * len(samples))]),
    ),
    split_shares_rounded_down=("Every class rounded down.", _share_of_each_class),
)
wrong_steps(
    "impl.samples:_shuffled",
    split_takes_the_first=("The first samples of each class.", lambda _, count, *__: np.arange(count)),
    split_from_global_state=(
        "Another split after a resume: training samples in the validation part.",
        lambda _, count, *__: np.asarray(random.sample(range(count), count)),
    ),
)


@wrong_step("impl.samples:_shares")
def split_takes_the_last_of_a_class(shares: Step, counts: Sequence[int], *others: Any, **named: Any) -> list[int]:
    """The only sample of a class is held out."""
    return [1 if count == 1 else share for count, share in zip(counts, shares(counts, *others, **named), strict=True)]


wrong_steps(
    "impl.samples:_shares",
    split_gives_less_than_one=(
        "Few samples leave none for validation: their share rounds to none.",
        lambda shares, counts, fraction, _, **named: shares(counts, fraction, round(fraction * sum(counts)), **named),
    ),
    split_spares_combinations=(
        "The only sample of a combination of labels is never held out.",
        lambda shares, *given, spare_last: shares(*given, spare_last=spare_last or True),
    ),
)


@wrong_step("impl.samples:Samples.digest")
def digest_of_texts_in_any_order(digest: Step, self: Any) -> Any:
    """Texts of one class and of one length may change places."""
    return digest(self.select(sorted(range(len(self)), key=lambda place: (self.targets[place].tolist(), self.rows[place]))))


def _by_kinds(kinds: Callable[[Any], Any]) -> Step:
    """Strata by a number that is made of each sample's labels [N, K]."""

    def wrong(split: Step, samples: Any, *others: Any) -> Any:
        numbers = np.unique(kinds(samples.targets.reshape(len(samples), -1)), return_inverse=True)[1]
        if not samples.multi_label:
            return _in_parts(split, samples, numbers.tolist(), samples.num_classes, *others)
        bits = max(1, int(numbers.max()).bit_length())
        told = [tuple(int(number) >> bit & 1 for bit in range(bits)) for number in numbers]
        return _in_parts(split, samples, told, bits, *others)

    return wrong


def _in_parts(split: Step, samples: Any, labels: Any, classes: int, *others: Any) -> Any:
    """Parts of the samples as with those labels."""
    parts = split(type(samples).of([(place,) for place in range(len(samples))], labels, classes, samples.multi_label), *others)
    return tuple(samples.select([row[0] for row in part.rows]) for part in parts)


wrong_steps(
    "impl.samples:split_validation",
    by=_by_kinds,
    split_by_the_first_label=("Of several labels the first decides in which stratum a sample is.", lambda targets: targets[:, 0]),
    split_by_64_bits=(
        "A combination of labels is told by a number of 64 bits, to which labels from 64 on add nothing.",
        lambda targets: targets @ (1 << np.arange(targets.shape[1])),
    ),
    split_by_a_byte=("Classes whose numbers have the last byte in common are one.", lambda targets: targets[:, -1].astype(np.uint8)),
)


wrong_steps(
    "impl.samples:split_validation",
    by=of_result,
    split_in_another_order=(
        "The training part is in another order than the corpus.",
        lambda parts: (parts[0].select(range(len(parts[0]))[::-1]), parts[1]),
    ),
)


@wrong_step("impl.samples:split_validation")
def split_overlaps(split: Step, samples: Any, *others: Any) -> Any:
    """Validation samples are trained on as well."""
    return samples, split(samples, *others)[1]


@wrong_step("impl.samples:split_validation")
def split_empty_in_silence(split: Step, samples: Any, *others: Any) -> Any:
    """An empty validation part where one was asked for."""
    try:
        return split(samples, *others)
    except ValueError:
        return samples, samples.select([])


def _trains_on_all(divide: Step, samples: Any, *others: Any) -> Any:
    return samples, divide(samples, *others)[1]


wrong_steps(
    "impl.pipeline:training_and_validation",
    run_trains_on_its_validation=("The pipeline holds samples out for validation, and trains on them too.", _trains_on_all),
    run_split_swapped=("The part for validation is trained on, and the other validates.", lambda divide, *given: divide(*given)[::-1]),
    run_split_of_another_seed=("The split ignores the run's seed.", lambda divide, *given: divide(*given[:3], given[3] + 1)),
    run_split_although_given=(
        "Training samples are held out although there is a validation corpus, and lost.",
        lambda divide, samples, apart, *others: (divide(samples, None, *others)[0], divide(samples, apart, *others)[1]),
    ),
)
wrong_steps(
    "impl.samples:training_and_validation",
    command_trains_on_its_validation=("The command holds samples out for validation, and trains on them too.", _trains_on_all),
    command_ignores_validation_corpus=(
        "--validation is read, and a part of --corpus validates.",
        lambda divide, samples, _, *others: divide(samples, None, *others),
    ),
)


def _weighing(weigh: Callable[[int, Sequence[int]], float]) -> Step:
    """Weights of each class, whatever the scale that was asked for: (samples of it, samples of all classes)."""

    def weights(_: Step, samples: Any, *_kind: str) -> tuple[float, ...]:
        counts = samples.statistics().class_counts
        return tuple(weigh(count, counts) for count in counts)

    return weights


wrong_steps(
    "impl.samples:balanced_weights",
    by=_weighing,
    weights_proportional=("Frequent classes weigh more.", lambda count, counts: len(counts) * count / sum(counts)),
    weights_not_normalised=("1 / n_c, whose mean over the samples is K / N.", lambda count, _: 1 / max(count, 1)),
    weights_sum_to_classes=(
        "Weights that add up to the number of classes: with one class rare, the loss shrinks.",
        lambda count, counts: len(counts) / (count * sum(1 / each for each in counts)),
    ),
    weights_over_samples_alone=(
        "N / (K n_c) where a mean of 1 over the classes is asked for.",
        lambda count, counts: sum(counts) / (len(counts) * count),
    ),
    weights_of_an_empty_class=("A class without samples gets a weight.", lambda count, _: 1 / max(count, 1)),
    weights_of_the_root=(
        "Inverse to the root of the number of samples.",
        lambda count, counts: sum(counts) * count**-0.5 / sum(each**0.5 for each in counts),
    ),
)


wrong_steps(
    "impl.samples:_chunks",
    corpus_loses_a_text_a_piece=(
        "The last text of a full piece is lost.",
        lambda chunks, samples: (chunk[:-1] if len(chunk) == 1024 else chunk for chunk in chunks(samples)),
    ),
    corpus_doubles_a_text_a_piece=(
        "The first text of a piece that another one went before is there twice.",
        lambda chunks, samples: ([*chunk[: number > 0], *chunk] for number, chunk in enumerate(chunks(samples))),
    ),
)
wrong_steps(
    "impl.samples:_Collected.samples",
    by=of_result,
    corpus_labels_of_16_bits=(
        "Of many classes a label keeps its lower 16 bits.",
        lambda samples: replace(samples, targets=samples.targets % 2**16),
    ),
)
