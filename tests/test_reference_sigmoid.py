"""The logistic function of the reference: exact to roundoff on both sides, and without overflow."""

import numpy as np
import pytest

from blackswan.reference.sigmoid import complement, sigmoid


def test_both_are_exact_to_roundoff() -> None:
    x = np.concatenate([np.linspace(-700, 700, 14001), np.random.default_rng(0).standard_normal(1000) * 1e-6])
    above, below = sigmoid(x), complement(x)
    wide = x.astype(np.longdouble)
    for found, exact in ((above, 1 / (1 + np.exp(-wide))), (below, 1 / (1 + np.exp(wide)))):
        # An exponential, a sum and a quotient, each within an ulp.
        assert np.all(np.abs(found - exact) <= 3 * np.finfo(np.float64).eps * exact)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_overflows_and_what_is_not_a_number_stays(dtype: type[np.floating]) -> None:
    x = np.array([-np.inf, -1e30, -0.0, 0.0, 1e30, np.inf, np.nan], dtype)
    given = x.copy()
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        above, below = sigmoid(x), complement(x)
    assert above.dtype == below.dtype == dtype
    assert np.array_equal(above, np.array([0, 0, 0.5, 0.5, 1, 1, np.nan], dtype), equal_nan=True)
    assert np.array_equal(below, np.array([1, 1, 0.5, 0.5, 0, 0, np.nan], dtype), equal_nan=True)
    assert np.array_equal(x, given, equal_nan=True)
