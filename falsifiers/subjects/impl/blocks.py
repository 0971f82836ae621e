"""Blocks of `impl` inside which something holds, and what a program sees of it."""

import builtins
import fcntl
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.subjects.protocol import Session
from blackswan.impl import dispatch, folder, kernels, validation
from blackswan.impl.allocations import Allocations
from blackswan.impl.folder import LOCK
from blackswan.impl.operations import attention, nf4
from blackswan.impl.validation import NonFiniteError

CHOICES = ("torch", "triton", "auto")
LIBRARY = "bitsandbytes.functional"
LONGEST, MOMENT = 60.0, 0.1
"""Seconds that an import may take, and that one thread is given to come to it beside another."""


class Block(Session):
    """Blocks of one kind, which are entered with a number: 0, 1 or 2. Each number stands for something else where the kind has more than
    one thing to say."""

    def __init__(self, kind: str, place: Path) -> None:
        self._kind, self._open = kind, list[tuple[int, AbstractContextManager[Any], Any]]()
        self._counted, self._around = Allocations("meta"), ""
        self._folder, self._taken_over = place, 0
        self._attention = self._see_exact()
        self._lock_as_it_was: int | None = None
        self._removed_while_free = 0

    def enter(self, number: int) -> None:
        """Enters one more block."""
        block = self._made(number)
        with mock.patch("blackswan.impl.kernels.why_not", return_value=None):
            self._open.append((number, block, block.__enter__()))

    def leave(self, failing: bool) -> None:
        """Leaves the innermost block, with an error or without."""
        error, before = ArithmeticError("inside the block"), self._recorded()
        with mock.patch.multiple(os, unlink=self._removing(os.unlink), remove=self._removing(os.remove)):
            self._open.pop()[1].__exit__(*(type(error), error, None) if failing else (None, None, None))
        self._taken_over += sum(self._recorded()) - sum(before[:-1])

    def leave_the_first(self) -> None:
        """Leaves the block that was entered first, as a thread may that is done before another one."""
        self._open.append(self._open.pop(0))
        self.leave(False)

    def put_back(self) -> None:
        """Gives torch its choices for attention again, which a wrong block has changed for the whole process."""
        for name, chosen in self._attention.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(chosen)

    def seen(self) -> dict[str, Any]:
        """What a program sees where it is."""
        look: Callable[[], dict[str, Any]] = getattr(self, f"_see_{self._kind}")
        return look()

    def seen_beside(self) -> dict[str, Any]:
        """The same as a new thread sees it: a GPU's backward pass computes in a thread of its own."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self.seen).result()

    def _made(self, number: int) -> AbstractContextManager[Any]:
        """Number 0 replaces one operation, 1 two and 2 the other."""
        if self._kind == "replaced":
            named = (("residual_add",), ("residual_add", "swiglu"), ("swiglu",))[number]
            return dispatch.replaced({name: lambda **_: torch.tensor(10.0 + number) for name in named})
        if self._kind == "backend":
            return dispatch.backend(CHOICES[number])
        on_a_card: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32)
        made: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "recording": dispatch.recording,
            "wrapping": partial(dispatch.wrapping, partial(self._surround, number)),
            "scope": partial(dispatch.scope, str(number)),
            "unchecked": validation.unchecked,
            "part": partial(self._counted.part, str(number)),
            "sole_writer": partial(folder.sole_writer, self._folder),
            "exact": partial(attention._exact_products, on_a_card),
        }
        return made[self._kind]()

    def _surround(self, number: int, path: str, operation: str, function: Callable[..., Any], arguments: Any) -> Any:
        del path, operation
        self._around += str(number)
        return function(**arguments)

    def _see_replaced(self) -> dict[str, Any]:
        """Results of two operations; Triton computes the second one where it can."""
        x = torch.full((1, 1), 8.0)
        with nullcontext() if kernels.why_not() else dispatch.backend("triton"):
            gated = float(dispatch.call("here", "swiglu", gate=x, up=x))
        return {"residual_add": float(dispatch.call("here", "residual_add", x=x, branch=x)), "swiglu": gated}

    def _recorded(self) -> list[int]:
        """How many calls each of the open recordings has, from the outermost on."""
        return [len(calls) for _, _, calls in self._open] if self._kind == "recording" else []

    def _see_recording(self) -> dict[str, Any]:
        """How many calls the innermost recording has of those made here, and the others, which have none of an inner one's when it ends."""
        before = self._recorded()
        self._see_replaced()
        added = [after - count for after, count in zip(self._recorded(), before, strict=True)]
        return {"recorded by": added[-1:], "by others": sum(added[:-1]) + self._taken_over}

    def _see_wrapping(self) -> dict[str, Any]:
        self._around = ""
        self._see_replaced()
        return {"around two calls": self._around}

    def _see_scope(self) -> dict[str, Any]:
        with dispatch.recording() as calls:
            self._see_replaced()
        return {"prefix": calls[0].path.removesuffix("here")}

    def _see_unchecked(self) -> dict[str, Any]:
        with suppress(NonFiniteError):
            validation.require_finite("value", torch.tensor(float("nan")))
            return {"checked": False}
        return {"checked": True}

    def _see_backend(self) -> dict[str, Any]:
        with mock.patch("blackswan.impl.kernels.why_not", return_value=None):
            return _computing()

    def _see_part(self) -> dict[str, Any]:
        with self._counted:
            held = torch.empty(3, device="meta")
        return {"part": [name for name, size in self._counted.parts.items() if size], "tensor": held.shape[0]}

    def _see_exact(self) -> dict[str, Any]:
        """Whether attention may be computed fused, on a GPU."""
        return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math")}

    def _see_sole_writer(self) -> dict[str, Any]:
        """Says whether the folder is closed to a process that opens its lock now, and to one that opened it before the first block: it is
        where that file is locked or has no name any more, for then its process tries anew. And how often a lock that nobody held was
        removed: who has taken it since, and who makes another one, are both inside."""
        path = self._folder / LOCK
        path.touch()
        if self._lock_as_it_was is None:
            self._lock_as_it_was = os.open(path, os.O_RDWR)
            weakref.finalize(self, os.close, self._lock_as_it_was)
        before = self._lock_as_it_was
        with path.open() as now:
            closed = _is_locked(now.fileno()) and (os.fstat(before).st_nlink == 0 or _is_locked(before))
        return {"closed": closed, "removed while free": self._removed_while_free}

    def _removing(self, remove: Callable[..., None]) -> Callable[..., None]:
        def removed(path: Any, *given: Any, **more: Any) -> None:
            if Path(os.fsdecode(path)) == self._folder / LOCK:
                with (self._folder / LOCK).open() as lock:
                    self._removed_while_free += not _is_locked(lock.fileno())
            remove(path, *given, **more)

        return removed


def _is_locked(lock: int) -> bool:
    """Says whether somebody else holds the lock of the open file of that descriptor."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


KINDS = ("replaced", "recording", "wrapping", "scope", "unchecked", "backend", "part", "sole_writer", "exact")


def backends_after_estimates() -> dict[str, list[dict[str, str]]]:
    """By each backend that a block chooses, what two kinds of device compute with after an estimate for a GPU in it, one that ends with an
    error and one that does not."""
    found = dict[str, list[dict[str, str]]]()
    for choice in CHOICES:
        with mock.patch("blackswan.impl.kernels.why_not", return_value=None), dispatch.backend(choice):
            found[choice] = [_computing()]
            for error in (None, ArithmeticError("in the estimate")):
                with suppress(ArithmeticError), dispatch.without_content(torch.device("cuda")):
                    if error is not None:
                        raise error
                found[choice].append(_computing())
    return found


def _computing() -> dict[str, str]:
    return {kind: dispatch.backend_on(torch.device(kind)) for kind in ("cpu", "cuda")}


def settings_after_imports() -> dict[str, bool]:
    """Whether torch's compiler and what is logged are as they were when the library of NF4 has been imported, when it could not be, and
    when two threads have imported it, of which the later one begins and ends after the other."""
    load, kept, found = getattr(nf4._library, "__wrapped__", nf4._library), _settings(), dict[str, bool]()
    missing: AbstractContextManager[Any] = mock.patch.dict(sys.modules, {LIBRARY: None})
    worlds: dict[str, AbstractContextManager[Any]] = {"there": nullcontext(), "missing": missing, "two threads": nullcontext()}
    for name, world in worlds.items():
        with mock.patch.object(torch, "compile", kept[0]):
            with world, suppress(ImportError):
                _by_two(load) if name == "two threads" else load()
            found[name] = _settings() == kept
        logging.disable(kept[1])
    return found


def _settings() -> tuple[Any, ...]:
    return torch.compile, logging.root.manager.disable, logging.root.level, list(logging.root.handlers)


def _by_two(load: Callable[[], object]) -> None:
    """Calls it in two threads, of which the second begins when the first one imports, and imports when it has ended."""
    real, at_import, both = builtins.__import__, threading.Event(), threading.Barrier(2)
    first, second = (threading.Thread(target=load) for _ in range(2))

    def imports(name: str, *given: Any, **named: Any) -> Any:
        if name == LIBRARY:
            at_import.set()
            with suppress(threading.BrokenBarrierError):
                both.wait(MOMENT)  # where they do not wait for each other
            if threading.current_thread() is second:
                first.join(LONGEST)
        return real(name, *given, **named)

    with mock.patch.object(builtins, "__import__", imports):
        first.start()
        at_import.wait(LONGEST)
        second.start()
        for thread in (first, second):
            thread.join(LONGEST)
