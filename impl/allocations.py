"""Counts the memory that a computation allocates, by what it is for, on tensors that have shapes and no content."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 512
"""Bytes: what CUDA's caching allocator rounds every allocation up to."""
WORKING, DEQUANTIZED, SAVED = "working", "dequantised_weights", "activations"


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Every storage on `device` that is allocated inside the block, from its first tensor until the last reference to it is gone.

    A storage belongs to a part: the one that `part` named when it was allocated, or a later `assign`. What autograd saves for the
    backward pass becomes part of SAVED. `peak` is the largest sum, `largest` the largest of each part by itself.
    """

    def __init__(self, device: str, block: int = BLOCK) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.total, self.peak = 0, 0
        self.parts: dict[str, int] = defaultdict(int)
        self.largest: dict[str, int] = defaultdict(int)
        self._device, self._block, self._part = device, block, WORKING
        self._storages: dict[int, tuple[int, str]] = {}
        self._known: dict[Any, Any] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is allocated inside the block belongs to that part."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def assign(self, tensor: Tensor, part: str, only: str | None = None) -> None:
        """The tensor's storage belongs to `part` from now on, if it belongs to `only` now where that is given."""
        key = tensor.untyped_storage()._cdata
        size, now = self._storages.get(key, (0, part))
        if now != part and only in (None, now):
            self._storages[key] = (size, part)
            self._add(now, -size)
            self._add(part, size)

    def assign_all(self, of: str, part: str) -> None:
        """All that belongs to `of` belongs to `part` from now on."""
        for key, (size, now) in self._storages.items():
            if now == of:
                self._storages[key] = (size, part)
        size = self.parts[of]
        self._add(of, -size)
        self._add(part, size)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside the block is taken note of."""

        def pack(tensor: Tensor) -> Tensor:
            self.assign(tensor, SAVED, only=WORKING)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs the operation and takes note of what it has allocated. A value that is asked for is 1, true: there is no content."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        kwargs = kwargs or {}
        given = {value.untyped_storage()._cdata for value in _tensors((*args, *kwargs.values()))}
        result = self._run(func, args, kwargs, given)
        for value in _tensors((result,)):
            if value.device.type == self._device:
                self._take(value, given)
        return result

    def _run(self, func: Any, args: Any, kwargs: Mapping[str, Any], given: set[int]) -> Any:
        """The operation's result. A new tensor without content is like the one that it made before of operands of the same form: to
        derive that form torch takes ten times as long, in Python."""
        operands = (func, _form(args), _form(tuple(kwargs.items())))
        if operands in self._known:
            _, shape, stride, dtype, device = self._known[operands]
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_meta:
            storage = result.untyped_storage()
            if storage._cdata not in given and storage.nbytes() == result.nbytes:
                self._known[operands] = _form(result)
        return result

    def _take(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages and key not in given:
            size = -(-storage.nbytes() // self._block) * self._block
            self._storages[key] = (size, self._part)
            weakref.finalize(storage, self._drop, key)
            self._add(self._part, size)

    def _drop(self, key: int) -> None:
        size, part = self._storages.pop(key)
        self._add(part, -size)

    def _add(self, part: str, size: int) -> None:
        self.parts[part] += size
        self.total += size
        self.largest[part] = max(self.largest[part], self.parts[part])
        self.peak = max(self.peak, self.total)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _form(value: Any) -> Any:
    """What a result's form depends on; a number is another one in another type."""
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_form, value)) if isinstance(value, list | tuple) else (type(value), value)


@contextmanager
def kernels_of(device_type: str) -> Iterator[None]:
    """On tensors without content, functions allocate and save what that device's kernels do. To be entered inside an `Allocations`."""
    with ExitStack() as stack:
        stack.enter_context(_Kernels({"cuda": _CUDA, "cpu": _CPU}[device_type]))
        stack.enter_context(_Composed({"cuda": _CUDA_COMPOSED, "cpu": _CPU_COMPOSED}[device_type]))
        yield


class _Kernels(TorchFunctionMode):
    """Library functions that choose a kernel by the device."""

    def __init__(self, kernels: "Kernels") -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return self._kernels.get(func, func)(*args, **(kwargs or {}))


class _Composed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Operations that run others below where a dispatch mode looks, with what those allocate in passing."""

    def __init__(self, composed: "Kernels") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._composed = composed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return self._composed.get(func, func)(*args, **(kwargs or {}))


class _FusedRmsNorm(torch.autograd.Function):
    """What CUDA's fused kernel allocates: output and 1/rms, [rows], which it keeps with its input and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004  the signature is torch's
        return torch.empty_like(cotangents[0]), None


def _cuda_rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor, eps: float) -> Tensor:
    del normalized_shape, eps
    y: Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]  # torch
    return y


def _cuda_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float) -> Tensor:
    """Float32 (and float64) unfused, as impl.operations.attention asks for; narrower types by the memory-efficient kernel."""
    if q.dtype in (torch.float32, torch.float64):
        unfused: Tensor = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, _bias(attn_mask, q.dtype), scale=scale)[0]
        return unfused
    bias = _bias(attn_mask, q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    y: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)[0]
    return y


def _cpu_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float) -> Tensor:
    bias = _bias(attn_mask, q.dtype)
    y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)[0]
    return y


def _safe_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax, and zero in rows that are masked throughout."""
    weights = torch.softmax(scores, dim, dtype)
    masked = scores.eq(-torch.inf)
    return torch.where(masked.all(dim, keepdim=True), 0.0, weights)


def _cuda_softmax_backward(gradient: Tensor, weights: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """CUDA's kernel is given the product, which is there until it has run."""
    product = gradient * weights
    result: Tensor = torch.ops.aten._softmax_backward_data.default(product, weights, dim, dtype)
    return result


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


Kernels = Mapping[Any, Callable[..., Tensor]]
_CUDA: Kernels = {functional.rms_norm: _cuda_rms_norm, functional.scaled_dot_product_attention: _cuda_attention}
_CPU: Kernels = {functional.scaled_dot_product_attention: _cpu_attention}
_CPU_COMPOSED: Kernels = {torch.ops.aten._safe_softmax.default: _safe_softmax}
_CUDA_COMPOSED: Kernels = {**_CPU_COMPOSED, torch.ops.aten._softmax_backward_data.default: _cuda_softmax_backward}
