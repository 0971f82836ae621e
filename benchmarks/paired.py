"""Statistics of two classifiers on the same samples: accuracy, macro-F1, exact McNemar test, paired permutation test and bootstrap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
_CHUNK = 1_000


@dataclass(frozen=True)
class McNemar:
    """Samples that only the first classifier has right, those that only the second has right, and the two-sided exact p-value."""

    first_only: int
    second_only: int
    p: float


@dataclass(frozen=True)
class Difference:
    """Mean difference in accuracy, first minus second; its 95 % bootstrap interval; two-sided p-value of the permutation test."""

    mean: float
    low: float
    high: float
    p: float


def accuracy(predicted: Sequence[int], labels: Sequence[int]) -> float:
    """Share of samples whose class is predicted."""
    return float(np.mean(_right(predicted, labels)))


def macro_f1(predicted: Sequence[int], labels: Sequence[int], classes: int) -> float:
    """Mean over all classes of F1 = 2·TP / (2·TP + FP + FN); 0 for a class that is never right, and for one that does not occur."""
    truth, guess = np.asarray(labels), np.asarray(predicted)
    scores = []
    for index in range(classes):
        hits = int(np.sum((truth == index) & (guess == index)))
        misses = int(np.sum((truth == index) ^ (guess == index)))
        scores.append(2 * hits / (2 * hits + misses) if hits else 0.0)
    return math.fsum(scores) / classes


def mcnemar(first: Sequence[int], second: Sequence[int], labels: Sequence[int]) -> McNemar:
    """Are two classifiers right equally often? Exact, two-sided binomial test on the samples that only one of them has right.

    McNemar (1947); the exact form: Dietterich (1998), §3.1, names the test, the binomial replaces its χ² approximation.
    """
    right_first, right_second = _right(first, labels), _right(second, labels)
    only_first, only_second = int(np.sum(right_first & ~right_second)), int(np.sum(right_second & ~right_first))
    total = only_first + only_second
    tail = sum(math.comb(total, count) for count in range(min(only_first, only_second) + 1))
    return McNemar(only_first, only_second, float(min(Fraction(1), Fraction(2 * tail, 2**total))))


def holm(values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number, in the order given (Holm 1979): below a level for what is rejected at that level overall."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def families(texts: Sequence[str]) -> list[int]:
    """The number of each text's family: texts of the same characters in another order, as minimal pairs of the shipped corpus are."""
    known: dict[str, int] = {}
    return [known.setdefault("".join(sorted(text)), len(known)) for text in texts]


def paired_difference(
    runs: Sequence[Sequence[int]], second: Sequence[int], labels: Sequence[int], groups: Sequence[int], seed: int = 0
) -> Difference:
    """Accuracy of several runs of the first classifier, averaged, minus that of the second.

    The group of samples is the unit, since samples of a group are not independent, nor are runs on one sample: its samples and their
    runs stay together when groups are drawn with replacement (bootstrap, percentile interval; Efron & Tibshirani 1993, §13.3) and when
    first and second are exchanged (permutation test by sign flips; p = (1 + extreme) / (1 + draws)).
    """
    shares = np.mean([_right(run, labels) for run in runs], axis=0) - _right(second, labels).astype(np.float64)
    sums, counts = np.bincount(groups, shares), np.bincount(groups).astype(np.float64)
    generator, observed = np.random.default_rng(seed), float(shares.mean())
    flipped, drawn = [], []
    for _ in range(RESAMPLES // _CHUNK):
        signs = generator.integers(0, 2, size=(_CHUNK, len(sums))) * 2 - 1
        flipped.append(signs @ sums / len(shares))
        chosen = generator.integers(0, len(sums), size=(_CHUNK, len(sums)))
        drawn.append(sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1))
    # equal differences differ in their last bits with the order of summation
    extreme = int(np.sum(np.abs(np.concatenate(flipped)) >= abs(observed) * (1 - 1e-9)))
    low, high = np.percentile(np.concatenate(drawn), [2.5, 97.5])
    return Difference(observed, float(low), float(high), (1 + extreme) / (1 + RESAMPLES))


def _right(predicted: Sequence[int], labels: Sequence[int]) -> npt.NDArray[np.bool_]:
    if len(predicted) != len(labels) or not len(labels):
        raise ValueError(f"{len(predicted)} predictions for {len(labels)} samples: expected as many, and at least one")
    return np.asarray(predicted) == np.asarray(labels)
