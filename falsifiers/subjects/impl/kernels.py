"""Triton's kernels as functions on tensors of the CPU, by its interpreter."""

from typing import Any

import numpy as np

from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.impl import kernels

Answer = tuple[str, Any, Any]
"""A label, what is right, and what was found."""


class Kernels(Door):
    """The kernels of `impl.kernels`. Lacks where they cannot run on a CPU."""

    def memory(self, rows: int) -> list[Answer]:
        """In memory that they are given, with gaps in it and over inputs; on rows far apart, in parts, and none; and what does not fit."""
        calls = self._module("kernel_calls")
        near = list(calls.in_given_memory(rows))
        if not all(np.array_equal(right, found) for _, right, found in near):
            return near  # where rows are far apart, a distance that is another array's would lead out of the memory
        unlike = [*near, *calls.rows_far_apart(rows), *calls.in_parts(), *calls.of_no_rows()]
        return [*unlike, *calls.refusals(rows), *calls.widest()]

    def rounded(self, rows: int) -> list[Answer]:
        """On values of 16 bits, beside what is rounded once."""
        return list(self._module("kernel_calls").rounded_once(rows))

    def stand_ins(self) -> list[Answer]:
        """In the places of operations, on values that lie otherwise in memory or are of another dtype, and misused."""
        module = self._module("stand_ins")
        return [*module.as_plain(), *module.in_float64(), *module.differentiated_twice(), *module.misuses()]

    def packed(self) -> list[Answer]:
        """Attention of packed sequences of several lengths, beside float64's."""
        return list(self._module("stand_ins").packed())

    def _module(self, name: str) -> Any:
        from importlib import import_module

        reason = kernels.why_not() or (None if kernels.interpreted() else "Triton's interpreter is off")
        if self._device.type != "cpu" or reason:
            raise Lacks(reason or "its kernels are asked as functions on a CPU")
        return import_module(f"{__package__}.{name}")
