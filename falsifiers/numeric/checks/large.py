"""Arrays of more elements than 32 bits count: an index that wraps there reads or writes other rows, and small cases never show it.

The case's rows are repeated, so that the expected answer of each row is known. Their number is odd, so that an index that is wrong by a
power of two meets another row of the case. The subject makes the large inputs where it computes, and answers with a few rows.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from blackswan.contracts import sizes
from blackswan.falsifiers.numeric.attack import Attack, rounded_gradients, rounded_outputs
from blackswan.falsifiers.numeric.case import Case, differentiable
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.numeric.precision import gradient_dtypes
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.reference.table import Array, Arrays

ON_A_CPU = 2**16
"""The bound that takes the place of the claim's on a CPU, where mutants and tests are asked."""
ANYWHERE = 8
"""The number of rows that are read at random places."""


def large_arrays_row_by_row(attack: Attack, case: Case) -> list[Comparison]:
    """Rows of the outputs."""
    return _with_room(attack, partial(_compared, attack, case, False))


def gradients_of_large_arrays_row_by_row(attack: Attack, case: Case) -> list[Comparison]:
    """Rows of the gradients."""
    return _with_room(attack, partial(_compared, attack, case, True))


def _with_room(attack: Attack, compared: Callable[[int], list[Comparison]]) -> list[Comparison]:
    """The comparisons for the largest bound that the device has the memory for. Lacks where it has too little for the smallest one."""
    bounds = attack.claim.arguments["elements"] if attack.subject.device.startswith("cuda") else [ON_A_CPU]
    *larger, smallest = sorted(bounds, reverse=True)
    for bound in larger:
        try:
            return compared(bound)
        except Lacks:
            continue
    return compared(smallest)


def _compared(attack: Attack, case: Case, gradients: bool, bound: int) -> list[Comparison]:
    signature = attack.signature
    inputs, outputs = signature.by_row(signature.inputs), signature.by_row(signature.outputs)
    wrt = [name for name in differentiable(signature, case) if name in inputs]
    shapes = [*(signature.inputs[name].shape for name in inputs), *(signature.outputs[name].shape for name in outputs)]
    width = max(int(np.prod(sizes.shape(shape[1:], case.sizes))) for shape in shapes)
    period = case.sizes[signature.sizes[0]]
    repeats = bound // (width * period) + 2
    rows = _read(repeats * period, bound // width, generator_for(case.seed, "rows"))
    share = 1.0 if outputs else 1.0 / repeats  # a loss is a mean over all rows

    def view(found: Arrays) -> dict[str, Array]:
        return {name: found[name][np.asarray(rows) % period] * share for name in (wrt if gradients else outputs)}

    honest = rounded_gradients(case, wrt) if gradients else rounded_outputs(case)
    expected = view(attack.expect_gradients(case, wrt) if gradients else attack.expect(case))
    actual = attack.answer_at(case, repeats * period, rows, gradients)
    dtypes = gradient_dtypes(signature, case.scalars, wrt, attack.dtype) if gradients else attack.dtypes(expected)
    floors = lambda: attack.floor(case, lambda given, table: view(honest(given, table)), expected)  # noqa: E731  # as in parity
    found = attack.judge(expected, actual, floors, dtypes)
    return [replace(one, index=(rows[one.index[0]], *one.index[1:])) if one.index else one for one in found]


def _read(count: int, edge: int, rng: Generator) -> list[int]:
    """Rows at both ends, around half the bound, the bound and its double, where these are, and anywhere."""
    near = {place + step for place in (edge // 2, edge, 2 * edge) for step in (-1, 0, 1)}
    chosen = {0, 1, count - 2, count - 1, *near, *rng.integers(0, count, ANYWHERE).tolist()}
    return sorted(row for row in chosen if 0 <= row < count)
