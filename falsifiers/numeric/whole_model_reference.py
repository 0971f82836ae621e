"""What a whole classifier has to answer, and the noise that honest arithmetic makes on the way, kept for all claims that ask for it."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF, compute_dtype, is_real, rounded_table
from blackswan.falsifiers.numeric.whole_model import SMALL, WholeModel
from blackswan.reference import memory
from blackswan.reference.by_layer import ByLayer
from blackswan.reference.table import Array, Arrays, Table

Outputs = dict[str, Array]
AT_ONCE = 5
"""Runs of a large model in threads. A small one is Python's work more than NumPy's, and threads would wait for one another."""
MASTERS = ("loss", "gradient/")
"""Outputs that are float32 in every storage dtype: the loss, and the gradients of float32 masters."""


def in_order(whole: WholeModel, outputs: Arrays) -> Outputs:
    """The outputs in the order of the computation, forward and then backward; of hidden states the real tokens, [tokens, hidden]."""
    states = [f"hidden/{path}" for path in ("model.embed_tokens", *whole.blocks, "model.norm")]
    factors = sorted((name for name in outputs if ".lora_" in name), key=lambda name: -int(name.split(".")[2]))
    order = [*states, "logits", "loss", "gradient/score.weight", "gradient/score.bias", *factors]
    mask = whole.inputs["mask"]
    return {name: outputs[name][mask] if name.startswith("hidden/") else outputs[name] for name in order}


def dtypes(names: Mapping[str, Any], dtype: str) -> "dict[str, np.dtype[Any]]":
    """The dtype that each output comes back in."""
    wide = compute_dtype(dtype)
    return {name: wide if name.startswith(MASTERS) else STORAGE[dtype] for name in names}


class Oracle:
    """Expected outputs of a model, in order, and the errors of runs of it under the rounding of a dtype.

    `rounded` gives the outputs of such a run: None for rounding to nearest, else the number of a random replay; `at_once` of them may run
    in threads.
    """

    def __init__(self, whole: WholeModel, dtype: str, expected: Arrays, rounded: Callable[[int | None], Arrays], at_once: int = 1) -> None:
        self.whole, self.dtype, self._rounded, self._at_once = whole, dtype, rounded, at_once
        self.expected = in_order(whole, expected)
        self._errors: list[dict[str, Errors]] = []

    def floors(self, replays: int) -> dict[str, Errors]:
        """The noise floor of each output: the largest error of rounding to nearest, of so many replays, and of half an ulp."""
        missing = range(len(self._errors), replays + 1)
        with memory.kept(), ThreadPoolExecutor(self._at_once) as pool:
            self._errors += pool.map(self._run, missing)
        held = dtypes(self.expected, self.dtype)
        floors = {name: Errors.of(value).times(UNIT_ROUNDOFF[str(held[name])]) for name, value in self.expected.items()}
        for errors in self._errors[: replays + 1]:
            floors = {name: floor.at_least(errors[name]) for name, floor in floors.items()}
        return floors | {"loss": floors["loss"].at_least(self._passed_on(floors["logits"]))}

    def _run(self, number: int) -> dict[str, Errors]:
        """The errors of one run: the first rounds to nearest."""
        found = in_order(self.whole, self._rounded(number - 1 if number else None))
        return {name: Errors.of(np.asarray(value, np.float64) - self.expected[name]) for name, value in found.items()}

    def _passed_on(self, logits: Errors) -> Errors:
        """What independent errors of the logits of that size do to the loss: it is one number, whose own errors may be small by luck."""
        given = {"logits": self.expected["logits"], "labels": self.whole.inputs["labels"]}
        slope = reference.differentiate("weighted_cross_entropy", given, {}, {"loss": np.ones(())}, ["logits"])["logits"]
        return Errors.flat(logits.rms * float(np.linalg.norm(slope)))


def by_layer(whole: WholeModel, dtype: str = "float64", replay: int | None = None) -> ByLayer:
    """The model's reference: in float64, or under the rounding of a dtype, to nearest or in a random replay."""

    if dtype == "float64":
        return ByLayer(whole.inputs, whole.parameters(), whole.scalars)

    def table_of(part: str) -> Table:
        generator = None if replay is None else np.random.default_rng([whole.seed, replay, *part.encode()])
        return rounded_table(reference.TABLE, dtype, generator, dither=True)

    def held(stored: Array) -> Array:
        return np.asarray(stored, compute_dtype(dtype)) if is_real(stored) else stored

    return ByLayer(whole.inputs, whole.parameters(), whole.scalars, table_of, held)


@lru_cache(maxsize=4)
def of_the_reference(whole: WholeModel, dtype: str) -> Oracle:
    """The oracle by the reference alone."""
    whole.parameters().make(whole.nf4)

    def rounded(replay: int | None) -> Outputs:
        return by_layer(whole, dtype, replay).run()

    return Oracle(whole, dtype, by_layer(whole).run(), rounded, at_once=1 if whole.hidden <= SMALL["hidden"] else AT_ONCE)
