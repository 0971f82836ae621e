"""Storage dtypes, and the reference under the rounding of mixed precision: where the noise floor comes from.

Each operation computes in float32 and its results are rounded to the storage dtype, as mixed-precision hardware does (Micikevicius et al.
2018, "Mixed precision training", §3). In a replay every operation's inputs also move by one unit roundoff of the compute dtype and its
results round stochastically: another summation order or another instruction makes errors of that size.

`tf32` is a policy beside the dtypes: values are float32, and products of matrices round their operands to TF32, as tensor cores do (NVIDIA
2020, "A100 Tensor Core GPU Architecture", TF32: 8 bits of exponent, 10 of fraction); sums and all else are in float32.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from blackswan import contracts
from blackswan.contracts.conventions import Declaration, checked
from blackswan.contracts.model import Check, Signature
from blackswan.falsifiers.numeric.rounding import Stored, Tf32, dithered, moved, nearest
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.reference.classifier import trainable_names
from blackswan.reference.table import Array, Composition, Operation, Table

STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, dtype.storage, dtype.storage)) for name, dtype in contracts.DTYPES.items()
}
UNIT_ROUNDOFF = {name: dtype.unit_roundoff for name, dtype in contracts.DTYPES.items()}
"""The unit roundoff of stored values; under `tf32` they are float32."""
CUDA_ONLY = {name: dtype.cuda_only for name, dtype in contracts.DTYPES.items() if dtype.cuda_only}
"""Policies that other devices do not have, and why."""


@cache
def signatures() -> Mapping[str, Signature]:
    """Every operation's signature, read once."""
    return contracts.load_operations()


@cache
def checks() -> Mapping[str, Check]:
    """Every named check, read once."""
    return contracts.load_checks()


Declared = Mapping[str, Declaration]
"""What is declared of operations, by name."""


def declared_by(subject: Subject) -> Declared:
    """The operations of which a subject declares something. ValueError for a convention that an operation does not have."""
    return {name: found for name in signatures() if (found := declaration(subject, name))}


def declaration(subject: Subject, operation: str) -> Declaration:
    """What a subject declares of an operation; nothing where it has no method for that. ValueError as above."""
    declares = getattr(subject, "declares", None)
    return checked(signatures()[operation], declares(operation)) if declares else {}


def signature_of(operation: str, declared: Declared) -> Signature:
    """The operation's signature, as what is declared of it makes it."""
    signature, own = signatures()[operation], declared.get(operation, {})
    if own.get("loss_dtype") == "storage":
        signature = replace(signature, outputs={name: replace(output, dtype="storage") for name, output in signature.outputs.items()})
    if own.get("intermediates") == "float32":
        signature = replace(signature, intermediates="float32")
    return signature


def is_narrow(dtype: str) -> bool:
    """Whether arithmetic runs in a wider dtype than values are stored in."""
    return STORAGE[dtype] != compute_dtype(dtype)


def compute_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype that arithmetic runs in when values are stored in `dtype`."""
    return STORAGE["float64" if dtype == "float64" else "float32"]


def is_real(array: Array) -> bool:
    """Whether the array holds real numbers, bfloat16 included (NumPy does not count it among its own floats)."""
    return array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16


def held_dtype(declared: str, dtype: str) -> str:
    """The dtype of a result declared as storage, float32, …, when `dtype` is under test; float64 replaces float32 in float64."""
    if declared in ("storage", "real"):
        return dtype
    return "float64" if declared == "float32" and dtype == "float64" else declared


def output_dtypes(signature: Signature, names: Iterable[str], dtype: str) -> dict[str, np.dtype[Any]]:
    """The dtype that each output must come back in; the group of trainable parameters and their moments is kept in float32."""
    outputs = {name: signature.outputs[name.split("/", 1)[0]] for name in names}
    declared = {name: "float32" if output.group == "trainable" else output.dtype for name, output in outputs.items()}
    return {name: np.dtype(STORAGE.get(held := held_dtype(kind, dtype)) or held) for name, kind in declared.items()}


def gradient_dtypes(signature: Signature, scalars: Mapping[str, Any], names: Iterable[str], dtype: str) -> dict[str, np.dtype[Any]]:
    """A gradient has its input's dtype: float32 for trainable masters and for operations kept in float32, else the storage dtype."""
    float32 = STORAGE[held_dtype("float32", dtype)]
    if signature.precision != "storage":
        return dict.fromkeys(names, float32)
    masters = {f"parameters/{name}" for name in trainable_names(scalars)} if "trainable" in signature.gradients else set()
    return {name: float32 if name in masters else STORAGE[dtype] for name in names}


def round_to(array: Array, dtype: str) -> Array:
    """The array's values as `dtype` holds them, to nearest even, in the compute dtype. Overflow gives an infinity, as hardware does."""
    return nearest(np.asarray(array), STORAGE[dtype], compute_dtype(dtype))


def rounded_table(
    table: Table, dtype: str, replay: np.random.Generator | None = None, dither: bool = False, declared: Declared | None = None
) -> Table:
    """The same operations under the rounding of `dtype`; with a generator, one random replay of that rounding.

    In a replay inputs move by one unit roundoff of the dtype that the operation's intermediates are held in, for a rounded product of
    intermediates is the product of operands that moved; with `dither` results round stochastically as well.

    Where `intermediates: storage` is declared of an operation, the result of each of its steps is rounded, and in a replay stochastically.

    A composition stays as it is: what it calls is rounded.
    """
    given = declared or {}
    steps = {name for name, own in given.items() if own.get("intermediates") == "storage"}
    return {
        name: entry
        if isinstance(entry, Composition)
        else _Rounding(signature_of(name, given), entry, dtype, replay, dither, name in steps).wrapped()
        for name, entry in table.items()
    }


@cache
def reads_stored_output(backward: Callable[..., Any]) -> bool:
    """Whether the backward pass takes the forward pass's result `y`, as stored, that is rounded."""
    return "y" in inspect.signature(backward).parameters


class _Rounding:
    """One operation under rounding."""

    def __init__(
        self, signature: Signature, entry: Operation, dtype: str, replay: np.random.Generator | None, dither: bool, stepwise: bool
    ) -> None:
        self.signature, self.entry, self.dtype, self.replay, self.dither = signature, entry, dtype, replay, dither
        self.inner = dtype if signature.precision == "storage" else held_dtype("float32", dtype)
        self.stepwise = stepwise and is_narrow(self.inner)

    def wrapped(self) -> Operation:
        return Operation(self._forward, self.entry.backward and self._backward, self.entry.outputs)

    @np.errstate(all="ignore")
    def _forward(self, **arguments: Any) -> Any:
        results = self.entry.run(self._entering(arguments))
        rounded = tuple(self._leaving(value, self.signature.outputs[name].dtype) for name, value in results.items())
        return rounded if len(rounded) > 1 else rounded[0]

    @np.errstate(all="ignore")
    def _backward(self, *cotangents: Array, **arguments: Any) -> dict[str, Array]:
        assert self.entry.backward is not None
        declared = [self.signature.outputs[name].dtype for name in self.entry.outputs]
        upstream = [self._entered(value, held_dtype(kind, self.dtype)) for value, kind in zip(cotangents, declared, strict=True)]
        given = self._entering(arguments)
        if reads_stored_output(self.entry.backward):
            given["y"] = self._forward(**arguments)
        gradients = self._subtracted(self.entry.backward(*upstream, **given), upstream, given)
        return {name: self._leaving(value, "storage") for name, value in gradients.items()}

    def _subtracted(self, gradients: dict[str, Array], upstream: Sequence[Array], given: Mapping[str, Any]) -> dict[str, Array]:
        """In a replay, the gradient of a loss that is the logarithm of something of size `order`, with its own noise.

        It is a probability minus its target, both of that size however small the difference: where p is next to 1, p − 1 holds the rounding
        of p alone, which no small change of the logits moves. Where at equal logits the difference opposes the loss's cotangent, a target
        is subtracted; with a probability of zero there it is all that is left.
        """
        order = max(output.order for output in self.signature.outputs.values())
        if self.replay is None or not order or list(gradients) != ["logits"]:
            return gradients
        assert self.entry.backward is not None
        (cotangent,), (logits,) = upstream, gradients.values()
        sign = np.sign(cotangent).reshape(*cotangent.shape, *[1] * (logits.ndim - cotangent.ndim))
        equal = {name: np.zeros_like(value) for name, value in gradients.items()}
        opposed = {name: value * sign < 0 for name, value in self.entry.backward(*upstream, **{**given, **equal}).items()}
        never = {name: np.where(where, equal[name] - 1000, equal[name]) for name, where in opposed.items()}
        targets = self.entry.backward(*upstream, **{**given, **never})
        (generator,) = self.replay.spawn(1)
        wide, noisy = "float64" if self.dtype == "float64" else "float32", {}
        unit = UNIT_ROUNDOFF[self.inner if self.stepwise else wide]
        for name, value in gradients.items():
            terms = np.where(opposed[name], order * targets[name], 0)
            noise = generator.uniform(-1, 1, value.shape) * unit
            noisy[name] = np.asarray(value + terms * noise, value.dtype)
        return noisy

    def _entering(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self._entered(value, self._kept(name)) if isinstance(value, np.ndarray) and is_real(value) else value
            for name, value in arguments.items()
        }

    def _kept(self, name: str) -> str:
        """The dtype that an input is kept in: the scales of quantised weights stay in float32."""
        declared = self.signature.inputs[name].dtype if name in self.signature.inputs else "storage"
        return held_dtype("float32", self.dtype) if declared == "float32" else self.inner

    def _entered(self, value: Array, dtype: str) -> Array:
        rounded = round_to(value, dtype)
        if self.replay is not None:
            rounded = moved(rounded, UNIT_ROUNDOFF[self._step(rounded)], self.replay)
        if self.stepwise:
            return Stored.of(rounded, STORAGE[self.inner], UNIT_ROUNDOFF[self.inner], self.replay)
        return Tf32.of(rounded, self.replay) if self.dtype == "tf32" else rounded

    def _step(self, value: Array) -> str:
        """The dtype whose unit roundoff an input moves by in a replay."""
        if self.signature.intermediates == "storage":
            return self.inner
        return "float64" if value.dtype == np.float64 else "float32"

    def _leaving(self, value: Array, declared: str) -> Array:
        value = np.asarray(value)
        if not is_real(value) or declared == "float64":
            return value
        kept_in_float32 = declared == "float32" and value.dtype == np.float32
        if value.dtype != compute_dtype(self.inner) and not kept_in_float32:
            raise TypeError(
                f"{self.signature.name} left {compute_dtype(self.inner)} for {value.dtype}: the reference names a dtype somewhere"
            )
        dtype = held_dtype(declared, self.dtype) if self.signature.precision == "storage" else self.inner
        if self.replay is not None and self.dither and STORAGE[dtype] != value.dtype:
            value = dithered(value, UNIT_ROUNDOFF[dtype], self.replay)
        return round_to(value, dtype)
