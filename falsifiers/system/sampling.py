"""Which samples come when: order of an epoch, effective batches, the validation part; and the weights of their classes."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from math import gcd

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_at_most, value_inside
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial

EARLIER_ORDERS = {(8, 3, 2): [6, 7, 2, 0, 3, 5, 1, 4], (8, 2**40 + 3, 2): [6, 4, 5, 2, 3, 0, 7, 1]}
"""Orders of so many samples, by seed and epoch, in which runs were begun that a later version has to go on with."""
EARLIER_SPLIT = [5, 10, 11, 12, 15, 19]
"""The quarter of 24 samples, of three classes in turn, that is held out by the seed 5."""
SIZES = (6, 6, 7, 9, 11, 13) * 4
EARLIER_SPLIT_OF_MANY = [15, 21, 30, 47, 60, 65, 77, 84, 101, 107, 113, 121, 124, 139, 143, 156, 165, 171, 177, 192, 205]
"""The tenth of classes of those sizes, one after the other, that is held out by the seed 5; some come equally near to a sample more."""
EARLIER_TIES = {5: [1, 6], 7: [2, 5]}
"""So many are held out by each seed as the tenth of two classes of 14 and of 54 samples, whose remainders are one, and two in floats."""


def epochs_are_permutations(trial: Trial) -> Iterator[Comparison]:
    """Each of several epochs of several seeds, near and far, is a permutation, the same when asked again, unlike all others, and mixed.

    Mixed: neighbours that stay neighbours are as rare as in a random permutation, where their number has mean 2 and exceeds 16
    once in 10¹⁰ times. So are places at which two epochs differ by one number, and samples that are as many places later, whose number
    has mean 1.
    """
    rng = trial.rng("order")
    count, seed = int(rng.integers(50, 200)), int(rng.integers(2, 2**31))
    orders = []
    for run in (0, 1, seed, seed + 1, seed + 2**32, 2**62 + seed, 2**62 + seed + 1):  # no 32 bits, and no float64, hold all of them
        first = np.asarray(trial.corpora.epoch_order(count, run, 0))
        for epoch in (0, 1, 2, 2**8, 2**16):  # no byte, and no 16 bits, hold all of them
            order, again = (trial.corpora.epoch_order(count, run, epoch) for _ in range(2))
            yield from same(f"order of epoch {epoch}, sorted", [*range(count)], sorted(order))
            yield from same(f"order of epoch {epoch}, again", order, again)
            yield value_inside(f"neighbours kept in epoch {epoch}", int(np.sum(np.abs(np.diff(order)) == 1)), 0, 16)
            orders.append(tuple(order))
            if epoch:
                for what, pair in {"samples": (first, order), "places": (np.argsort(first), np.argsort(order))}.items():
                    alike = np.bincount((np.asarray(pair[1]) - pair[0]) % count).max()
                    yield value_inside(f"{what} that differ alike from epoch 0 to {epoch}", int(alike), 0, 16)
    for many in (int(rng.integers(2**15 + 1, 2**16)), int(rng.integers(2**16 + 1, 2**17))):  # more than 15 and than 16 bits count
        yield from same(f"order of {many} samples, sorted", np.arange(many), np.sort(trial.corpora.epoch_order(many, seed, 0)))
    for given, earlier in EARLIER_ORDERS.items():
        yield from same(f"order of {given} by earlier versions", earlier, trial.corpora.epoch_order(*given))
    repeated = len(orders) - len(set(orders))
    yield value_at_most("epochs in the order of another one or of another seed", repeated, 0)


def effective_batches_are_complete(trial: Trial) -> Iterator[Comparison]:
    """Batches in a row are the epoch's order; all but the last are full, and none is empty."""
    rng = trial.rng("batches")
    size = int(rng.integers(1, 20))
    for count in (size * int(rng.integers(1, 5)), int(rng.integers(1, 100)), max(1, size - 1)):
        order = trial.corpora.epoch_order(count, trial.seed, 0)
        batches = trial.corpora.effective_batches(order, size)
        sizes = [min(size, count - start) for start in range(0, count, size)]
        batched = [index for batch in batches for index in batch]
        yield from same("samples of each batch", sizes, [len(batch) for batch in batches])
        yield from same("batches in a row", order, batched)
        yield from same("samples of the epoch", [*range(count)], sorted(batched))


MANY_LABELS, MANY_CLASSES = (65, 200), (2000, 4000)
"""From … to below: numbers of labels a sample, of which no 64 bits hold a combination; and of classes, of which no byte holds one."""
WRITTEN_FRACTIONS = 30
"""So many fractions of two digits are asked about beside the usual ones."""
FINE_FRACTIONS = 6
"""So many of three or four digits, of more samples."""


def split_is_stratified(trial: Trial) -> Iterator[Comparison]:
    """Two parts, disjoint and complete, in the order of the corpus, labels with their samples; each class gives its share up to rounding
    and never its last sample; of several labels each combination its share. The largest remainders are rounded up. Few samples give one.

    The same when asked again; another with another seed, near or far.
    """
    rng = trial.rng("split")
    several = bool(trial.seed % 2)
    classes, seed, fraction = int(rng.integers(2, 6)), int(rng.integers(0, 2**31)), int(rng.integers(3, 60)) / 100
    strata = np.concatenate([np.full(int(rng.integers(25, 60)), kind) for kind in range(classes)] + [[classes] * (1 + several)])
    if rng.random() < 0.5:
        rng.shuffle(strata)
    kinds = np.asarray([int(each) for each in rng.permutation(8)])[: classes + 1]  # combinations of three labels
    labels: list[Label] = [[int(kinds[each]) >> bit & 1 for bit in range(3)] if several else int(each) for each in strata]
    width = 3 if several else classes + 1 + int(rng.integers(0, 4))  # some classes have no sample
    ask = partial(trial.corpora.split, labels, width, fraction)
    parts, again, *others = (ask(number) for number in (seed, seed, seed + 1, seed + 2**32))
    training, chosen = parts.training, parts.validation
    yield from same("training part in the order of the corpus", sorted({*range(len(labels))} - {*chosen}), training)
    yield from same("validation part in the order of the corpus", sorted({*chosen}), chosen)
    yield from same("validation, again", chosen, again.validation)
    as_numpy = trial.corpora.split(labels, width, np.float64(fraction), seed)
    yield from same("validation by a fraction of NumPy's", chosen, as_numpy.validation)
    known = trial.corpora.parts_known_by_their_samples(labels, width, fraction, seed)
    yield from same("parts that a run knows by their samples alone", [True, True], known)
    yield from same("training labels", [labels[place] for place in training], parts.training_labels)
    yield from same("validation labels", [labels[place] for place in chosen], parts.validation_labels)
    yield value_at_most("validations like that of another seed", sum(chosen == each.validation for each in others), 0)
    yield value_inside("share of the samples", len(chosen), fraction * len(labels) - 0.5, fraction * len(labels) + 0.5)
    exact = Fraction(fraction).limit_denominator(100)
    down, up = [Fraction(0)], [Fraction(1)]
    for kind in range(classes + 1):
        share, taken = exact * int(np.sum(strata == kind)), int(np.sum(strata[chosen] == kind))
        off = max(0, share.__floor__() - taken, taken - share.__ceil__())
        yield value_at_most(f"samples of class {kind} beyond its share, or short of it", off, 0)
        if kind < classes:  # the last one has too few to be rounded either way
            (up if taken > share else down).append(share % 1)
    over = max(0.0, float(max(down) - min(up)))
    yield value_at_most("largest remainder rounded down, less the smallest rounded up", over, 0.0)
    last = 0 if several else int(np.sum(strata[chosen] == classes))
    yield value_at_most("classes without a training sample", last, 0)
    yield from same("validation by earlier versions", EARLIER_SPLIT, trial.corpora.split([0, 1, 2] * 8, 3, 0.25, 5).validation)
    many = [number for number, size in enumerate(SIZES) for _ in range(size)]
    kept = trial.corpora.split(many, len(SIZES), 0.1, 5).validation
    yield from same("validation of many classes by earlier versions", EARLIER_SPLIT_OF_MANY, kept)
    ties = {number: trial.corpora.split([0] * 14 + [1] * 54, 2, 0.1, number).validation_labels for number in EARLIER_TIES}
    counts = {number: [held.count(kind) for kind in (0, 1)] for number, held in ties.items()}
    yield from same("samples of two classes of one remainder by earlier versions", EARLIER_TIES, counts)
    yield from _of_few_samples(trial, classes, seed)
    yield from _of_written_fractions(trial, rng)
    yield from _of_many(trial, rng, exact)
    if trial.seed % 3 == 0:
        yield from _of_a_large_class(trial, rng, exact)
    yield from _of_no_order(trial, seed)


def _of_a_large_class(trial: Trial, rng: Generator, fraction: Fraction) -> Iterator[Comparison]:
    """A class of more samples than 16 bits count, beside a small one, has its share."""
    sizes = int(rng.integers(2**16 + 1, 2**16 + 2**10)), 100
    parts = trial.corpora.split([0] * sizes[0] + [1] * sizes[1], 2, float(fraction), trial.seed)
    yield from same(f"parts of {sizes}, together", np.arange(sum(sizes)), np.sort([*parts.training, *parts.validation]))
    for kind, size in enumerate(sizes):
        taken, share = parts.validation_labels.count(kind), fraction * size
        yield value_inside(f"samples of class {kind} of {sizes} that are held out", taken, share.__floor__(), share.__ceil__())


def _of_no_order(trial: Trial, seed: int) -> list[Comparison]:
    """No epoch of the run's seed begins or ends with the samples that were held out: the draws of the one are not those of the other."""
    count, share = 60, 0.25
    chosen = sorted(trial.corpora.split([0] * count, 2, share, seed).validation)
    orders = [trial.corpora.epoch_order(count, seed, epoch) for epoch in range(4)]
    ends = [sorted(end) for order in orders for end in (order[: len(chosen)], order[-len(chosen) :])]
    return same("samples held out as the ends of epochs have them", [], [end for end in ends if end == chosen])


def _of_written_fractions(trial: Trial, rng: Generator) -> list[Comparison]:
    """A fraction is the decimal number as it is written: of samples of which it is a whole number, or ends on a half, so many are held out,
    a half to the even number, although the binary number that stands for it is below or above it.
    """
    found = []
    shares = [(each, 100) for each in (7, 15, 30, 35, 55, 70, *rng.integers(3, 98, WRITTEN_FRACTIONS).tolist())]
    shares += [(2 * each + 1, 2000) for each in rng.integers(100, 900, FINE_FRACTIONS).tolist()]
    for share, parts_in_all in shares:
        exact, step = Fraction(share, parts_in_all), parts_in_all // 2 // gcd(share, parts_in_all // 2)
        count = step * int(rng.integers(max(1, -(-8 // step)), 8 + 60 // step))
        first = int(rng.integers(3, count - 3))
        sizes = (first, count - first)
        parts = trial.corpora.split([0] * first + [1] * sizes[1], 2, float(exact), trial.seed)
        taken = [parts.validation_labels.count(kind) for kind in (0, 1)]
        name = f"{float(exact)} of {sizes}"
        room = sum(min((exact * size).__ceil__(), size - 1) for size in sizes)
        found += same(f"samples held out, {name}", min(max(1, round(exact * count)), room), sum(taken))
        off = [kind for kind, size in enumerate(sizes) if not (exact * size).__floor__() <= taken[kind] <= (exact * size).__ceil__()]
        found += same(f"classes that have not their share, {name}", [], off)
    return found


def _of_many(trial: Trial, rng: Generator, fraction: Fraction) -> list[Comparison]:
    """Of several thousand classes each has its share; or of more labels than a machine's number has bits each combination, also of those
    that one label tells apart, wherever it stands among them. They have equal claims to what rounding leaves, and another process, whose
    sets have another order, holds out the same samples.
    """
    several = trial.seed % 2 == 1
    width = int(rng.integers(*(MANY_LABELS if several else MANY_CLASSES)))
    common = (rng.random(width) < 0.5).astype(int).tolist()
    turned = [None, *sorted({0, width - 1, *rng.integers(0, width, 16).tolist()})]
    kinds = [[bit ^ (place == at) for place, bit in enumerate(common)] for at in turned] if several else [*range(width)]
    labels: list[Label] = [kinds[each] for each in rng.permutation(np.arange(len(kinds)).repeat(7 if several else 3))]
    given = (labels, width, float(fraction), trial.seed)
    parts = trial.corpora.split(*given)
    sizes, taken = (Counter(map(str, each)) for each in (labels, parts.validation_labels))
    off = [kind for kind, size in sizes.items() if not (fraction * size).__floor__() <= taken[kind] <= (fraction * size).__ceil__()]
    found = same("kinds among many that have not their share, and kinds that were none", (0, 0), (len(off), len(taken.keys() - sizes)))
    if trial.seed % 8 > 1:  # a process takes time: once for single and once for several labels
        return found
    return found + same("validation of many, by another process", parts.validation, trial.corpora.elsewhere("split", *given).validation)


def _of_few_samples(trial: Trial, classes: int, seed: int) -> list[Comparison]:
    """A share of 0 holds out no sample, one of less than half a sample one, and one of nearly all samples leaves one to train on.

    Where each sample has one class, training keeps a sample of each class. With several labels a sample, the last one that has a
    combination of labels may be held out.
    """
    few: dict[str, tuple[list[Label], int, dict[float, int]]] = {
        "few samples": ([place % classes for place in range(2 * classes)], classes, {0.0: 0, 0.04: 1, 0.97: classes}),
        "few combinations": ([[1, 0, 0], [0, 1, 0], [0, 0, 1]], 3, {0.0: 0, 0.04: 1, 0.97: 2}),
    }
    found = []
    for name, labels, width, share, count in ((name, *given[:2], *each) for name, given in few.items() for each in given[2].items()):
        parts = trial.corpora.split(labels, width, share, seed)
        found += same(f"samples held out of {name}", count, len(parts.validation))
        found += same(f"both parts of {name}", [*range(len(labels))], sorted(parts.training + parts.validation))
    return found


def refuses_split(trial: Trial) -> list[Comparison]:
    """A fraction outside 0 … 1 is refused, and so are samples too few to give one."""
    bad: dict[str, tuple[list[Label], float, str]] = {
        "fraction 1": ([0, 1] * 20, 1.0, "validation_fraction"),
        "fraction above 1": ([0, 1] * 20, 20.0, "validation_fraction"),
        "negative fraction": ([0, 1] * 20, -0.1, "validation_fraction"),
        "no number": ([0, 1] * 20, float("nan"), "validation_fraction"),
        "one sample a class": ([0, 1, 2], 0.5, "none for validation"),
        "one sample": ([0], 0.1, "none for validation"),
    }
    return [
        trial.refuses(name, partial(trial.corpora.split, labels, 3, fraction, trial.seed), message, "ValueError")
        for name, (labels, fraction, message) in bad.items()
    ]


FEW_BITS = (2**8, 2**16)
"""Samples of a class, of which a byte, or 16 bits, do not hold the number."""


def balanced_weights_are_inverse(trial: Trial) -> Iterator[Comparison]:
    """Each weight is N / (K n_c) in float64 and their mean over the labels 1; over classes, K n_c⁻¹ / Σ n⁻¹, whose mean is 1.

    One of the classes has more samples than a byte counts, or than 16 bits do.
    """
    rng = trial.rng("weights")
    classes = int(rng.integers(2, 8))
    sizes = rng.integers(1, 60, classes) + rng.permutation([FEW_BITS[trial.seed // 2 % 2], *[0] * (classes - 1)])
    labels: list[Label] = [*np.arange(classes).repeat(sizes).tolist()]
    rng.shuffle(labels)
    if trial.seed % 2:
        labels = [[int(index == label or rng.random() < 0.3) for index in range(classes)] for label in labels]
    counts = np.asarray(labels).sum(axis=0) if isinstance(labels[0], list) else np.bincount(np.asarray(labels))
    over_classes = (1 / counts) * (classes / (1 / counts).sum())
    for kind, expected, share in (
        ("balanced", counts.sum() / (classes * counts), counts / counts.sum()),
        ("balanced_over_classes", over_classes, np.full(classes, 1 / classes)),
    ):
        weights = np.asarray(trial.corpora.balanced_weights(labels, classes, kind))
        if weights.shape != counts.shape:
            yield broken(kind, "shape", str(counts.shape), str(weights.shape))
            continue
        limit = trial.literal(np.ones(1)).max
        yield value_at_most(f"relative error of a weight, {kind}", float(np.max(np.abs(weights / expected - 1))), limit)
        yield value_at_most(f"distance of the mean from 1, {kind}", float(abs((weights * share).sum() - 1)), limit)


def refuses_weights_of_an_empty_class(trial: Trial) -> list[Comparison]:
    """A class without a sample is named."""
    rng = trial.rng("weights")
    classes = int(rng.integers(2, 8))
    missing = int(rng.integers(0, classes))
    labels = [label for label in range(classes) if label != missing] * 3
    return [
        trial.refuses(kind, partial(trial.corpora.balanced_weights, labels, classes, kind), rf"class {missing}\b", "ValueError")
        for kind in ("balanced", "balanced_over_classes")
    ]
