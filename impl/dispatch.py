"""The one way from a model to an operation: named calls that can be recorded and replaced.

The blocks below hold for all threads, since a GPU's backward pass computes in one of its own. Those of several threads may overlap where
they are `scope`s, which every step is in; of the others each puts back what it found, and one thread at a time may be in them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from blackswan.impl import kernels as triton_kernels
from blackswan.impl.operations import OPERATIONS

OUTPUTS: dict[str, tuple[str, ...]] = {
    "weighted_cross_entropy": ("loss",),
    "cross_entropy_per_sample": ("losses",),
    "bce_with_logits": ("loss",),
    "lm_cross_entropy": ("loss",),
    "nf4_quantize": ("codes", "absmax"),
    "nf4_dequantize": ("weight",),
    "nf4_double_quantize": ("codes", "scales", "offset"),
    "nf4_double_dequantize": ("absmax",),
    "adamw_step": ("parameter", "exp_avg", "exp_avg_sq"),
    "clip_by_global_norm": ("gradients", "norm"),
    "average_gradients": ("gradient",),
    "learning_rate_schedule": ("rates",),
}


@dataclass
class Call:
    """One recorded call. Inputs and outputs are the tensors themselves; None is an absent optional input."""

    path: str
    operation: str
    inputs: dict[str, Tensor | None]
    scalars: dict[str, Any]
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def input_gradients(self) -> dict[str, Tensor]:
        """After a backward pass: this call's own share of the gradient of each input that has one."""
        return _gradients(self.inputs)

    def output_gradients(self) -> dict[str, Tensor]:
        """After a backward pass: the cotangent that arrived at each output."""
        return _gradients(self.outputs)


Around = Callable[[str, str, Callable[..., Any], Mapping[str, Any]], Any]
"""What stands around a call: path, operation, function and arguments to the function's result."""

_replacements: Mapping[str, Callable[..., Any]] = {}
_calls: list[Call] | None = None
_around: Around | None = None
_prefix = ""
_scopes: tuple[list[str], ...] = ()
_lock = Lock()
_backend = "auto"


def call(path: str, operation: str, /, **arguments: Any) -> Any:
    """Runs an operation by name; `path` says where in the model. Arguments are the operation's inputs and scalars by name."""
    function = _replacements.get(operation) or _kernel(operation, arguments) or OPERATIONS[operation]
    if _around is not None:
        function = partial(_surrounded, _around, _prefix + path, operation, function)
    if _calls is None:
        return function(**arguments)
    record = _record_inputs(_prefix + path, operation, arguments)
    result = function(**{**arguments, **{name: value for name, value in record.inputs.items() if value is not None}})
    results = result if isinstance(result, tuple) else (result,)
    record.outputs = dict(zip(OUTPUTS.get(operation, ("y",)), results, strict=True))
    for value in results:
        if value.requires_grad:
            value.retain_grad()
    _calls.append(record)
    return result


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Collects every call inside the block, in order, but for those inside a recording within it. After a backward pass gradients
    can be read from the calls."""
    global _calls
    before, _calls = _calls, []
    try:
        yield _calls
    finally:
        _calls = before


@contextmanager
def replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Runs `functions` in place of the operations of those names inside the block. Raises a KeyError for an unknown name."""
    global _replacements
    unknown = sorted(set(functions) - set(OPERATIONS))
    if unknown:
        raise KeyError(f"no operation is named {unknown[0]!r}; there are {', '.join(sorted(OPERATIONS))}")
    before, _replacements = _replacements, {**_replacements, **functions}
    try:
        yield
    finally:
        _replacements = before


@contextmanager
def wrapping(around: Around) -> Iterator[None]:
    """Every call inside the block goes through `around`, which runs the function itself."""
    global _around
    before, _around = _around, around
    try:
        yield
    finally:
        _around = before


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Puts `name.` before the path of every call recorded inside the block, which may end after one that began later in another thread."""
    own = [name]
    _rename(lambda scopes: (*scopes, own))
    try:
        yield
    finally:
        _rename(lambda scopes: tuple(each for each in scopes if each is not own))


def _rename(change: Callable[[tuple[list[str], ...]], tuple[list[str], ...]]) -> None:
    global _scopes, _prefix
    with _lock:
        _scopes = change(_scopes)
        _prefix = "".join(f"{name}." for (name,) in _scopes)


@contextmanager
def backend(choice: str) -> Iterator[None]:
    """What computes the operations inside the block that have Triton kernels (`impl.kernels.NAMES`), float64 aside: torch does that.

    `auto`, the default: Triton on tensors of a CUDA device, where it is installed, and else torch. `torch` and `triton`: that one.
    Raises a ValueError for another choice and a RuntimeError for `triton` where that cannot run.
    """
    global _backend
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"backend {choice!r}: expected auto, torch or triton")
    if choice == "triton" and (reason := triton_kernels.why_not()):
        raise RuntimeError(reason)
    before, _backend = _backend, choice
    try:
        yield
    finally:
        _backend = before


@contextmanager
def without_content(device: torch.device) -> Iterator[None]:
    """Tensors that have shapes and no content (`meta`) go the way that those of `device` would, which need not be here.

    Where `backend` has not chosen, that is Triton's for a CUDA device if Triton can be imported, and torch's if not.
    """
    global _backend
    automatic = "triton" if device.type == "cuda" and triton_kernels.missing() is None else "torch"
    before, _backend = _backend, automatic if _backend == "auto" else _backend
    try:
        yield
    finally:
        _backend = before


def backend_on(device: torch.device) -> str:
    """What computes those operations here on tensors of the device: `triton` or `torch`."""
    automatic = "triton" if device.type == "cuda" and triton_kernels.why_not() is None else "torch"
    return automatic if _backend == "auto" else _backend


def describe_backend(device: torch.device) -> str:
    """`backend_on` in words, with the reason where Triton's would have been expected."""
    chosen = backend_on(device)
    if chosen == "triton":
        return f"Triton for {', '.join(triton_kernels.NAMES)}; torch for the others"
    reason = triton_kernels.why_not() if device.type == "cuda" and _backend == "auto" else None
    return f"torch ({reason})" if reason else "torch"


def _kernel(operation: str, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The kernel that computes the operation on these arguments; None where torch does."""
    if _backend == "torch" or operation not in triton_kernels.NAMES:
        return None
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if torch.float64 in (arguments.get("dtype"), *(value.dtype for value in tensors)) or backend_on(tensors[0].device) == "torch":
        return None
    from blackswan.impl.kernels.functions import OPERATIONS as STAND_INS  # imports Triton

    return STAND_INS[operation]


def _surrounded(around: Around, path: str, operation: str, function: Callable[..., Any], **arguments: Any) -> Any:
    return around(path, operation, function, arguments)


def _record_inputs(path: str, operation: str, arguments: Mapping[str, Any]) -> Call:
    inputs = {name: _local(value) for name, value in arguments.items() if isinstance(value, Tensor)}
    absent = {name: None for name, value in arguments.items() if value is None}
    scalars = {name: value for name, value in arguments.items() if name not in inputs and name not in absent}
    return Call(path, operation, {**inputs, **absent}, scalars)


def _local(value: Tensor) -> Tensor:
    """An identity of `value` of its own, so that its gradient is this call's share and later changes in place do not reach the record."""
    if isinstance(value, torch.nn.Parameter) and not value.requires_grad:
        return value  # frozen: it neither changes nor has a gradient, and it is large
    local = value.clone()
    if local.requires_grad:
        local.retain_grad()
    return local


def _gradients(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    found = {name: value.grad for name, value in tensors.items() if value is not None and value.requires_grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}
