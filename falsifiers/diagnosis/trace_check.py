"""Compares each recorded call with the reference's tape: whether it is there, and its parameters, scalars and sources.

Only what can be compared bit for bit is: inputs and parameters of the case, and results of other recorded calls, in the coarser of the two
dtypes. A value that the reference computes between two calls is compared where `Section.derived` says how the recorded calls give it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from blackswan.falsifiers.diagnosis.local import Local, Suspicion, error_in_floors
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF, is_real, signatures
from blackswan.falsifiers.subjects.protocol import TracedCall
from blackswan.reference.table import Array, Arrays
from blackswan.reference.tape import Call, Tape

NOT_CALLED = "is not called"

Derived = Mapping[str, Callable[[], Array | None]]


class Trace:
    """Recorded calls by path."""

    def __init__(self, calls: Iterable[TracedCall]) -> None:
        self.calls = list(calls)
        self._by_path = {call.path: call for call in self.calls}

    def at(self, path: str, prefix: str = "") -> TracedCall | None:
        """The call at `prefix` + `path`; what is done once, while a model is built, stands without the prefix."""
        return self._by_path.get(prefix + path) or self._by_path.get(path)

    def result(self, path: str, output: str, prefix: str = "") -> Array | None:
        """A result of the call at a path; None where there is no such call."""
        call = self.at(path, prefix)
        return None if call is None else call.outputs.get(output)


@dataclass(frozen=True)
class Section:
    """A tape of the reference, and the recorded calls that stand for its calls, under `prefix`. `only` restricts it to some of them."""

    tape: Tape
    trace: Trace
    local: Local
    prefix: str = ""
    derived: Derived = field(default_factory=dict)
    only: Callable[[Call], bool] = lambda _: True

    @cached_property
    def calls(self) -> list[Call]:
        """The reference's calls, those put together that the subject has fused."""
        fused = {call.path: merged for call in self.tape.calls if (merged := self._fused(call)) is not None}
        absorbed = {call.inputs["weight"] for call in self.tape.calls if call.path in fused}
        kept = [call for call in self.tape.calls if absorbed.isdisjoint(call.results.values())]
        return [fused.get(call.path, call) for call in kept if self.only(call)]

    def _fused(self, call: Call) -> Call | None:
        """A linear layer and the dequantisation of its weight as the one call that the subject makes of them."""
        traced = self.traced(call)
        if call.operation != "linear" or traced is None or traced.operation != "nf4_linear":
            return None
        made = self.maker(call.inputs["weight"])
        if made is None or made.operation != "nf4_dequantize":
            return None
        inputs = {name: value for name, value in call.inputs.items() if name != "weight"} | dict(made.inputs)
        scalars = {"in_features": made.scalars["columns"], "out_features": made.scalars["rows"], "block_size": made.scalars["block_size"]}
        return Call(call.path, "nf4_linear", inputs, scalars, call.results)

    def traced(self, call: Call) -> TracedCall | None:
        """The recorded call that stands for one of the reference's."""
        return self.trace.at(call.path, self.prefix)

    def base(self, value: str) -> str:
        """The value that a view is a view of; other values are their own."""
        return self.tape.views.get(value, value)

    @cached_property
    def _makers(self) -> dict[str, Call]:
        return {value: call for call in self.tape.calls for value in call.results.values()}

    def maker(self, value: str) -> Call | None:
        """The reference's call that made a value; None for an input, a parameter, or what was computed between calls."""
        return self._makers.get(self.base(value))

    def value(self, name: str) -> Array | None:
        """The array that a recorded call must have read if the reference's reads the value of that name; None where it cannot be told."""
        made = self.maker(name)
        if made is not None:
            output = next(output for output, value in made.results.items() if value == self.base(name))
            return self.trace.result(made.path, output, self.prefix)
        return self.derived[name]() if name in self.derived else self.tape.values[name]

    def forward(self) -> Iterator[Suspicion]:
        """The calls that are absent, read something else or give a wrong result, in their order."""
        for call in self.calls:
            traced = self.traced(call)
            if traced is None:
                yield self._suspicion(call, NOT_CALLED)
            elif traced.operation != call.operation:
                yield self._suspicion(call, f"is not called; {traced.operation} is, in its place")
            else:
                yield from self._reading(call, traced)
                yield from self.local.results(traced)

    def _suspicion(self, call: Call, explanation: str) -> Suspicion:
        return Suspicion(call.operation, self.prefix + call.path, explanation)

    def _reading(self, call: Call, traced: TracedCall) -> Iterator[Suspicion]:
        for name, value in call.inputs.items():
            if name not in traced.inputs:
                yield self._suspicion(call, f"is called without {name}")
                continue
            wanted = self.value(value)
            if wanted is not None and not same(wanted, traced.inputs[name]):
                made = self.maker(value)
                source = f"{self.prefix}{made.path} gave" if made else f"{value} is"
                yield self._suspicion(call, f"is called with another {name} than {source}")
        for name in traced.inputs.keys() - call.inputs.keys():
            if np.any(traced.inputs[name]):
                yield self._suspicion(call, f"is called with a {name}, which the reference has not")
        yield from self._scalars(call, traced)

    def _scalars(self, call: Call, traced: TracedCall) -> Iterator[Suspicion]:
        signature = signatures()[call.operation]
        defaults = {name: scalar.default for name, scalar in signature.scalars.items()} | dict.fromkeys(signature.attributes)
        for name, default in defaults.items():
            wanted, given = call.scalars.get(name, default), traced.scalars.get(name, default)
            if not _equal(wanted, given):
                yield self._suspicion(call, f"is called with {name} = {_shown(given)} instead of {_shown(wanted)}")

    def backward(self, cotangents: Arrays, wrt: Sequence[str]) -> Iterator[Suspicion]:
        """The wrong gradients, the last call first: each call's own share, and the sum of its readers' shares on its result.

        `cotangents` are those of the tape's outputs; only calls on the way to the values in `wrt` are looked at.
        """
        active = self._active(wrt)
        readers: dict[str, list[tuple[TracedCall, str]]] = {}
        for call in reversed(self.calls):
            traced = self.traced(call)
            needs = [name for name in signatures()[call.operation].gradients if self.base(call.inputs.get(name, "")) in active]
            if traced is None or not needs:
                continue
            yield from self._arriving(call, traced, readers, cotangents)
            yield from self.local.gradients(traced, needs)
            for name in needs:
                value = self.base(call.inputs[name])
                readers.setdefault(value, []).append((traced, name))
                if traced.cotangents and self.maker(value) is None and name not in traced.gradients:
                    yield self._suspicion(call, f"gives no gradient of its {name}")

    def _active(self, wrt: Sequence[str]) -> set[str]:
        active = set(wrt)
        for call in self.calls:
            if not active.isdisjoint(map(self.base, call.inputs.values())):
                active.update(call.results.values())
        return active

    def _arriving(
        self, call: Call, traced: TracedCall, readers: Mapping[str, Sequence[tuple[TracedCall, str]]], cotangents: Arrays
    ) -> Iterator[Suspicion]:
        """Whether what reaches the call's result is the sum of its readers' shares and of the cotangent of the tape's output."""
        for output, value in call.results.items():
            wanted = traced.outputs[output]
            given = [cotangents[name] for name, made in self.tape.outputs.items() if made == value and name in cotangents]
            for reader, name in readers.get(value, ()):
                share = reader.gradients.get(name)
                if share is None and reader.cotangents:
                    yield self._lost(call, reader, name)
                elif share is not None and share.size != wanted.size:
                    yield Suspicion(
                        reader.operation, reader.path, f"gives a gradient of its {name} of shape {share.shape} for {wanted.shape}"
                    )
                elif share is not None:
                    given.append(share)
            stacked = np.array([np.asarray(share, np.float64).reshape(wanted.shape) for share in given] or [np.zeros(wanted.shape)])
            total, size = stacked.sum(axis=0), np.abs(stacked).sum(axis=0)
            got = np.asarray(traced.cotangents.get(output, np.zeros(wanted.shape)), np.float64)
            unit = UNIT_ROUNDOFF.get(str(wanted.dtype), 0.0)
            if not np.all(np.abs(got - total) <= 2 * len(given) * unit * size):
                yield self._suspicion(call, "the gradient that reaches its result is not the sum of what the calls that read it give")

    def _lost(self, call: Call, reader: TracedCall, name: str) -> Suspicion:
        """Who is to blame where a reader gives no gradient: the reader, if it gives none by itself either; else the call that it reads."""
        if not np.any(self.local.alone(reader, name)):
            return Suspicion(reader.operation, reader.path, f"gives no gradient of its {name}")
        return self._suspicion(call, "no gradient reaches its result")

    def answers(self, actual: Arrays, floors: Mapping[str, Errors]) -> Iterator[Suspicion]:
        """The parts of the composition's answer that its calls did not give, within the noise of two runs: recording changes no formula,
        but the order of sums."""
        operation = self.local.claim.operation or ""
        for name, value in self.tape.outputs.items():
            wanted = self.value(value)
            if wanted is not None and name in actual and error_in_floors(np.asarray(wanted, np.float64), actual[name], floors[name])[1] > 1:
                made = self.maker(value)
                yield Suspicion(operation, name, f"is not what {made.path if made else 'the last call'} gave")


def same(wanted: Array, given: Array) -> bool:
    """Equal in every element as the coarser of the two dtypes holds it, in any shape."""
    if wanted.size != given.size:
        return False
    if not (is_real(wanted) and is_real(given)):
        return bool(np.array_equal(wanted.reshape(-1), given.reshape(-1)))
    coarser = max((str(wanted.dtype), str(given.dtype)), key=lambda dtype: UNIT_ROUNDOFF[dtype])
    one, other = (np.asarray(value.astype(STORAGE[coarser]), np.float64).reshape(-1) for value in (wanted, given))
    return np.array_equal(one, other, equal_nan=True)


def _equal(wanted: Any, given: Any) -> bool:
    if isinstance(wanted, float) or isinstance(given, float):
        return isinstance(given, float | int) and isinstance(wanted, float | int) and bool(np.isclose(given, wanted, rtol=1e-6, atol=0))
    return bool(wanted == given)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
