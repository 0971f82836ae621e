"""Two answers compared bit for bit, part by part, so that a difference is named by where it lies."""

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly

Number = np.ndarray | np.generic | int | float
NO_LETTER = os.fsdecode(b"\xe9")
"""A byte of a name that is no letter in UTF-8, as of a file that an old system has named."""


def same(name: str, expected: Any, actual: Any) -> list[Comparison]:
    """Compares numbers, arrays, texts, and mappings, lists and dataclasses of them; a part's name is appended to that of the whole.

    Arrays may differ in their dtype. Lists of whole numbers, texts and such lists are compared at once.
    """
    if is_dataclass(expected) and type(expected) is type(actual):
        expected, actual = ({field.name: getattr(each, field.name) for field in fields(each)} for each in (expected, actual))
    lists = isinstance(expected, list | tuple) and isinstance(actual, list | tuple)
    if lists and not (_discrete(expected) and _discrete(actual)):
        expected, actual = (dict(enumerate(each)) for each in (expected, actual))
    if not isinstance(expected, Mapping) or not isinstance(actual, Mapping):
        return [_leaf(name, expected, actual)]
    if expected.keys() != actual.keys():
        missing, extra = (sorted(map(str, one.keys() - other.keys())) for one, other in ((expected, actual), (actual, expected)))
        return [broken(name, "other parts", str(missing), str(extra))]
    return [found for key in expected for found in same(f"{name}, {key}", expected[key], actual[key])]


def _discrete(value: Any) -> bool:
    """Whether equality of Python tells everything: there is no NaN and no array."""
    return value is None or isinstance(value, int | str | bytes) or (isinstance(value, list | tuple) and all(map(_discrete, value)))


def _leaf(name: str, expected: Any, actual: Any) -> Comparison:
    if isinstance(expected, Number) and isinstance(actual, Number):
        return compare_exactly(name, np.asarray(expected), np.asarray(actual))
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        expected, actual = list(expected), list(actual)
        if len(expected) == len(actual) and expected != actual:
            at = next(index for index, (one, other) in enumerate(zip(expected, actual, strict=True)) if one != other)
            return broken(name, "another entry", repr(expected[at])[:200], repr(actual[at])[:200], (at,))
    if type(expected) is type(actual) and expected == actual:
        return Comparison(name, True, 0.0, "exact", error=0.0, limit=0.0)
    return broken(name, "not the same", repr(expected)[:200], repr(actual)[:200])


def same_samples(name: str, expected: Sequence[Hashable], actual: Sequence[Hashable]) -> Comparison:
    """The same samples as often, in any order."""
    wanted, got = Counter(expected), Counter(actual)
    if wanted == got:
        return Comparison(name, True, 0.0, "exact")
    odd = next(iter({**(wanted - got), **(got - wanted)}))
    return broken(name, "not the same samples", f"{len(expected)}, {odd} {wanted[odd]} times", f"{len(actual)}, {odd} {got[odd]} times")


def same_tensors(expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]) -> list[Comparison]:
    """Two groups of named arrays: names, shapes, dtypes and bits."""
    dtypes = ({name: str(value.dtype) for name, value in tensors.items()} for tensors in (expected, actual))
    return [*same("dtypes", *dtypes), *same("tensors", expected, actual)]


def same_keys(file: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[Comparison]:
    """A mapping that has each expected value under its key, and may have more."""
    return same(file, expected, {key: actual.get(key) for key in expected})


def content(folder: Path) -> dict[str, bytes]:
    """Every file in a folder; none where it is not there."""
    files = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}
