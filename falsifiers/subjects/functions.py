"""Operations that somebody else wrote: functions of torch tensors and `torch.nn.Module`s, by the names of operations.yaml.

A function takes an operation's inputs and scalars by their names, or, where none of its parameters has such a name, in their order: inputs
first. One that takes any arguments, or tells no signature, is called in their order too; one that takes any keywords, by their names. It
returns a tensor, a tuple in the order of the outputs, or a mapping by their names. Its gradients are those of autograd.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackswan import contracts
from blackswan.contracts.conventions import Declaration, checked, declared_of, shared_out
from blackswan.contracts.model import Signature
from blackswan.contracts.problems import unknown
from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.falsifiers.subjects.protocol import COTANGENT, Lacks, Subject
from blackswan.falsifiers.subjects.repeated import Compute, Repeated, Tensors
from blackswan.reference.table import Array

Arrays = Mapping[str, Array]


class Functions(Subject):
    """A subject whose operations are functions or modules. Raises a ValueError for a name that is no operation, or a function that cannot
    be called as one. `declared` holds for each operation that has such a convention, beside what its function declares. `within` stands
    around each computation, such as `guards.Guards`; by default there is nothing."""

    def __init__(
        self,
        operations: Mapping[str, Callable[..., Any]],
        name: str,
        device: str = "cpu",
        within: Callable[[Compute, Tensors], Tensors] | None = None,
        declared: Declaration | None = None,
    ) -> None:
        known = contracts.load_operations()
        for operation in operations:
            if operation not in known:
                raise ValueError(unknown("operation", operation, sorted(known)))
        self.bound = {operation: Bound.to(known[operation], declared_of(function)[1]) for operation, function in operations.items()}
        own = {operation: checked(known[operation], declared_of(function)[0]) for operation, function in operations.items()}
        every = shared_out({operation: known[operation] for operation in operations}, declared or {})
        self._declared = {operation: {**every[operation], **found} for operation, found in own.items()}
        self.name, self.device, self._device = name, device, torch.device(device)
        self._graphs: dict[str, bool] = {}
        self._within = within or (lambda compute, tensors: compute(tensors))

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Why the operation cannot run in that dtype here; None when it can."""
        del dtype
        return None if operation in self.bound else f"{self.name} has no {operation}"

    def declares(self, operation: str) -> Declaration:
        """What its function declares, and what is declared of all."""
        return self._declared.get(operation, {})

    def run(self, operation: str, inputs: Arrays, scalars: Mapping[str, Any], dtype: str) -> dict[str, Array]:
        """The operation's outputs. Lacks where it takes none of an input or scalar that is given."""
        bound = self._bound(operation, inputs, scalars)
        with torch.no_grad():
            answer = self._within(lambda given: bound.call(given, scalars, DTYPES[dtype]), self._tensors(bound.signature, inputs, dtype))
        return {name: to_numpy(value) for name, value in answer.items()}

    def at_rows(
        self,
        operation: str,
        inputs: Arrays,
        scalars: Mapping[str, Any],
        dtype: str,
        count: int,
        rows: Sequence[int],
        cotangents: Arrays | None = None,
    ) -> dict[str, Array]:
        """These rows of its outputs, or gradients, for repeated rows. Lacks as `run` and `differentiate`, and where memory is short."""
        bound = self._bound(operation, inputs, scalars)
        tensors = self._tensors(bound.signature, inputs, dtype)
        if cotangents is None:
            whole = Repeated(bound.signature, count, rows)
            with torch.no_grad():
                answer = self._within(whole.around(lambda given: bound.call(given, scalars, DTYPES[dtype])), tensors)
            return {name: to_numpy(value) for name, value in answer.items()}
        whole = Repeated(bound.signature, count, rows, "gradients")
        compute = self._gradients(operation, bound, scalars, list(cotangents), whole.wrt(inputs), dtype)
        for name, value in cotangents.items():
            tensors[f"{COTANGENT}{name}"] = self._tensor(value, whole.cotangent_dtype(name, DTYPES[dtype]))
        answer = self._within(whole.around(compute), tensors)
        return {name: to_numpy(value) for name, value in answer.items()}

    def differentiate(
        self, operation: str, inputs: Arrays, scalars: Mapping[str, Any], cotangents: Arrays, wrt: Sequence[str], dtype: str
    ) -> dict[str, Array]:
        """The vector-Jacobian products with respect to the inputs in `wrt`, by autograd. Lacks where the result has no graph."""
        bound = self._bound(operation, inputs, scalars)
        tensors = self._tensors(bound.signature, inputs, dtype)
        wide = torch.float64 if dtype == "float64" else torch.float32  # the cotangent of a float32 loss is no number of a narrower dtype
        tensors |= {f"{COTANGENT}{name}": self._tensor(value, wide) for name, value in cotangents.items()}
        compute = self._gradients(operation, bound, scalars, list(cotangents), wrt, dtype)
        return {name: to_numpy(value) for name, value in self._within(compute, tensors).items()}

    def _gradients(
        self, operation: str, bound: "Bound", scalars: Mapping[str, Any], cotangents: Sequence[str], wrt: Sequence[str], dtype: str
    ) -> Compute:
        """A function of inputs and cotangents that computes the gradients with respect to the inputs in `wrt`."""

        def gradients(given: Tensors) -> Tensors:
            leaves = {name: given[name].detach().requires_grad_() for name in wrt}
            plain = {name: value for name, value in given.items() if not name.startswith(COTANGENT)}
            outputs = bound.call({**plain, **leaves}, scalars, DTYPES[dtype])
            roots = [name for name in cotangents if outputs[name].requires_grad]
            if self._graphs.setdefault(operation, bool(roots)) != bool(roots):
                raise RuntimeError(f"the result of {operation} requires a gradient in some cases, and in others not, where its inputs do")
            if not roots:
                raise Lacks(f"{self.name} has no backward pass of {operation}: its result does not require a gradient where its inputs do")
            upstream = [given[f"{COTANGENT}{name}"].to(outputs[name].dtype) for name in roots]
            found = torch.autograd.grad([outputs[name] for name in roots], list(leaves.values()), upstream, allow_unused=True)
            every = zip(leaves.items(), found, strict=True)
            # autograd hands a cotangent on as it is where an operation leaves it unchanged: that memory is not the subject's doing
            owned = {one.untyped_storage().data_ptr() for one in upstream}
            return {name: _gradient(leaf, value, owned) for (name, leaf), value in every}

        return gradients

    def _bound(self, operation: str, inputs: Arrays, scalars: Mapping[str, Any]) -> "Bound":
        if operation not in self.bound:
            raise Lacks(f"{self.name} has no {operation}")
        bound = self.bound[operation]
        plain = {
            name for name, scalar in bound.signature.scalars.items() if scalar.default is not None and scalars.get(name) == scalar.default
        }
        for name in (*inputs, *scalars):
            if name not in bound.takes and name not in plain:
                raise Lacks(f"{self.name} takes no {name}{bound.hint}")
        return bound

    def _tensors(self, signature: Signature, inputs: Arrays, dtype: str) -> Tensors:
        wide = torch.float64 if dtype == "float64" else torch.float32
        held = DTYPES[dtype] if signature.precision == "storage" else wide
        return {name: self._tensor(value, wide if signature.inputs[name].dtype == "float32" else held) for name, value in inputs.items()}

    def _tensor(self, value: Array, real: torch.dtype) -> Tensor:
        array = np.asarray(value, order="C")
        return torch.tensor(array, dtype=real if array.dtype.kind == "f" else None, device=self._device)


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.storage) for name, dtype in contracts.DTYPES.items()}


def _called(function: Callable[..., Any], in_order: Sequence[Any], by_name: Mapping[str, Any]) -> Any:
    """Calls it, outside of the guards' mode where torch.compile made it."""
    with _unwatched(hasattr(function, "_torchdynamo_orig_callable")):
        return function(*in_order, **by_name)


def _unwatched(compiled: bool) -> AbstractContextManager[Any]:
    """What torch.compile made of a function is called without the guards' mode, which it would compile too."""
    without: AbstractContextManager[Any] = torch._C.DisableTorchFunction() if compiled else nullcontext()
    return without


def _in_order(names: Sequence[str], given: Mapping[str, Any], signature: Signature, any_more: bool) -> list[Any]:
    """The arguments by position: a scalar that is not given is its default, an input None. One that takes any number gets no more of them
    than there are."""
    last = max((place for place, name in enumerate(names) if name in given), default=-1)
    defaults = {name: scalar.default for name, scalar in signature.scalars.items()}
    return [given.get(name, defaults.get(name)) for name in (names[: last + 1] if any_more else names)]


@dataclass(frozen=True)
class Bound:
    """A function with the signature that it is called by: `takes` are the inputs and scalars that it can be given."""

    signature: Signature
    takes: frozenset[str]
    function: Callable[[Tensors, Mapping[str, Any]], Any]
    takes_dtype: bool = False
    hint: str = ""
    """What could be done where it does not take what a case has."""

    @classmethod
    def to(cls, signature: Signature, function: Callable[..., Any]) -> "Bound":
        """Binds a function or a module. ValueError where it cannot be called with the operation's inputs and scalars."""
        if isinstance(function, torch.nn.Module):
            return cls._module(signature, function)
        if not callable(function):
            raise _misfit(signature, function, "cannot be called")
        given = Parameters.of(function)
        wanted = _arguments(signature)
        missing = [name for name, one in signature.inputs.items() if not one.optional and name not in given.names]
        more = given.any_more and missing and given.in_order == wanted[: len(given.in_order)]
        if given.fits_in_order and (more or not {*given.names} & {*wanted}):
            return cls._by_position(signature, function, given)
        for name in given.required:
            if name not in wanted and name != "dtype":
                raise _misfit(signature, function, f"needs {name}, which {signature.name} does not have")
        if missing and not given.any_keywords:
            raise _misfit(signature, function, f"does not take {missing[0]}")
        takes = frozenset(wanted) if missing else frozenset(wanted) & frozenset(given.names)

        def call(tensors: Tensors, scalars: Mapping[str, Any]) -> Any:
            every = {**tensors, **scalars}
            first = [every.pop(name) for name in takewhile(every.__contains__, given.no_keywords)]
            return _called(function, first, every)

        return cls(signature, takes, call, "dtype" in given.names)

    @classmethod
    def _by_position(cls, signature: Signature, function: Callable[..., Any], given: "Parameters") -> "Bound":
        wanted = _arguments(signature)
        needed = sum(not one.optional for one in signature.inputs.values())
        if not len(given.required) <= len(wanted) or (len(given.in_order) < needed and not given.any_more):
            raise _misfit(signature, function, f"takes {', '.join(given.names) or 'nothing'}")
        taken = wanted if given.any_more else wanted[: len(given.in_order)]

        def call(tensors: Tensors, scalars: Mapping[str, Any]) -> Any:
            return _called(function, _in_order(taken, {**tensors, **scalars}, signature, given.any_more), {})

        return cls(signature, frozenset(taken), call)

    @classmethod
    def _module(cls, signature: Signature, module: torch.nn.Module) -> "Bound":
        inner = getattr(module, "_orig_mod", None)  # where torch.compile wraps one
        plain, prefix = (inner, "_orig_mod.") if isinstance(inner, torch.nn.Module) else (module, "")
        given = Parameters.of(plain.forward)
        own: dict[str, Tensor] = dict(plain.named_parameters(recurse=False))
        own |= {name: value for name, value in plain.named_buffers(recurse=False) if name not in given.names}
        inputs, scalars = list(signature.inputs), [*signature.scalars, *signature.attributes]
        free = [name for name in inputs if name not in own]
        by_name = any(name in free for name in given.names)
        attributes = [name for name in scalars if name not in own and _settable(plain, name)]
        missing = [name for name in free if not signature.inputs[name].optional and by_name and name not in given.names]
        needed = sum(not signature.inputs[name].optional for name in free)
        taken = free if given.any_more else free[: len(given.in_order)]
        if missing or not (by_name or given.any_more or len(given.in_order) >= needed):
            raise _misfit(signature, module, f"has no input, no parameter and no buffer {', '.join(missing or free)}")

        def call(tensors: Tensors, scalars: Mapping[str, Any]) -> Any:
            before = {name: getattr(plain, name) for name in attributes if name in scalars}
            values = {**tensors, **{name: value for name, value in scalars.items() if name not in before}}
            for name in before:
                setattr(plain, name, scalars[name])
            held = {prefix + name: _held(values.pop(name), was) for name, was in own.items() if name in values}
            ordered = () if by_name else tuple(_in_order(taken, values, signature, given.any_more))
            try:
                with _unwatched(bool(prefix)):
                    return torch.func.functional_call(module, held, ordered, values if by_name else {})
            finally:
                for name, value in before.items():
                    setattr(plain, name, value)

        takes = {*own} & {*inputs, *scalars} | set(attributes) | ({*given.names} & {*inputs, *scalars} if by_name else set(taken))
        return cls(signature, frozenset(takes), call, hint=": neither its forward nor an attribute that can be set has that name")

    def call(self, tensors: Tensors, scalars: Mapping[str, Any], dtype: torch.dtype) -> Tensors:
        """The outputs by name. TypeError where the answer is no tensor a name."""
        # One that is not taken is at its default (`Functions._bound`).
        scalars = {name: value for name, value in scalars.items() if name in self.takes}
        answer = self.function(tensors, {**scalars, "dtype": dtype} if self.takes_dtype else scalars)
        names = list(self.signature.outputs)
        if isinstance(answer, Mapping):
            return dict(answer)
        values = answer if isinstance(answer, tuple | list) else (answer,)
        if len(values) != len(names) or not all(isinstance(value, Tensor) for value in values):
            kinds = ", ".join(type(value).__name__ for value in values)
            expected = "one tensor" if len(names) == 1 else f"{len(names)} tensors"
            raise TypeError(f"{self.signature.name} answered with {kinds or 'nothing'}; expected {expected}: {', '.join(names)}")
        return dict(zip(names, values, strict=True))


def _gradient(leaf: Tensor, value: Tensor | None, upstream: set[int]) -> Tensor:
    if value is None:
        return torch.zeros_like(leaf)
    return value.clone(memory_format=torch.contiguous_format) if value.untyped_storage().data_ptr() in upstream else value


def _arguments(signature: Signature) -> list[str]:
    return [*signature.inputs, *signature.scalars, *signature.attributes]


@dataclass(frozen=True)
class Parameters:
    """How a function can be called: its parameters, those that must be given, have a place, have no keyword, and whether it takes more."""

    names: list[str]
    required: list[str]
    in_order: list[str]
    no_keywords: list[str]
    any_more: bool
    any_keywords: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Parameters":
        """Those of its signature. One that tells none, as functions written in C do, takes anything in order."""
        try:
            every = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):
            return cls([], [], [], [], any_more=True, any_keywords=False)
        kinds = {one.kind for one in every}
        named = [one for one in every if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        return cls(
            [one.name for one in named],
            [one.name for one in named if one.default is one.empty],
            [one.name for one in named if one.kind is not one.KEYWORD_ONLY],
            [one.name for one in named if one.kind is one.POSITIONAL_ONLY],
            inspect.Parameter.VAR_POSITIONAL in kinds,
            inspect.Parameter.VAR_KEYWORD in kinds,
        )

    @property
    def fits_in_order(self) -> bool:
        """Whether each required parameter can be given by its place."""
        return {*self.required} <= {*self.in_order} and (bool(self.in_order) or self.any_more or not self.any_keywords)


def _settable(module: torch.nn.Module, name: str) -> bool:
    """Whether the module has an attribute of that name whose value can be replaced."""
    kind = getattr(type(module), name, None)
    return hasattr(module, name) and not (isinstance(kind, property) and kind.fset is None)


def _held(value: Any, was: Tensor) -> Tensor:
    """A tensor for the place of a parameter or buffer, which may keep a scalar."""
    return value if isinstance(value, Tensor) else torch.full_like(was, value)


def _misfit(signature: Signature, function: object, reason: str) -> ValueError:
    name = getattr(function, "__qualname__", type(function).__name__)
    expected = ", ".join(
        f"{name} (optional)" if name in signature.inputs and signature.inputs[name].optional else name for name in _arguments(signature)
    )
    return ValueError(
        f"{name} cannot be asked as {signature.name}: it {reason}; expected the parameters {expected}: wrap it in a function that has them"
    )
