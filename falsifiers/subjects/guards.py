"""How a computation is asked that may be wrong in ways that its numbers do not show, or that was written to pass a test.

The arguments lie between guard elements or, as a caller's would, in memory of their own, at an address, an alignment and with strides that
change with their values: the same question is put in the same way again. Each computation is asked of other values first, at the same
addresses, so that an answer kept by shape or address is the wrong one. What it allocates without filling it holds NaN, and freed memory of
its sizes too. Afterwards its arguments, the guard elements, arguments and answers of former calls and global state must be what they were.

All that watches for accidents and for the tricks that are known, in the process of the code under test, where other code can undo it. What
no code there can undo is that the answers are elsewhere, see `subjects.isolated`.

The attacks are those published on suites for kernels that language models write: robust-kbench (arXiv 2509.14279) and the lists of
KernelBench's and KernelGYM's authors (arXiv 2602.05885). `tests/cheating_subjects.py` has a subject for each.
"""

import builtins
import hashlib
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.falsifiers.subjects.repeated import Compute, Tensors
from blackswan.falsifiers.subjects.shared import Setting, difference, process_settings, random_states, torch_settings

GUARD = 64
"""Guard elements on either side of a tensor. Beside them an offset of up to 15 elements shifts the alignment."""
LAYOUTS = ("contiguous", "contiguous", "bare", "padded rows", "transposed")
"""A bare tensor is all of its memory, as a caller's is: code that looks for the guard elements finds none there."""
FORMER_TENSORS, FORMER_BYTES = 16, 1 << 24
"""How many arguments and answers of former calls must stay as they were, and how large they may be to be kept for that."""
JOINED_SECONDS = 0.2
"""For how long threads that a computation started may go on, until what they wrote is looked for."""
RECOMPILED = 1000
"""So many times a function is compiled for other dtypes, layouts and scalars."""
WATCHED: Mapping[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.linalg": torch.linalg,
    "torch.random": torch.random,
    "torch.testing": torch.testing,
    "torch.autograd": torch.autograd,
    "torch.cuda": torch.cuda,
    "torch.cuda.Event": torch.cuda.Event,
    "torch.cuda.Stream": torch.cuda.Stream,
    "numpy": np,
    "numpy.random": np.random,
    "numpy.testing": np.testing,
    "random": random,
    "builtins": builtins,
    "time": time,
}
"""What must keep the functions that it had."""


class Guards:
    """Asks computations one by one. `contiguous` and `aligned` are of one that says that it takes no other tensors, see `Placed`."""

    def __init__(self, contiguous: bool = False, aligned: bool = False) -> None:
        self._contiguous, self._aligned = contiguous, aligned
        self._former: deque[tuple[str, Tensor, Tensor]] = deque(maxlen=FORMER_TENSORS)
        self._functions = {place: dict(vars(module)) for place, module in WATCHED.items()}
        self._settings = torch_settings()

    def __call__(self, compute: Compute, tensors: Tensors) -> Tensors:
        """What `compute` answers on tensors of these values. SubjectError, or whatever it raises."""
        drawn = random.Random(_digest(tensors))  # noqa: S311  # layouts, no secrets
        placed = {name: Placed(value, drawn, self._contiguous, self._aligned) for name, value in tensors.items()}
        torch.manual_seed(drawn.getrandbits(32))
        random.random(), np.random.random()  # noqa: NPY002, S311  # so that a generator that is seeded as before has changed, too
        before, process, modules = random_states(), process_settings(), len(sys.modules)
        self._decoy(compute, placed)
        for argument in placed.values():
            argument.fill(argument.values)
        owned = self._asked(compute, placed)
        for said, value, was in self._former:
            if not _same(value, was):
                raise SubjectError(said)
        for name, argument in placed.items():
            self._keep(f"changed {name}, an argument of an earlier call", argument.buffer)
        for generator, state in random_states().items():
            if state != before[generator]:
                raise SubjectError(f"drew from {generator}'s random numbers, or seeded them")
        self._check_state()
        _check_process(process, imported=len(sys.modules) > modules)
        return owned

    def _keep(self, said: str, value: Tensor) -> None:
        if value.untyped_storage().nbytes() <= FORMER_BYTES:
            self._former.append((said, value.detach(), value.detach().clone()))

    def _decoy(self, compute: Compute, placed: Mapping[str, "Placed"]) -> None:
        """The same question of other values. It may refuse them."""
        for argument in placed.values():
            argument.fill(argument.others())
        try:
            self._asked(compute, placed)
        except (Lacks, SubjectError):
            raise
        except Exception:  # noqa: S110  # the true values may be refused too, and are asked next
            pass

    def _asked(self, compute: Compute, placed: Mapping[str, "Placed"]) -> Tensors:
        """A copy of the answer; the answer itself is kept, for it must not change later."""
        given = {name: argument.tensor for name, argument in placed.items()}
        _poison(given)
        gradients, threads = torch.is_grad_enabled(), set(threading.enumerate())
        with _recompiling(), GuardedAllocations() as allocated:
            answer = compute(given)
        if torch.is_grad_enabled() != gradients:
            torch.set_grad_enabled(gradients)
            raise SubjectError("left torch's gradient mode changed")
        for name, value in answer.items():
            if type(value) not in (Tensor, torch.nn.Parameter):
                raise SubjectError(f"{name} is a {type(value).__name__}; expected a plain torch.Tensor")
            if value.is_nested or value.layout is not torch.strided or value.is_quantized or value.is_meta:
                kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "meta": value.is_meta}
                kind = next((each for each, holds in kinds.items() if holds), str(value.layout).removeprefix("torch."))
                raise SubjectError(f"{name} is a {kind} tensor; expected a dense one that has its numbers")
            for other, argument in placed.items():
                if _shares(value, argument.buffer) and value.numel():
                    raise SubjectError(f"{name} is memory of its argument {other}; expected memory of its own")
        owned = {name: value.detach().clone() for name, value in answer.items()}
        for thread in set(threading.enumerate()) - threads:
            thread.join(JOINED_SECONDS)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for name, value in answer.items():
            if not _same(value, owned[name]):
                raise SubjectError(f"{name} was still being written when the computation returned: join its streams and threads first")
            self._keep(f"{name} of an earlier call changed: each answer needs memory of its own", value)
        allocated.check()
        for name, argument in placed.items():
            argument.check(name)
        return owned

    def _check_state(self) -> None:
        for name, value in torch_settings().items():
            if value != self._settings[name]:
                raise SubjectError(f"changed torch's {name} from {self._settings[name]} to {value}")
        for place, functions in self._functions.items():
            watched = WATCHED[place]
            now = vars(watched)
            inherited = set(now) - set(functions) if isinstance(watched, type) else set()  # one that was a base class's until now
            for name in (*functions, *inherited):
                function = functions.get(name, now.get(name))
                if (name in inherited or now.get(name) is not function) and callable(function) and not _of_a_package(now.get(name)):
                    raise SubjectError(f"replaced {place}.{name}")


class Placed:
    """A tensor's values between guard elements, in some layout, `aligned` at a multiple of 64 elements or anywhere."""

    def __init__(self, values: Tensor, rng: random.Random, contiguous: bool, aligned: bool) -> None:
        self.values = values
        layout = rng.choice(LAYOUTS[:3] if contiguous or values.dim() < 2 else LAYOUTS)
        shape = list(values.shape)
        if layout == "padded rows":
            shape[-1] += rng.randint(1, 7)
        elif layout == "transposed":
            shape[-1], shape[-2] = shape[-2], shape[-1]
        guard = 0 if layout == "bare" else GUARD
        start = guard + (0 if aligned or layout == "bare" else rng.randint(0, 15))
        count = torch.Size(shape).numel()
        self.buffer = torch.full((start + count + guard,), _guard(values.dtype), dtype=values.dtype, device=values.device)
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
        """SubjectError where anything of the memory has changed."""
        if _same(self.buffer, self._expected):
            return
        inside = not _same(self.tensor, self.values)
        raise SubjectError(f"changed its argument {name} in place" if inside else f"wrote outside of its argument {name}")


class GuardedAllocations(TorchFunctionMode):
    """Inside the block what torch.empty and its kin give out is NaN and lies between guard elements."""

    def __init__(self) -> None:
        super().__init__()
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
        """SubjectError where something was written beside what was given out."""
        for buffer, start, count in self._given:
            for edge in (buffer[:start], buffer[start + count :]):
                if not _same(edge, torch.full_like(edge, _guard(edge.dtype))):
                    raise SubjectError("wrote outside of memory that it had allocated")


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
    """Whether their memories overlap, also where another library made a tensor of an address within."""
    one, other = value.untyped_storage(), buffer.untyped_storage()
    return one.data_ptr() < other.data_ptr() + other.nbytes() and other.data_ptr() < one.data_ptr() + one.nbytes()


def _digest(tensors: Tensors) -> bytes:
    """A number made of names, shapes, dtypes and some thousand elements of the first tensor.

    A case that is asked again lies in memory as it did, and so it does where a relation that holds bit for bit changes a later tensor, such
    as weights of classes: in another layout sums may be taken in another order.
    """
    found = hashlib.sha256()
    for name, value in tensors.items():
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
    for value in list(tensors.values())[:1]:
        found.update(_bits(value.flatten()[:4096]).cpu().numpy().tobytes())
    return found.digest()


def _check_process(before: Mapping[str, Setting], imported: bool) -> None:
    """SubjectError where something of the process has changed; all is put back.

    Variables that a package adds when it is imported are removed without a word. Code that adds them again is told.
    """
    found = []
    for name, (now, _) in process_settings().items():
        was, put_back = before[name]
        if now == was:
            continue
        with suppress(OSError, ValueError, TypeError, RuntimeError):  # it is told, whether it can be put back or not
            put_back(was)
        if name == "environment" and imported:
            now = {variable: value for variable, value in now.items() if variable in was}
        if now != was:
            found.append(f"changed the {name}: {difference(was, now)}")
    if found:
        raise SubjectError("; ".join(found))


def _poison(given: Tensors) -> None:
    """Fills memory of the sizes of the arguments with NaN and frees it, which an answer that is not written would be found in."""
    for value in given.values():
        if value.is_floating_point():
            del_me = [torch.full(value.shape, float("nan"), dtype=value.dtype, device=value.device) for _ in range(4)]
            del_me.clear()


def _recompiling() -> AbstractContextManager[Any]:
    """After eight layouts torch.compile would leave a function uncompiled, and only a log would say so."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return nullcontext()
    found: AbstractContextManager[Any] = dynamo.config.patch(recompile_limit=RECOMPILED, accumulated_recompile_limit=RECOMPILED)
    return found


def _of_a_package(function: Any) -> bool:
    """Whether an installed package put it there: torch's compiler and Unsloth do when they are first imported."""
    code = getattr(function, "__code__", None)
    return code is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(code.co_filename).parts)
