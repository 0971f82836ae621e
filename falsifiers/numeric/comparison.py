"""Comparing an answer with the expected one: shape, dtype, placement of non-finite values, then error.

Accepts by `<=` only, so NaN never passes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, mul
from typing import Any, NamedTuple

import numpy as np

from blackswan.reference.table import Array

METRICS = ("rms", "row", "max")


class Errors(NamedTuple):
    """An error, or a limit on one, in three measures: rms over the tensor, worst row's rms (rows along the last axis), maximum."""

    rms: float
    row: float
    max: float

    @classmethod
    def of(cls, difference: Array) -> "Errors":
        """The measures of a tensor of differences."""
        scale = float(np.max(np.abs(difference), initial=0.0))
        if scale == 0.0 or not np.isfinite(scale):
            return cls.flat(scale)
        squares = np.square(difference / scale)
        rows = squares.reshape(-1, squares.shape[-1]) if squares.ndim > 1 else squares.reshape(1, -1)
        return cls(scale * float(np.sqrt(squares.mean())), scale * float(np.sqrt(rows.mean(axis=1).max())), scale)

    @classmethod
    def flat(cls, value: float) -> "Errors":
        """The same limit in every measure."""
        return cls(value, value, value)

    def at_least(self, other: "Errors") -> "Errors":
        """The larger of two in each measure; NaN where either is."""
        return Errors(*(two if two > one or two != two else one for one, two in zip(self, other, strict=True)))

    def plus(self, other: "Errors") -> "Errors":
        """The sum of two in each measure."""
        return Errors(*map(add, self, other))

    def times(self, factors: "Errors | float") -> "Errors":
        """Each measure times its factor."""
        return Errors(*map(mul, self, factors if isinstance(factors, Errors) else Errors.flat(factors)))

    def over(self, floor: "Errors") -> "Errors":
        """The ratio of two in each measure; anything over zero, and NaN, is infinite."""
        return Errors(*map(ratio, self, floor))

    def headroom(self, limit: "Errors") -> tuple[float, str]:
        """The worst error / limit and its measure."""
        return max(zip(self.over(limit), METRICS, strict=True))


def ratio(error: float, limit: float) -> float:
    """An error as a share of its limit; anything over a limit of zero, and NaN, is infinite."""
    if error == 0.0 and limit >= 0.0:
        return 0.0
    found = error / limit if limit > 0 else np.inf
    return float(found) if found == found else np.inf


NO_ANSWER = "(no answer)"


@dataclass(frozen=True)
class Comparison:
    """One tensor's comparison. `reason` says what failed first; `rejected` that the case proves nothing for this tensor."""

    tensor: str
    held: bool
    headroom: float
    metric: str
    reason: str | None = None
    index: tuple[int, ...] = ()
    expected: float | str | None = None
    actual: float | str | None = None
    error: float | None = None
    limit: float | None = None
    ulp: float | None = None
    cosine: float | None = None
    rejected: bool = False

    @property
    def where(self) -> str:
        """The tensor; where no answer came, with what the subject raised, and of paths the last part."""
        return where(self.tensor, self.reason)

    def describe(self) -> dict[str, Any]:
        """The comparison as a record has it."""
        plain = {name: getattr(self, name) for name in ("tensor", "expected", "actual", "error", "limit", "ulp", "cosine")}
        return {**plain, "index": list(self.index), "metric": self.reason or self.metric}


def where(tensor: str, reason: str | None) -> str:
    """`Comparison.where` of a tensor, and the reason why it differs or what was raised in its place."""
    if tensor != NO_ANSWER:
        return tensor
    without_folders = re.sub(r"/[^\s:]*/", "", reason or "")
    return f"{NO_ANSWER} {without_folders}"


def broken(tensor: str, reason: str, expected: Any = None, actual: Any = None, index: tuple[int, ...] = ()) -> Comparison:
    """A comparison that failed before any error could be measured."""
    return Comparison(tensor, False, np.inf, "structure", reason, index, _plain(expected), _plain(actual))


def rejected(tensor: str) -> Comparison:
    """The noise floor is as large as the signal, or the tensor is empty: nothing is compared."""
    return Comparison(tensor, True, 0.0, "rejected", rejected=True)


def value_within(name: str, value: float, low: float, high: float, scale: float | None = None) -> Comparison:
    """A number that must lie in [low, high].

    Headroom is its distance from the middle over half the width, or, if one side is open, from the bound over `scale`, plus one.
    """
    held = bool(low <= value <= high)
    if np.isfinite(high - low) and high > low:
        # By the distances to the ends, which do not cancel however narrow it is, and whose sum is no zero.
        headroom = 2 * (max(value - low, high - value) / (high - low)) - 1
    elif scale:
        headroom = max((low - value) / scale, (value - high) / scale, -1.0) + 1.0
    else:
        headroom = 0.0 if held else np.inf
    return _within(name, value, low, high, headroom)


def value_at_most(name: str, value: float, high: float) -> Comparison:
    """A number that must lie in [0, high]; headroom is its share of `high`."""
    return _within(name, value, 0.0, high, ratio(value, high) if value >= 0 else np.inf)


def value_at_least(name: str, value: float, low: float) -> Comparison:
    """A number that must be `low` or more; headroom is `low` as a share of it."""
    return _within(name, value, low, np.inf, ratio(low, value))


def value_within_factor(name: str, found: float, factor: float) -> Comparison:
    """A ratio that must lie in [1 / factor, factor]; headroom is the larger of it and its inverse, as a share of `factor`."""
    return _within(name, found, 1 / factor, factor, max(found, ratio(1.0, found)) / factor)


def value_inside(name: str, value: float, low: float, high: float) -> Comparison:
    """A number that must lie in [low, high], where being close to an end is no sign of trouble: headroom is 0 inside."""
    return _within(name, value, low, high, 0.0 if low <= value <= high else np.inf)


def _within(name: str, value: float, low: float, high: float, headroom: float) -> Comparison:
    held = bool(low <= value <= high and np.isfinite(value))
    if not held and not np.isnan(value):
        headroom = max(headroom, float(np.nextafter(1, 2)))
    limit = high if value > high or not np.isfinite(low) else low
    headroom, wanted = np.inf if np.isnan(headroom) else float(headroom), f"in [{low:.6g}, {high:.6g}]"
    return Comparison(name, held, headroom, "range", expected=wanted, actual=_plain(value), limit=float(limit))


def same_structure(expected: Mapping[str, Array], actual: Mapping[str, Array], dtypes: Mapping[str, np.dtype[Any]]) -> list[Comparison]:
    """The differences in names, shapes and dtypes; empty where there are none. Nothing is zipped, so nothing is cut short."""
    found = [broken(name, f"missing from the answer; it has {sorted(actual)[:6]}") for name in expected if name not in actual]
    found += [broken(name, "not asked for: an extra result") for name in actual if name not in expected]
    for name in sorted(set(expected) & set(actual)):
        if expected[name].shape != actual[name].shape:
            found.append(broken(name, "shape", str(expected[name].shape), str(actual[name].shape)))
        elif actual[name].dtype != dtypes[name]:
            found.append(broken(name, "dtype", str(dtypes[name]), str(actual[name].dtype)))
    return found


@np.errstate(all="ignore")
def compare(tensor: str, expected: Array, actual: Array, limit: Errors, unit_roundoff: float) -> Comparison:
    """Two tensors: shape, then the placement of NaN and infinities, then the error of the finite elements against the limit."""
    if expected.shape != actual.shape:
        return broken(tensor, "shape", str(expected.shape), str(actual.shape))
    if not expected.size:
        return rejected(tensor)
    wanted, got = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    finite = np.isfinite(wanted) & np.isfinite(got)
    agree = finite | (np.isnan(wanted) & np.isnan(got)) | ((wanted == got) & ~finite)
    if not agree.all():
        index = _index(np.argmin(agree), agree.shape)
        return broken(tensor, "non-finite", wanted[index], got[index], index)
    difference = np.where(finite, got - wanted, 0.0) if not finite.all() else got - wanted
    errors = Errors.of(difference)
    headroom, metric = errors.headroom(limit)
    held = all(error <= most for error, most in zip(errors, limit, strict=True))
    index = _index(np.argmax(np.abs(difference)), difference.shape)
    at, error, most = float(wanted[index]), getattr(errors, metric), getattr(limit, metric)
    ulp = abs(errors.max) / (2 * unit_roundoff * 2.0 ** np.floor(np.log2(abs(at)))) if at and np.isfinite(at) else None
    cosine = None if held else _cosine(wanted, got)
    return Comparison(tensor, held, headroom, metric, None, index, at, float(got[index]), error, most, ulp, cosine)


def compare_exactly(tensor: str, expected: Array, actual: Array) -> Comparison:
    """Equal in every element, NaN in the same places; used for codes, copies and determinism. Zeros of either sign are equal."""
    if expected.shape != actual.shape:
        return broken(tensor, "shape", str(expected.shape), str(actual.shape))
    if not expected.size:
        return rejected(tensor)
    wanted, got = np.asarray(expected), np.asarray(actual)
    if wanted.dtype.kind not in "iub" or got.dtype.kind not in "iub":
        wanted, got = wanted.astype(np.float64), got.astype(np.float64)
    same = (wanted == got) | ((wanted != wanted) & (got != got))
    if same.all():
        return Comparison(tensor, True, 0.0, "exact", error=0.0, limit=0.0)
    index = _index(np.argmin(same), same.shape)
    error = abs(float(wanted[index]) - float(got[index]))
    return Comparison(tensor, False, np.inf, "exact", None, index, _plain(wanted[index]), _plain(got[index]), error, 0.0)


def _index(flat: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(flat), shape))


def _cosine(wanted: Array, got: Array) -> float | None:
    norm = float(np.linalg.norm(wanted) * np.linalg.norm(got))
    return float(np.vdot(wanted, got)) / norm if 0 < norm < np.inf else None


def _plain(value: Any) -> float | str | None:
    return value if value is None or isinstance(value, str) else float(value)
