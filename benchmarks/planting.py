"""Mutants planted into the real PyTorch model: a wrong operation in its dispatch, a wrong composition in the order of its calls.

A wrong composition is the catalogue's own. It is built on a tape that holds the real model's tensors; where it comes to the correct
composition, the real model runs instead, and each of its calls is made as the variation has it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.mutants import MUTANTS, USES
from blackswan.falsifiers.mutants.variation import Made, VariedTape
from blackswan.falsifiers.numeric.precision import output_dtypes, rounded_table, signatures
from blackswan.falsifiers.subjects import implementation
from blackswan.falsifiers.subjects.implementation import DTYPES, to_numpy
from blackswan.impl import dispatch
from blackswan.impl.dispatch import replaced
from blackswan.reference import TABLE, linear
from blackswan.reference.table import Array, Composition, Operation, Scalars
from blackswan.reference.tape import Tape


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
COMPOSITIONS = ("decoder_forward", "classifier_forward", "train_steps")
"""The compositions whose mutants are planted."""
NOT_PLANTED = {
    "train_lora_b_premultiplied": "another parametrisation of the whole trainer, not a change of its calls",
    "train_lora_skipped_with_nf4": "no claim trains on NF4 weights",
}
FIRST_WRONG = {
    "nf4_not_applied": "nf4_quantize",
    "nf4_double_not_applied": "nf4_double_quantize",
    "train_class_weights_dropped": "weighted_cross_entropy",
    "train_moves_base_weights": "rms_norm",
}
"""By mutant, the operation of the first recorded call that is wrong. Here stand those that change no call; the others are entered when
they are planted and run."""
READER = {"average_gradients": "clip_by_global_norm", "learning_rate_schedule": "adamw_step"}
"""Operation of the training loop → the one that reads its result, which is the first wrong one if that result changes after its call."""


def planting(mutant: str, dtype: str) -> Callable[[], Planted] | str:
    """Makes a context in which the real model has the mutant in it; or says why it cannot be planted."""
    operation = MUTANTS[mutant].operation
    if mutant in NOT_PLANTED:
        return NOT_PLANTED[mutant]
    if operation in COMPOSITIONS:
        return partial(_varied_model, mutant, dtype)
    if operation in USES:
        return f"mutants of {operation} are not planted"
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
    """The operation that a diagnosis must name, once the mutant was planted and the model ran."""
    operation = MUTANTS[mutant].operation
    return FIRST_WRONG[mutant] if operation in COMPOSITIONS else operation


class _Values(MutableMapping[str, Array]):
    """A tape's view of tensors: reading gives an array on the tensor's memory, writing puts another tensor in its place."""

    def __init__(self, tensors: dict[str, Tensor], written: Callable[[str], None]) -> None:
        self.tensors, self._written = tensors, written

    def __getitem__(self, name: str) -> Array:
        return to_numpy(self.tensors[name])

    def __setitem__(self, name: str, value: Array) -> None:
        before = self.tensors.get(name)
        array = np.asarray(value)
        self.tensors[name] = _tensor(array, array.dtype) if before is None else _tensor(array, array.dtype).to(before.dtype)
        if before is not None:
            self._written(name)

    def __delitem__(self, name: str) -> None:
        del self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __ior__(self, other: Mapping[str, Array]) -> "_Values":
        self.update(other)
        return self


class _LiveTape(Tape):
    """A tape on the tensors of a real model, whose calls are those of `impl.dispatch`."""

    def __init__(self, mutant: str, model: Any, dtype: str) -> None:
        self.tensors = {name.removeprefix("parameters/"): value for name, value in model.tensors.items()}
        super().__init__(rounded_table(TABLE, dtype), _Values(self.tensors, self._altered))  # type: ignore[arg-type]  # read and written alike
        self.mutant, self.model = mutant, model
        self.training = MUTANTS[mutant].operation == "train_steps"
        self.asked, self.ran = "", False
        self.given: dict[str, tuple[Any, Any]] = {}
        self.made: dict[str, str] = {}
        """The operation that made a value."""
        self.varying: VariedTape | None = None

    def build(self) -> None:
        """The wrong composition up to the correct one, whose tensors and scalars the real model then takes."""

        def build(varying: Tape, scalars: Scalars) -> None:
            assert isinstance(varying, VariedTape) or varying is self
            self.varying = varying if isinstance(varying, VariedTape) else None
            self.model.scalars = scalars

        wrong = MUTANTS[self.mutant].make(Composition(build))
        wrong.build(self, self.model.scalars)
        names = {name: name.removeprefix("parameters/") for name in self.model.tensors}
        self.model.tensors = {name: self.tensors[plain] for name, plain in names.items() if plain in self.tensors}
        self.model.parameters = {plain: self.tensors[plain] for name, plain in names.items() if name != plain and plain in self.tensors}

    def through(self, path: str, operation: str, arguments: dict[str, Any]) -> Any:
        """A call of the real model as the variation has it."""
        path = dispatch._prefix + path if self.training else path
        if self.varying is None:
            return self._really(path, operation, arguments)
        if operation == "nf4_linear":
            return self._product(path, arguments)
        names = {name: self._name(path, operation, name, value) for name, value in arguments.items()}
        self.given = {name: (names[name], value) for name, value in arguments.items()}
        self.asked, self.ran = path, False
        found = self.varying.change(Made(self.varying, path, operation, names))
        if not self.ran:
            self._wrong(operation)
        outputs = dispatch.OUTPUTS.get(operation, ("y",))
        return self.tensors[found] if len(outputs) == 1 or not self.ran else tuple(self.tensors[f"{path}.{name}"] for name in outputs)

    def _product(self, path: str, arguments: dict[str, Any]) -> Any:
        """The fused product, which the reference makes as a dequantisation and a product: of another weight if the variation has one."""
        assert self.varying is not None
        dequantized = f"{path}.weight.dequantized"
        weight = self.varying.change(_Unmade(self.varying, dequantized, "nf4_dequantize", {}))
        if weight == dequantized:
            return self._really(path, "nf4_linear", arguments)
        self._wrong("nf4_dequantize")
        return self._really(path, "linear", {"x": arguments["x"], "weight": self.tensors[weight], "bias": arguments["bias"]})

    def call(self, path: str, operation: str, /, **arguments: Any) -> str:
        """The call with named values, made by `impl`; values that the model did not give come in the dtype of those that it gave."""
        own = self.given if path == self.asked else {}
        self.ran = self.ran or path == self.asked
        if own and any(own.get(name, (None, None))[0] is not value and own[name][0] != value for name, value in arguments.items()):
            self._wrong(operation)
        tensors = {name: self._value(own.get(name), value) for name, value in arguments.items()}
        if operation == "nf4_dequantize":
            tensors.setdefault("dtype", self.model.dtype)
        result = self._really(path, operation, tensors)
        outputs = dispatch.OUTPUTS.get(operation, ("y",))
        results = dict(zip(outputs, result if isinstance(result, tuple) else (result,), strict=True))
        names = {output: path if len(outputs) == 1 else f"{path}.{output}" for output in results}
        for output, name in names.items():
            self.tensors[name], self.made[name] = results[output], operation
        return next(iter(names.values()))

    def _really(self, path: str, operation: str, arguments: Mapping[str, Any]) -> Any:
        return dispatch.call(path.removeprefix(dispatch._prefix), operation, **arguments)

    def _value(self, own: tuple[Any, Any] | None, value: Any) -> Any:
        if own is not None and own[0] is value:
            return own[1]
        if not isinstance(value, str) or value not in self.tensors:
            return value
        tensor = self.tensors[value]
        like = own[1] if own is not None else None
        return tensor.to(like.dtype) if isinstance(like, Tensor) and like.is_floating_point() else tensor

    def _name(self, path: str, operation: str, argument: str, value: Any) -> Any:
        """The reference's name of an argument: of a result, an input or a parameter; else one of its own. What is no tensor stays."""
        if not isinstance(value, Tensor):
            return value
        for name, tensor in self.tensors.items():
            if tensor is value:
                return name
        known = _parameter(path, operation, argument, self.tensors)
        if operation != "adamw_step" and (known not in self.tensors or self.tensors[known].shape != value.shape):
            known = f"{path}:{argument}"
        self.tensors[known] = value
        return known

    def _altered(self, name: str) -> None:
        if name in self.made:
            self._wrong(READER.get(self.made[name], self.made[name]) if not name.endswith(".loss") else self.made[name])

    def _wrong(self, operation: str) -> None:
        FIRST_WRONG.setdefault(self.mutant, operation)


def _parameter(path: str, operation: str, argument: str, known: Mapping[str, Tensor]) -> str:
    """The name of an input or parameter that a call of the reference has as that argument."""
    if argument in ("input_ids", "mask", "labels", "class_weights", "positions"):
        return argument
    if path == "lm_head":
        return "lm_head.weight" if "lm_head.weight" in known else "model.embed_tokens.weight"
    if operation == "adamw_step":
        return {"gradient": path.replace("adamw", "clip.gradient"), "parameter": "initial"}.get(argument, f"initial.{argument}")
    return f"{path}.{ {'lora_a': 'lora_A.weight', 'lora_b': 'lora_B.weight'}.get(argument, argument) }"


class _Unmade(Made):
    """A call that is asked about and not made."""

    def run(self, **changes: Any) -> str:
        """Its result's name."""
        del changes
        return self.path


@contextmanager
def _varied_model(mutant: str, dtype: str) -> Iterator[None]:
    """The model of each case, built and called as the mutant has it."""
    model, live = implementation._Model, {}
    original = model.__init__

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        live["tape"] = tape = _LiveTape(mutant, self, dtype)
        tape.build()

    def call(path: str, operation: str, /, **arguments: Any) -> Any:
        return live["tape"].through(path, operation, arguments)

    modules = [module for name, module in sys.modules.items() if name.startswith("blackswan.impl.") and module is not dispatch]
    with ExitStack() as stack:
        stack.enter_context(patch.object(model, "__init__", init))
        for module in modules:
            if vars(module).get("call") is dispatch.call:
                stack.enter_context(patch.object(module, "call", call))
        yield
