"""Mutants planted into the real PyTorch model: a wrong operation in its dispatch, or a wrong step in one of its modules."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.mutants import MUTANTS, USES
from blackswan.falsifiers.numeric.precision import output_dtypes, rounded_table, signatures
from blackswan.falsifiers.subjects.implementation import DTYPES, to_numpy
from blackswan.impl.dispatch import replaced
from blackswan.reference import linear
from blackswan.reference.table import Array, Operation


class _Wrong(torch.autograd.Function):
    """An operation of a NumPy table on tensors, forward and backward."""

    @staticmethod
    def forward(ctx: Any, plant: "_Plant", scalars: dict[str, Any], names: tuple[str, ...], *tensors: Tensor) -> Any:
        """The results, in the dtypes that the signature gives."""
        arrays = {name: to_numpy(tensor) for name, tensor in zip(names, tensors, strict=True)}
        ctx.plant, ctx.arguments, ctx.names = plant, {**arrays, **scalars}, names
        outputs = plant.entry.run(ctx.arguments)
        held = output_dtypes(signatures()[plant.operation], outputs, plant.dtype)
        results = tuple(_tensor(value, held[name]) for name, value in outputs.items())
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """The gradients of the tensors that have one."""
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needed]
        gradients = ctx.plant.entry.gradients([to_numpy(value) for value in cotangents], ctx.arguments, wanted)
        given = {name: _tensor(value, ctx.arguments[name].dtype) for name, value in gradients.items()}
        return None, None, None, *(given.get(name) for name in ctx.names)


class _Plant:
    """A wrong operation under the rounding of a dtype, with the call of the right one."""

    def __init__(self, operation: str, wrong: Any, dtype: str) -> None:
        self.operation, self.dtype = operation, dtype
        entry = rounded_table({operation: wrong}, dtype)[operation]
        assert isinstance(entry, Operation)
        self.entry = entry

    def __call__(self, **arguments: Any) -> Any:
        signature = signatures()[self.operation]
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        known = {*signature.scalars, *signature.attributes, *signature.inputs}
        scalars = {name: value for name, value in arguments.items() if name not in tensors and name in known}
        return _Wrong.apply(self, scalars, tuple(tensors), *tensors.values())


def _tensor(value: Array, dtype: Any) -> Tensor:
    name = str(dtype)
    if name in DTYPES:
        return torch.tensor(value.astype("float64")).to(DTYPES[name])
    return torch.tensor(value)


Planted = AbstractContextManager[Any]
STEPS: dict[str, tuple[Callable[[], Planted], str]] = {}
"""Wrong steps by mutant: how to plant one, and the operation of the first recorded call that is then wrong."""


def step(operation: str) -> Callable[[Callable[[], Planted]], Callable[[], Planted]]:
    """Registers the planting of a composition's mutant, named as the function, whose first wrong call is of `operation`."""

    def register(plant: Callable[[], Planted]) -> Callable[[], Planted]:
        STEPS[plant.__name__] = (plant, operation)
        return plant

    return register


NOT_PLANTED = {
    "train_lora_b_premultiplied": "another parametrisation of the whole trainer, not a step of it",
    "train_lora_skipped_with_nf4": "no claim trains on NF4 weights",
}


def planting(mutant: str, dtype: str) -> Callable[[], Planted] | str:
    """Makes a context in which the real model has the mutant in it; or says why it cannot be planted."""
    operation = MUTANTS[mutant].operation
    if mutant in STEPS:
        return STEPS[mutant][0]
    if mutant in NOT_PLANTED:
        return NOT_PLANTED[mutant]
    if operation in USES:
        return "no step written for it"
    if not in_models(operation):
        return f"no model calls {operation}"
    wrong: Any = MUTANTS[mutant].entry()
    plants = {operation: _Plant(operation, wrong, dtype)}
    if operation == "nf4_dequantize":
        plants["nf4_linear"] = _Plant("nf4_linear", _product_with(wrong), dtype)
    return lambda: replaced(plants)


def _product_with(dequantize: Operation) -> Operation:
    """The fused product of a wrong dequantisation, which it contains."""

    def weight(x: Array, codes: Array, absmax: Array, rows: int, columns: int, block_size: int) -> Array:
        return np.asarray(dequantize.forward(codes=codes, absmax=absmax, rows=rows, columns=columns, block_size=block_size), x.dtype)

    def forward(x: Array, codes: Array, absmax: Array, in_features: int, out_features: int, block_size: int, bias: Any = None) -> Array:
        return linear.forward(x, weight(x, codes, absmax, out_features, in_features, block_size), bias)

    def backward(
        dy: Array, x: Array, codes: Array, absmax: Array, in_features: int, out_features: int, block_size: int, bias: Any = None
    ) -> Any:
        return linear.backward(dy, x, weight(x, codes, absmax, out_features, in_features, block_size), bias, needs=("x",))

    return Operation(forward, backward)


def in_models(operation: str) -> bool:
    """Whether `impl`'s decoder, classifier or trainer calls the operation."""
    return operation in USES or operation == "nf4_linear" or any(operation in used for used in USES.values())


def culprit(mutant: str) -> str:
    """The operation that a diagnosis must name."""
    return STEPS[mutant][1] if mutant in STEPS else MUTANTS[mutant].operation


def method(owner: type, name: str, change: Callable[..., Any]) -> Planted:
    """The owner's method replaced by `change(original, self, …)`."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda self, *args, **kwargs: change(original, self, *args, **kwargs))


def after_init(owner: type, change: Callable[[Any], None]) -> Planted:
    """Every new object of the owner's changed."""

    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        change(self)

    return method(owner, "__init__", init)


@contextmanager
def both(*plants: Planted) -> Iterator[None]:
    """All of them."""
    with ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant)
        yield
