"""How a computation is asked that may be wrong in ways that its numbers do not show, or that was written to pass a test.

The arguments lie between guard elements, at an address, an alignment and with strides that change from call to call. Each computation is
asked of other values first, at the same addresses, so that an answer kept by shape or address is the wrong one. What it allocates without
filling it holds NaN, and freed memory of its sizes too. Afterwards its arguments, the guard elements, its former answer and torch's global
state must be what they were.

The attacks are those published on suites for kernels that language models write: robust-kbench (arXiv 2509.14279) and the lists of
KernelBench's and KernelGYM's authors (arXiv 2602.05885). `tests/cheating_subjects.py` has a subject for each.
"""

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from blackswan.falsifiers.subjects.functions import Compute, Tensors
from blackswan.falsifiers.subjects.protocol import Lacks

GUARD = 64
"""Guard elements on either side of a tensor. Beside them an offset of up to 15 elements shifts the alignment."""
LAYOUTS = ("contiguous", "contiguous", "padded rows", "transposed")
WATCHED: Mapping[str, Any] = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor, "time": time}
"""What must keep the functions that it had."""


class Tampered(Exception):  # noqa: N818  # a finding about the subject
    """The computation touched what is not its own, or answered with what is not."""


class Guards:
    """Asks computations one by one. `contiguous` and `aligned` are of one that says that it takes no other tensors, see `Placed`."""

    def __init__(self, seed: int = 0, contiguous: bool = False, aligned: bool = False) -> None:
        self._random, self._contiguous, self._aligned = random.Random(seed), contiguous, aligned  # noqa: S311  # layouts, no secrets
        self._functions = {place: dict(vars(module)) for place, module in WATCHED.items()}
        self._settings = torch_settings()

    def __call__(self, compute: Compute, tensors: Tensors) -> Tensors:
        """What `compute` answers on tensors of these values. Tampered, or whatever it raises."""
        placed = {name: Placed(value, self._random, self._contiguous, self._aligned) for name, value in tensors.items()}
        torch.manual_seed(self._random.getrandbits(32))
        drawn = torch.get_rng_state()
        self._decoy(compute, placed)
        kept, former = self._kept
        for argument in placed.values():
            argument.fill(argument.values)
        answer = self._asked(compute, placed)
        owned = {name: value.detach().clone() for name, value in answer.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for name, value in answer.items():
            if not _same(value, owned[name]):
                raise Tampered(f"{name} was still being written when the computation returned: join its streams first")
        for name, value in kept.items():
            if not _same(value, former[name]):
                raise Tampered(f"{name} of an earlier call changed: each answer needs memory of its own")
        if not torch.equal(drawn, torch.get_rng_state()):
            raise Tampered("drew from torch's random numbers, or seeded them")
        self._check_state()
        return owned

    _kept: tuple[Tensors, Tensors] = ({}, {})

    def _decoy(self, compute: Compute, placed: Mapping[str, "Placed"]) -> None:
        """The same question of other values: what it answers is kept, for it must not change later. It may refuse them."""
        for argument in placed.values():
            argument.fill(argument.others())
        try:
            answer = self._asked(compute, placed)
            self._kept = answer, {name: value.detach().clone() for name, value in answer.items()}
        except (Tampered, Lacks):
            raise
        except Exception:
            self._kept = {}, {}

    def _asked(self, compute: Compute, placed: Mapping[str, "Placed"]) -> Tensors:
        given = {name: argument.tensor for name, argument in placed.items()}
        _poison(given)
        gradients = torch.is_grad_enabled()
        with GuardedAllocations(self._random) as allocated:
            answer = compute(given)
        if torch.is_grad_enabled() != gradients:
            torch.set_grad_enabled(gradients)
            raise Tampered("left torch's gradient mode changed")
        for name, value in answer.items():
            if type(value) not in (Tensor, torch.nn.Parameter):
                raise Tampered(f"{name} is a {type(value).__name__}; expected a plain torch.Tensor")
            for other, argument in placed.items():
                if _shares(value, argument.buffer) and value.numel():
                    raise Tampered(f"{name} is memory of its argument {other}; expected memory of its own")
        allocated.check()
        for name, argument in placed.items():
            argument.check(name)
        return answer

    def _check_state(self) -> None:
        for name, value in torch_settings().items():
            if value != self._settings[name]:
                raise Tampered(f"changed torch's {name} from {self._settings[name]} to {value}")
        for place, functions in self._functions.items():
            now = vars(WATCHED[place])
            for name, function in functions.items():
                if now.get(name) is not function and callable(function) and not _of_a_package(now.get(name)):
                    raise Tampered(f"replaced {place}.{name}")


class Placed:
    """A tensor's values between guard elements, in some layout, `aligned` at a multiple of 64 elements or anywhere."""

    def __init__(self, values: Tensor, rng: random.Random, contiguous: bool, aligned: bool) -> None:
        self.values = values
        layout = "contiguous" if contiguous or values.dim() < 2 else rng.choice(LAYOUTS)
        shape = list(values.shape)
        if layout == "padded rows":
            shape[-1] += rng.randint(1, 7)
        elif layout == "transposed":
            shape[-1], shape[-2] = shape[-2], shape[-1]
        start = GUARD + (0 if aligned else rng.randint(0, 15))
        count = torch.Size(shape).numel()
        self.buffer = torch.full((start + count + GUARD,), _guard(values.dtype), dtype=values.dtype, device=values.device)
        inner = self.buffer[start : start + count].view(shape)
        self.tensor = inner.transpose(-1, -2) if layout == "transposed" else inner[..., : values.shape[-1]] if values.dim() else inner
        self._expected = self.buffer

    def others(self) -> Tensor:
        """Other values of the same kind: the same ones in another order, real numbers negated too."""
        rolled = self.values.flatten().roll(1).reshape(self.values.shape)
        return -0.5 * rolled if rolled.is_floating_point() else rolled

    def fill(self, values: Tensor) -> None:
        """Puts values where the tensor lies."""
        with torch.no_grad():
            self.tensor.copy_(values)
        self._expected = self.buffer.clone()

    def check(self, name: str) -> None:
        """Tampered where anything of the memory has changed."""
        if _same(self.buffer, self._expected):
            return
        inside = not _same(self.tensor, self.values)
        raise Tampered(f"changed its argument {name} in place" if inside else f"wrote outside of its argument {name}")


class GuardedAllocations(TorchFunctionMode):
    """Inside the block what torch.empty and its kin give out is NaN and lies between guard elements."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._random = rng
        self._given: list[tuple[Tensor, int, int]] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """torch's hook for calls of its functions."""
        found = function(*arguments, **(keywords or {}))
        if function in _ALLOCATING and type(found) is Tensor and found.layout is torch.strided and found.is_contiguous():
            return self._guarded(found)
        return found

    def _guarded(self, plain: Tensor) -> Tensor:
        count = plain.numel()
        buffer = torch.full((count + 2 * GUARD,), _guard(plain.dtype), dtype=plain.dtype, device=plain.device)
        self._given.append((buffer, GUARD, count))
        return buffer[GUARD : GUARD + count].view(plain.shape).requires_grad_(plain.requires_grad)

    def check(self) -> None:
        """Tampered where something was written beside what was given out."""
        for buffer, start, count in self._given:
            for edge in (buffer[:start], buffer[start + count :]):
                if not _same(edge, torch.full_like(edge, _guard(edge.dtype))):
                    raise Tampered("wrote outside of memory that it had allocated")


_ALLOCATING = (torch.empty, torch.empty_like, Tensor.new_empty)


def _guard(dtype: torch.dtype) -> Any:
    """NaN, or the number that does most harm as an index."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, whatever NaN is in them."""
    return one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(value: Tensor) -> Tensor:
    plain = value.detach().clone(memory_format=torch.contiguous_format)  # an axis of one may have any stride, which view refuses
    return plain.view(torch.uint8) if value.dim() else plain.reshape(1).view(torch.uint8)


def _shares(value: Tensor, buffer: Tensor) -> bool:
    return value.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def _poison(given: Tensors) -> None:
    """Fills memory of the sizes of the arguments with NaN and frees it, which an answer that is not written would be found in."""
    for value in given.values():
        if value.is_floating_point():
            del_me = [torch.full(value.shape, float("nan"), dtype=value.dtype, device=value.device) for _ in range(4)]
            del_me.clear()


def _of_a_package(function: Any) -> bool:
    """Whether an installed package put it there: torch's compiler and Unsloth do when they are first imported."""
    code = getattr(function, "__code__", None)
    return code is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(code.co_filename).parts)


def torch_settings() -> dict[str, Any]:
    """torch's settings that change what others compute."""
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "TF32 of cuBLAS": torch.backends.cuda.matmul.allow_tf32,
        "TF32 of cuDNN": torch.backends.cudnn.allow_tf32,
    }
