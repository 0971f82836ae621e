"""Two answers compared bit for bit, part by part, so that a difference is named by where it lies."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly


def same(name: str, expected: Any, actual: Any) -> list[Comparison]:
    """Numbers, arrays, texts, and mappings, lists and dataclasses of them; a part's name is appended to that of the whole."""
    if is_dataclass(expected) and type(expected) is type(actual):
        expected, actual = ({field.name: getattr(each, field.name) for field in fields(each)} for each in (expected, actual))
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        expected, actual = (dict(enumerate(each)) for each in (expected, actual))
    if not isinstance(expected, Mapping):
        return [_leaf(name, expected, actual)]
    if expected.keys() != actual.keys():
        return [broken(name, "other parts", str(sorted(expected.keys() - actual.keys())), str(sorted(actual.keys() - expected.keys())))]
    return [found for key in expected for found in same(f"{name}, {key}", expected[key], actual[key])]


def _leaf(name: str, expected: Any, actual: Any) -> Comparison:
    if expected is None or actual is None or isinstance(expected, str):
        return Comparison(name, True, 0.0, "exact") if expected == actual else broken(name, "not the same", str(expected), str(actual))
    return compare_exactly(name, np.asarray(expected), np.asarray(actual))


def same_samples(name: str, expected: Sequence[Hashable], actual: Sequence[Hashable]) -> Comparison:
    """The same samples as often, in any order."""
    wanted, got = Counter(expected), Counter(actual)
    if wanted == got:
        return Comparison(name, True, 0.0, "exact")
    odd = next(iter({**(wanted - got), **(got - wanted)}))
    return broken(name, "not the same samples", f"{len(expected)}, {odd} {wanted[odd]} times", f"{len(actual)}, {odd} {got[odd]} times")


def content(folder: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
