"""Operations that treat rows one by one give the same bits for a few rows at a time as for all at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blackswan.falsifiers.numeric.rounding import Tf32
from blackswan.reference import TABLE, rows
from blackswan.reference.rows import by_rows

random = np.random.default_rng(0)
X, DY, UP = random.standard_normal((3, 2, 5, 3, 8))
CASES: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "rms_norm": (DY, {"x": X, "weight": DY[0, 0, 0], "eps": 1e-6}),
    "swiglu": (DY, {"gate": X, "up": UP}),
}


def everything(name: str) -> dict[str, np.ndarray]:
    """The operation's result and its gradients."""
    cotangent, arguments = CASES[name]
    entry = TABLE[name]
    return entry.run(arguments) | {f"d{key}": value for key, value in entry.backward(cotangent, **arguments).items()}


@pytest.mark.parametrize("few", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_few_rows_at_a_time_are_as_all_of_them(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = everything(name)
    monkeypatch.setattr(rows, "CACHED", 8 * few)
    found = everything(name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert np.array_equal(found[key], value), key


def watched(seen: list[int]) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """A function of rows that gives two arrays and notes how many rows it was given."""

    def function(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seen.append(len(x))
        assert len(y) == len(x)
        return x * y, x.sum(axis=-1, keepdims=True)

    return function


def test_no_part_has_more_rows_than_the_cache_holds() -> None:
    seen: list[int] = []
    x = np.ones((3, 50, rows.CACHED // 40))
    product, total = by_rows(watched(seen), x, x)
    assert seen == [40, 40, 40, 30]
    assert product.shape == x.shape
    assert total.shape == (3, 50, 1)
    by_rows(watched(seen), np.ones((2, rows.CACHED + 1)), np.ones((2, 1)))
    assert seen[4:] == [1, 1], "a row that does not fit goes alone"


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 0, 4)])
def test_takes_any_leading_axes(shape: tuple[int, ...]) -> None:
    x = random.standard_normal(shape)
    product, total = by_rows(watched([]), x, x)
    assert np.array_equal(product, x * x)
    assert np.array_equal(total, x.sum(axis=-1, keepdims=True))


def test_keeps_the_dtype_and_the_kind_of_array() -> None:
    replay = np.random.default_rng(0)
    found, _ = by_rows(watched([]), *[Tf32.of(np.ones((2, 3), np.float32), replay)] * 2)
    assert isinstance(found, Tf32)
    assert found.dtype == np.float32
    assert found.replay is replay
