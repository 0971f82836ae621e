"""Comparison under attack: nothing that is not the expected answer may pass, and headroom above one means not held."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blackswan.falsifiers.numeric.comparison import (
    METRICS,
    Comparison,
    Errors,
    broken,
    compare,
    compare_exactly,
    same_structure,
    value_at_most,
    value_inside,
    value_within,
)

NAN, INF = np.nan, np.inf
F32 = np.dtype(np.float32)
U = 2.0**-24


def judged(expected: Any, actual: Any, limit: float = 1.0) -> Comparison:
    return compare("y", np.asarray(expected, np.float64), np.asarray(actual), Errors.flat(limit), U)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ([1.0, 2.0], [1.0, NAN]),
        ([1.0, NAN], [1.0, 2.0]),
        ([1.0, INF], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, INF]),
        ([1.0, INF], [1.0, -INF]),
        ([1.0, INF], [1.0, NAN]),
        ([NAN, 1.0], [1.0, NAN]),
        (NAN, 0.0),
        (0.0, NAN),
        ([NAN] * 3, [0.0] * 3),
    ],
)
@pytest.mark.parametrize("limit", [0.0, 1.0, 1e300, INF])
def test_a_misplaced_non_finite_value_never_passes(expected: Any, actual: Any, limit: float) -> None:
    found = judged(expected, actual, limit)
    assert not found.held
    assert found.headroom == INF
    assert found.reason == "non-finite"
    assert not compare_exactly("y", np.asarray(expected), np.asarray(actual)).held


def test_non_finite_values_in_matching_places_pass_and_the_rest_is_compared() -> None:
    assert judged([NAN, INF, -INF, 1.0], [NAN, INF, -INF, 1.0], 0.0).held
    found = judged([NAN, INF, 1.0, 1.0], [NAN, INF, 1.0, 1.5], 0.25)
    assert not found.held
    assert found.index == (3,)
    assert (found.expected, found.actual) == (1.0, 1.5)
    assert compare_exactly("y", np.array([NAN, INF]), np.array([NAN, INF])).held


def test_a_limit_of_nan_never_passes_even_without_error() -> None:
    for metric in METRICS:
        limit = Errors(**{"rms": 1.0, "row": 1.0, "max": 1.0, metric: NAN})
        assert not compare("y", np.ones(3), np.ones(3), limit, U).held
        assert Errors.flat(0.0).headroom(limit) == (INF, metric)


def test_a_limit_of_zero_passes_the_exact_answer_only() -> None:
    assert judged([1.0, 2.0], [1.0, 2.0], 0.0).held
    found = judged([1.0, 2.0], [1.0, np.nextafter(2.0, 3.0)], 0.0)
    assert not found.held
    assert found.headroom == INF


def test_the_limit_itself_passes_and_the_next_number_does_not() -> None:
    assert judged([0.0], [0.5], 0.5).held
    assert judged([0.0], [0.5], 0.5).headroom == 1.0
    assert not judged([0.0], [np.nextafter(0.5, 1.0)], 0.5).held


@pytest.mark.parametrize(
    ("measure", "actual"), [("max", [[9.0, 0, 0], [0, 0, 0]]), ("row", [[3.0, 3, 3], [0, 0, 0]]), ("rms", [[2.0, 2, 2]] * 2)]
)
def test_each_measure_falsifies_by_itself(measure: str, actual: Any) -> None:
    error = Errors.of(np.array(actual, np.float64))
    others = {name: 1e9 for name in METRICS if name != measure}
    limit = Errors(**{measure: getattr(error, measure) * 0.999, **others})
    found = compare("y", np.zeros_like(np.array(actual)), np.array(actual, np.float64), limit, U)
    assert not found.held
    assert found.metric == measure
    assert found.headroom > 1


def test_measures_are_those_of_their_names() -> None:
    difference = np.array([[3.0, 4.0], [0.0, 0.0]])
    errors = Errors.of(difference)
    assert errors.max == 4.0
    assert errors.rms == pytest.approx(np.sqrt(25 / 4))
    assert errors.row == pytest.approx(np.sqrt(25 / 2))
    assert Errors.of(np.array(-7.0)) == Errors(7.0, 7.0, 7.0)
    assert Errors.of(np.array([3.0, 4.0])).row == pytest.approx(np.sqrt(12.5))


def test_measures_neither_overflow_nor_underflow() -> None:
    assert Errors.of(np.full(4, 1e300)).rms == pytest.approx(1e300)
    assert Errors.of(np.full(4, 1e-300)).rms == pytest.approx(1e-300)
    assert not judged([1e308], [-1e308], 1e308).held
    tiny = compare("y", np.array([5e-324, 1.0]), np.array([5e-324, 1.0]), Errors.flat(0.0), U)
    assert tiny.held


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_difference_that_is_not_finite_has_no_finite_measure(bad: float) -> None:
    for value in Errors.of(np.array([0.0, bad])):
        assert not value < INF
    joined = Errors.flat(1.0).at_least(Errors.flat(bad))
    assert not any(getattr(joined, metric) < INF for metric in METRICS)
    assert not any(getattr(Errors.flat(bad).at_least(Errors.flat(1.0)), metric) < INF for metric in METRICS)


@pytest.mark.parametrize("shapes", [((2, 1), (2,)), ((2, 3), (3, 2)), ((), (1,)), ((2,), (1,)), ((0,), (1,)), ((0, 2), (2, 0))])
def test_shapes_that_broadcast_do_not_pass(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    one, other = np.zeros(shapes[0]), np.zeros(shapes[1])
    assert compare("y", one, other, Errors.flat(1.0), U).reason == "shape"
    assert compare_exactly("y", one, other).reason == "shape"
    assert [found.reason for found in same_structure({"y": one}, {"y": other}, {"y": np.dtype(np.float64)})] == ["shape"]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_an_empty_tensor_proves_nothing(shape: tuple[int, ...]) -> None:
    for found in (
        compare("y", np.zeros(shape), np.zeros(shape), Errors.flat(1.0), U),
        compare_exactly("y", np.zeros(shape), np.zeros(shape)),
    ):
        assert found.rejected
    assert Errors.of(np.zeros(shape)) == Errors.flat(0.0)


def test_views_are_compared_as_what_they_show() -> None:
    base = np.arange(24.0).reshape(4, 6)
    for view in (base.T, base[::-1, ::2], np.broadcast_to(base[:1], (4, 6)), base[2, 3]):
        assert compare("y", view, np.array(view), Errors.flat(0.0), U).held
        wrong = np.array(view)
        wrong[(-1,) * wrong.ndim] += 1
        found = compare("y", view, wrong, Errors.flat(0.5), U)
        assert not found.held
        assert found.index == tuple(size - 1 for size in view.shape)
        assert not compare_exactly("y", view, wrong).held


def test_bfloat16_is_compared_in_float64() -> None:
    actual = np.array([1.0, 1.0078125, 256.0], ml_dtypes.bfloat16)
    assert compare("y", np.array([1.0, 1.0078125, 256.0]), actual, Errors.flat(0.0), 2.0**-8).held
    off = compare("y", np.array([1.0, 1.0078125, 257.0]), actual, Errors.flat(0.5), 2.0**-8)
    assert not off.held
    assert off.error == 1.0
    assert compare_exactly("y", actual, actual.copy()).held
    assert not compare_exactly("y", actual, np.array([1.0, 1.0, 256.0], ml_dtypes.bfloat16)).held


def test_whole_numbers_are_compared_as_such() -> None:
    one, other = np.array([2**53], np.int64), np.array([2**53 + 1], np.int64)
    assert not compare_exactly("codes", one, other).held
    assert not compare_exactly("mask", np.array([True]), np.array([False])).held
    assert compare_exactly("codes", np.array([255], np.uint8), np.array([255], np.uint8)).held


def test_names_are_a_set_on_both_sides() -> None:
    y = np.zeros(2, np.float32)
    dtypes = {"y": F32, "z": F32}
    assert same_structure({"y": y}, {"y": y}, dtypes) == []
    (missing,) = same_structure({"y": y, "z": y}, {"y": y}, dtypes)
    assert missing.tensor == "z"
    assert "missing" in str(missing.reason)
    (extra,) = same_structure({"y": y}, {"y": y, "w": y}, dtypes)
    assert extra.tensor == "w"
    assert "extra" in str(extra.reason)
    assert len(same_structure({"y": y}, {"Y": y}, dtypes)) == 2
    assert len(same_structure({"y": y}, {}, dtypes)) == 1


@pytest.mark.parametrize("wrong", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.complex64, bool])
def test_another_dtype_does_not_pass(wrong: Any) -> None:
    (found,) = same_structure({"y": np.zeros(2)}, {"y": np.zeros(2, wrong)}, {"y": F32})
    assert found.reason == "dtype"
    assert found.headroom == INF


@settings(max_examples=60, deadline=None, database=None)
@given(st.data())
def test_headroom_and_held_tell_the_same(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(max_dims=3, max_side=4))
    numbers = st.floats(-1e6, 1e6)
    expected, actual = (data.draw(hnp.arrays(np.float64, shape, elements=numbers)) for _ in range(2))
    limit = Errors(*(data.draw(st.floats(0, 1e6)) for _ in METRICS))
    found = compare("y", expected, actual, limit, U)
    assert found.held == (found.headroom <= 1)
    assert found.headroom >= 0
    assert compare("y", expected, expected, limit, U).headroom == 0


def test_a_record_of_a_failure_says_where_and_by_how_much() -> None:
    found = judged([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.5, 4.0]], 0.1).describe()
    assert (found["index"], found["expected"], found["actual"], found["error"], found["limit"]) == ([1, 0], 3.0, 3.5, 0.5, 0.1)
    assert found["metric"] == "max"
    assert found["ulp"] == pytest.approx(0.5 / 2.0**-22)
    assert 0.99 < found["cosine"] < 1
    assert broken("y", "shape", "(2,)", "(3,)").describe()["metric"] == "shape"


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3.0001, 0.9999])
def test_a_number_outside_its_range_does_not_pass(value: float) -> None:
    for found in (value_within("n", value, 1.0, 3.0), value_inside("n", value, 1.0, 3.0)):
        assert not found.held
        assert found.headroom > 1
    if not 0 <= value <= 3:
        assert not value_at_most("n", value, 3.0).held
        assert value_at_most("n", value, 3.0).headroom > 1


@pytest.mark.parametrize("limits", [(NAN, 3.0), (1.0, NAN), (NAN, NAN), (3.0, 1.0)])
def test_a_range_of_nan_or_upside_down_has_no_number(limits: tuple[float, float]) -> None:
    for found in (value_within("n", 2.0, *limits), value_inside("n", 2.0, *limits)):
        assert not found.held
        assert found.headroom > 1
    assert not value_at_most("n", 2.0, NAN).held


@pytest.mark.parametrize("value", [NAN, INF])
def test_an_open_side_admits_no_nan_and_no_infinity(value: float) -> None:
    for found in (value_within("n", value, 3.0, INF, 3.0), value_inside("n", value, 0.0, INF), value_at_most("n", value, INF)):
        assert not found.held
        assert found.headroom > 1


def test_headroom_of_numbers() -> None:
    assert value_within("n", 2.0, 1.0, 3.0).headroom == 0
    assert value_within("n", 3.0, 1.0, 3.0).headroom == 1
    assert value_within("n", 5.0, 1.0, 3.0).headroom == 3
    assert value_within("n", 2.0, 2.0, 2.0).headroom == 0
    assert value_within("n", 6.0, 3.0, INF, 3.0).headroom == 0
    assert value_within("n", 3.0, 3.0, INF, 3.0).headroom == 1
    assert value_within("n", 1.5, 3.0, INF, 3.0).headroom == 1.5
    assert value_at_most("n", 1.5, 3.0).headroom == 0.5
    assert value_inside("n", 3.0, 1.0, 3.0).headroom == 0
    zero = value_at_most("n", 0.0, 0.0)
    assert zero.held
    assert zero.headroom == 0
    assert not value_at_most("n", 1e-30, 0.0).held
    assert not value_at_most("n", -1e-30, 1.0).held


@settings(max_examples=60, deadline=None, database=None)
@example(value=0.0, low=0.0, width=5e-324)
@example(value=10.0, low=10.0, width=2e-15)
@given(value=st.floats(), low=st.floats(-10, 10), width=st.floats(0, 10))
def test_headroom_of_a_number_and_held_tell_the_same(value: float, low: float, width: float) -> None:
    high = low + width
    for found in (value_within("n", value, low, high), value_inside("n", value, low, high), value_at_most("n", value, high)):
        assert not np.isnan(found.headroom)
        assert found.held == (found.headroom <= 1) or (found.held and found.headroom < 1 + 1e-9)


@pytest.mark.parametrize("value", [-1.5e308, -1e308, 0.0, 1e308, 1.5e308, np.nan])
def test_a_range_whose_width_is_beyond_all_numbers_is_a_range(value: float) -> None:
    found = value_within("n", value, -1e308, 1e308)
    assert found.held == (abs(value) <= 1e308)
    assert found.held == (found.headroom <= 1)
