"""Wrong readers of corpora, and wrong counts and class weights of their samples: one step of `impl` replaced each."""

import math
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl import strict_json

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
    corpus_text_without_nulls=("A NUL in a text is left out.", lambda each: [replace(each, text=each.text.replace("\0", ""))]),
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


@wrong_step("impl.corpus:_lines")
def corpus_changes_by_being_read(lines: Step, path: Path) -> Iterator[bytes]:
    """All that the system says of a corpus has to stay as it was, the time of its last reading too."""
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        yield from lines(path)
        if stat.S_ISREG(before.st_mode) and os.fstat(file.fileno()) != before:
            raise ValueError(f"{path}: changed while it was read; wait until it is written, and start again")


@wrong_step("impl.corpus:_lines")
def corpus_looked_at_by_its_name(lines: Step, path: Path) -> Iterator[bytes]:
    """The size is asked of the file that has the corpus' name by then, and not of the one that was read."""
    before = path.stat()
    yield from lines(path)
    if stat.S_ISREG(before.st_mode) and not (path.exists() and path.stat().st_size == before.st_size):
        raise ValueError(f"{path}: changed while it was read; wait until it is written, and start again")


@wrong_step("impl.corpus:_lines")
def corpus_changed_in_seconds(_: Step, path: Path) -> Iterator[bytes]:
    """The time of a corpus' last change is compared in whole seconds."""
    with path.open("rb") as file:
        before = path.stat()
        yield from (line.removesuffix(b"\n") for line in file)
    if (path.stat().st_size, int(path.stat().st_mtime)) != (before.st_size, int(before.st_mtime)):
        raise ValueError(f"{path}: changed while it was read")


wrong_steps(
    "impl.strict_json:require_text",
    corpus_half_characters_kept=("Half of a surrogate pair passes for a text.", lambda *_: None),
)


@wrong_step("impl.corpus:read_corpus")
def corpus_half_characters_kept_in_capitals(read: Any, path: Path, *given: Any) -> Iterator[Any]:
    """Half of a surrogate pair is looked for in small letters alone."""
    halves = mock.patch.object(strict_json, "require_text") if b"\\ud" not in path.read_bytes() else nullcontext()
    with halves:
        yield from read(path, *given)


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


@wrong_step("impl.corpus:_sample")
def corpus_labels_of_32_bits(sample: Step, value: Any, *others: Any) -> Any:
    """A label is looked at as the 32 bits that are stored: 2³² + 1 is class 1."""
    if isinstance(value, dict) and type(label := value.get("label")) is int:
        value = {**value, "label": (label + 2**31) % 2**32 - 2**31}
    return sample(value, *others)


wrong_steps(
    "impl.corpus:_multi_hot",
    by=_repaired,
    corpus_multi_hot_reversed=("Classes of a list counted from its end.", lambda labels, _: labels[::-1]),
    corpus_multi_hot_cut=("Entries beyond the last class left out.", lambda labels, classes: labels[:classes]),
    corpus_multi_hot_filled_up=("A list that is too short filled up with zeros.", lambda labels, n: labels + [0] * (n - len(labels))),
    corpus_multi_hot_of_a_byte=(
        "Entries of a list are looked at as bytes: 257 is 1.",
        lambda labels, _: [entry % 2**8 if type(entry) is int else entry for entry in labels],
    ),
    corpus_multi_hot_by_truth=('2, 0.5, true and "1" all count as 1.', lambda labels, _: [int(bool(entry)) for entry in labels]),
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
def statistics_of_the_first_lengths(statistics: Step, labels: Any, classes: int, lengths: Any, *others: int) -> Any:
    """Percentiles are those of the first 2¹⁶ texts, where there are more."""
    return statistics(labels, classes, np.resize(lengths[: 2**16], len(lengths)), *others)


@wrong_step("impl.samples:Samples.statistics")
def statistics_of_labels_before(statistics: Step, samples: Any) -> Any:
    """Statistics that were asked for once are told again, whatever became of the labels."""
    return vars(samples).setdefault("_said", None) or vars(samples).update(_said=statistics(samples)) or vars(samples)["_said"]


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


def _counted_in(bits: int) -> Any:
    """Weights by numbers of samples that wrap; a class with none keeps its number."""

    def weights(balanced: Any, samples: Any, kind: str) -> Any:
        said = samples.statistics()
        counts = tuple(count % 2**bits or count for count in said.class_counts)
        return balanced(SimpleNamespace(statistics=lambda: replace(said, class_counts=counts)), kind)

    return weights


wrong_steps(
    "impl.samples:balanced_weights",
    weights_of_counts_in_a_byte=("The samples of a class are counted in a byte.", _counted_in(8)),
    weights_of_counts_in_16_bits=("The samples of a class are counted in 16 bits.", _counted_in(16)),
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
        "A label keeps only its lower 16 bits.",
        lambda samples: replace(samples, targets=samples.targets % 2**16),
    ),
    corpus_lengths_of_16_bits=(
        "The length of a text that was cut keeps only its lower 16 bits.",
        lambda samples: replace(samples, text_lengths=samples.text_lengths % 2**16),
    ),
)
wrong_step("impl.samples:_IdsOnDisk.__getitem__", name="corpus_within_4_gib", doc="The place of a sample on the disk has 32 bits.")(
    lambda getitem, ids, span: getitem(ids, slice(span.start % 2**30, span.start % 2**30 + span.stop - span.start))
)


wrong_steps(
    "impl.samples:_CHUNK_CHARACTERS",
    corpus_of_long_texts_at_once=("A thousand texts are tokenised at once, however long, in any memory.", lambda _: 2**62),
)


@wrong_step("impl.samples:_IdsOnDisk.__getitem__")
def corpus_read_from_where_its_file_stands(_: Any, ids: Any, span: slice) -> Any:
    """The file of token ids is told where to be read and then read, which a process that has it too may have told otherwise meanwhile."""
    found = array("I")
    ids._file.seek(found.itemsize * span.start)
    found.frombytes(ids._file.read(found.itemsize * (span.stop - span.start)))
    return found


wrong_step("impl.samples:_IdsOnDisk.extend", name="corpus_ids_by_one_call", doc="What a call of write does not take of the ids is lost.")(
    lambda _, ids, more: ids._file.write(memoryview(more.tobytes()))
)
wrong_step(
    "impl.samples:_IdsOnDisk.extend", name="corpus_ids_without_room_unnamed", doc="A full disk is not named with what it was to hold."
)(lambda _, ids, more: [ids._file.write(each.to_bytes(4, "little")) for each in more])


@wrong_step("impl.samples:_IdsOnDisk.__getitem__")
def corpus_ids_lost_unseen(getitem: Any, ids: Any, span: slice) -> Any:
    """Ids that the disk does not give any more are 0."""
    try:
        return getitem(ids, span)
    except OSError:
        return array("I", [0] * (span.stop - span.start))


wrong_step("impl.samples:Rows.__getitem__", name="corpus_ids_of_16_bits", doc="A token id keeps only its lower 16 bits.")(
    lambda getitem, rows, index: [token % 2**16 for token in getitem(rows, index)]
)
wrong_step(
    "impl.samples:statistics", name="statistics_of_a_byte", doc="Samples of a class are counted in the byte that a label is kept in."
)(
    lambda statistics, labels, *others: replace(
        right := statistics(labels, *others),
        class_counts=tuple(count % 256 for count in right.class_counts) if labels.ndim == 2 else right.class_counts,
    )
)


wrong_step("impl.samples:statistics", name="statistics_of_16_bits", doc="Samples of a class, one of several, are counted in 16 bits.")(
    lambda statistics, labels, *others: replace(
        right := statistics(labels, *others),
        class_counts=tuple(count % 2**16 for count in right.class_counts) if labels.ndim == 2 else right.class_counts,
    )
)


@wrong_step("impl.samples:_Collected.samples")
def labels_of_one_sample_in_a_row(samples: Step, self: Any) -> Any:
    """The labels of a corpus of one sample lose the axis of the samples."""
    found = samples(self)
    return replace(found, targets=found.targets.squeeze()) if found.multi_label else found


@wrong_step("impl.corpus:lines_of")
def corpus_of_one_line_read_whole(lines_of: Callable[..., Any], file: Any, name: str) -> Iterator[bytes]:
    """Of a file without line ends all is in memory before it is refused."""
    held = (whole := file.read()), whole.decode("latin-1")
    file.seek(0)
    yield from lines_of(file, name)
    del held
