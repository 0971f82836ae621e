"""Gradient: every vector-Jacobian product of the subject equals the reference's."""

from collections.abc import Mapping

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case, differentiable
from blackswan.falsifiers.numeric.comparison import Comparison, Errors
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF, gradient_dtypes
from blackswan.reference.table import Array, Arrays, Table


def compare_gradients(attack: Attack, case: Case) -> list[Comparison]:
    """The gradient with respect to each differentiable input that is present."""
    wrt = differentiable(attack.signature, case)
    expected = attack.expect_gradients(case, wrt)
    actual = attack.answer_gradients(case, wrt)
    dtypes = gradient_dtypes(attack.signature, case.scalars, wrt, attack.dtype)

    def rounded(inputs: Arrays, table: Table) -> dict[str, Array]:
        upstream = {name: np.asarray(value, inputs_dtype(inputs)) for name, value in case.cotangents.items()}
        return reference.differentiate(case.operation, inputs, case.scalars, upstream, wrt, table)

    return attack.judge(expected, actual, lambda: _with_cancellation(attack.floor(case, rounded, expected), expected, attack.dtype), dtypes)


def _with_cancellation(floors: Mapping[str, Errors], expected: Arrays, dtype: str) -> dict[str, Errors]:
    """The floors, and for a gradient that is zero without any noise a rounding of the case's largest gradient.

    Such a zero may be the difference of two equal terms, as a query's is that sees one key; an implementation that computes the terms in
    two ways leaves their rounding.
    """
    largest = max((float(np.abs(value).max()) for value in expected.values() if value.size), default=0.0)
    least = Errors.flat(UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"] * largest)
    return {name: least if floor.max == 0.0 and not np.any(expected[name]) else floor for name, floor in floors.items()}


def inputs_dtype(inputs: Arrays) -> "np.dtype[np.floating]":
    """The dtype that the real inputs of a rounded run are held in."""
    return next((value.dtype for value in inputs.values() if value.dtype.kind == "f"), np.dtype(np.float64))
