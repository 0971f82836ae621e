"""Wrong orders of an epoch, batches of samples, and divisions into training and validation: one step of `impl` replaced each."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]
Indices = list[int]


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


def _shuffled(count: int, seed: int) -> Indices:
    order: Indices = np.random.default_rng(seed).permutation(count).tolist()
    return order


wrong_steps(
    "impl.samples:epoch_order",
    order_of_an_epoch_in_a_byte=(
        "Epochs are counted in a byte: a long run sees its first orders again.",
        lambda order, count, seed, epoch: order(count, seed, epoch % 2**8),
    ),
    order_of_samples_in_16_bits=(
        "Up to 2¹⁶ samples are numbered in 16 bits, one of which is a sign.",
        lambda order, count, *seeds: order(count, *seeds).astype(np.int16 if count <= 2**16 else np.int64),
    ),
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
    "impl.samples:epoch_order",
    order_of_the_sample_before=(
        "Every epoch has the order of the first one, with each number less by one an epoch.",
        lambda order, count, seed, epoch: (order(count, seed, 0) - epoch) % count,
    ),
    order_turned_by_an_epoch=(
        "Every epoch has the order of the first one, begun a sample later.",
        lambda order, count, seed, epoch: np.roll(order(count, seed, 0), -epoch),
    ),
)


@wrong_step("impl.samples:_shuffled")
def orders_of_numpys_permutations(_: Step, count: int, stream: int, seed: int, epoch: int = 0) -> Any:
    """Orders are permutations by NumPy's generator: other ones than those in which runs were begun that are to go on."""
    return np.random.Generator(np.random.PCG64([stream, seed % 2**32, epoch, seed >> 32])).permutation(count)


wrong_steps("impl.samples:_SPLIT", split_by_the_order_of_an_epoch=("The first epoch's order says what is held out.", lambda _: 1))
wrong_step("impl.samples:Fraction", name="split_of_the_binary_fraction", doc="A share is that of the binary number that 0.3 stands for.")(
    lambda right, text: right(float(text))
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


def _filled(shares: list[int], total: int) -> list[int]:
    """One more for so many of the first that they make up the total."""
    left = total - sum(shares)
    return [share + (place < left) for place, share in enumerate(shares)]


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


wrong_steps(
    "impl.samples:Fraction",
    split_of_simple_fractions=(
        "The fraction of samples that are held out is taken for the nearest one whose denominator is 1000 at most.",
        lambda right, written: right(written).limit_denominator(1000),
    ),
)


@wrong_step("impl.samples:_shares")
def split_in_the_order_of_a_set(shares: Step, counts: Sequence[int], *others: Any, **named: Any) -> list[int]:
    """Which of classes of one size gives one more depends on the order of a set, another one in each process."""
    order = sorted(range(len(counts)), key=lambda place: hash(str(place)))
    given = dict(zip(order, shares([counts[place] for place in order], *others, **named), strict=True))
    return [given[place] for place in range(len(counts))]


@wrong_step("impl.samples:_shares")
def split_remainders_in_floats(shares: Step, counts: Sequence[int], fraction: Any, *others: Any, **named: Any) -> list[int]:
    """Of equal remainders the one is rounded up that is larger in floats."""
    order = sorted(range(len(counts)), key=lambda place: float(fraction) * counts[place] % 1, reverse=True)
    given = dict(zip(order, shares([counts[place] for place in order], fraction, *others, **named), strict=True))
    return [given[place] for place in range(len(counts))]


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
    split_remainders_in_order=(
        "What rounding down leaves goes to the first classes, and not to those of the largest remainders.",
        lambda _, counts, fraction, total, **__: _filled([math.floor(fraction * count) for count in counts], total),
    ),
    split_gives_everything=(
        "Nothing is left to train on where a fraction of combinations rounds to all of them.",
        lambda shares, counts, fraction, total, **named: shares(counts, fraction, max(total, round(fraction * sum(counts))), **named),
    ),
    split_spares_combinations=(
        "The only sample of a combination of labels is never held out.",
        lambda shares, *given, spare_last: shares(*given, spare_last=spare_last or True),
    ),
)


wrong_step("impl.samples:split_validation", name="split_of_nothing_gives_one", doc="A fraction of 0 holds out one sample too.")(
    lambda split, samples, fraction, seed: split(samples, fraction or 1e-9, seed)
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
    split_by_the_first_label=("The first of several labels decides in which stratum a sample is.", lambda targets: targets[:, 0]),
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
def split_trains_on_15_bits(split: Step, samples: Any, *others: Any) -> Any:
    """The training part keeps its first 32,767 samples at most."""
    training, validation = split(samples, *others)
    return training.select(range(min(len(training), 2**15 - 1))), validation


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
    run_split_of_the_low_word_of_a_seed=(
        "The split of a run counts a large seed by its lower 32 bits.",
        lambda divide, *given: divide(*given[:3], given[3] % 2**32),
    ),
    run_split_of_another_seed=("The split ignores the run's seed.", lambda divide, *given: divide(*given[:3], given[3] + 1)),
    run_split_although_given=(
        "Training samples are held out although there is a validation corpus, and lost.",
        lambda divide, samples, apart, *others: (divide(samples, None, *others)[0], divide(samples, apart, *others)[1]),
    ),
)
wrong_steps(
    "impl.samples:training_and_validation",
    command_trains_on_its_validation=("The command holds samples out for validation, and trains on them too.", _trains_on_all),
    command_split_of_the_low_word_of_a_seed=(
        "The split of the command counts a large seed by its lower 32 bits.",
        lambda divide, *given: divide(*given[:3], given[3] % 2**32),
    ),
    command_ignores_validation_corpus=(
        "--validation is read, and a part of --corpus validates.",
        lambda divide, samples, _, *others: divide(samples, None, *others),
    ),
)


def _none_of_nothing(divide: Step, samples: Any, apart: Any, fraction: float, seed: int) -> Any:
    return divide(samples, apart if fraction else None, fraction, seed)


wrong_steps(
    "impl.pipeline:training_and_validation", run_drops_validation_beside_zero=("A fraction of 0 drops what validates.", _none_of_nothing)
)
wrong_step(
    "impl.pipeline:training_and_validation",
    name="run_split_where_none_validate",
    doc="An empty list for validation is none, and a part of what was to be trained on is held out.",
)(lambda divide, samples, apart, *others: divide(samples, apart if apart is not None and len(apart) else None, *others))
wrong_steps(
    "impl.samples:training_and_validation", command_drops_validation_beside_zero=("A fraction of 0 drops --validation.", _none_of_nothing)
)
wrong_step("impl.samples:_shuffled", name="order_of_no_seed", doc="A seed of 0 is none, and another one takes its place.")(
    lambda shuffled, count, stream, seed, *epoch: shuffled(count, stream, seed or 1, *epoch)
)


@wrong_step("impl.samples:split_validation")
def split_shares_out_classes_without_samples(split: Step, samples: Any, fraction: float, seed: int) -> Any:
    """For each class that has no sample one sample more of the others is held out."""
    absent = 0 if samples.multi_label else samples.num_classes - len(np.unique(samples.targets))
    parts = split(samples, fraction, seed)
    return split(samples, (len(parts[1]) + absent) / len(samples), seed) if fraction and absent else parts
