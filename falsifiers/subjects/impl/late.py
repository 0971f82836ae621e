"""Streams of a hand-written step that are late, so that work which does not wait for what it needs meets something else there."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from threading import Event
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blackswan.impl.fused import packing, step
from blackswan.impl.fused.side import SideStream

FEW = 4
CYCLES = 200_000
"""A tenth of a millisecond, in which a GPU does what a small step gives it many times over."""


@contextmanager
def late_stream(late: str, device: torch.device) -> Iterator[None]:
    """Inside the block each work beside the products begins late (`side`), or what was given before it ends late (`main`); or neither, or
    another thread uses the GPU meanwhile (`thread`).

    On a CPU, which does one thing after another, late work is done when its result is asked for, and there is nothing to be late before it.
    Steps have few tokens that fill up there, for Triton's interpreter takes its time with them.
    """
    run = SideStream.run

    def on_gpu(self: SideStream, work: Callable[[], Any], *read: object) -> Callable[[], Any]:
        if late == "main":
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]  # torch
        return run(self, _slowly(work) if late == "side" else work, *read)

    def on_cpu(self: SideStream, work: Callable[[], Any], *read: object) -> Callable[[], Any]:
        return cache(lambda: run(self, work, *read)()) if late == "side" else run(self, work, *read)

    late_work = mock.patch.object(SideStream, "run", on_gpu if device.type == "cuda" else on_cpu)
    aside = _used_by_another_thread(device) if late == "thread" else nullcontext()
    with late_work, aside, few_tokens() if device.type == "cpu" else nullcontext():
        yield


@contextmanager
def _used_by_another_thread(device: torch.device) -> Iterator[None]:
    """Inside the block a thread asks the GPU again and again whether it has got so far, as one that answers users does, or NCCL's."""
    ended, rounds = Event(), list[None]()

    def ask() -> None:
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        with torch.cuda.stream(own), suppress(torch.AcceleratorError):  # which a capture of another thread may raise here
            while not ended.is_set():
                asked = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
                asked.record()
                asked.query()  # type: ignore[no-untyped-call]  # torch
                rounds.append(None)

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        while not (rounds or asking.done()):
            time.sleep(0.001)
        try:
            yield
        finally:
            ended.set()
            asking.result()
    if not rounds:
        raise RuntimeError("the other thread never asked")


@contextmanager
def freed_too_soon(device: torch.device) -> Iterator[list[str]]:
    """Tells, after the block, which operations beside the products read a tensor that was gone before they were waited for.

    The next tensor takes the memory of one that is gone, while a stream beside may still read it. What was made beside is given back in the
    order of that stream, and may go. On a CPU, which is done with the work at once, what is named as read is held here until then.
    """
    run, made, freed = SideStream.run, Touched(), list[str]()

    def watched(self: SideStream, work: Callable[[], Any], *read: object) -> Callable[[], Any]:
        touched, held = Touched(), [] if device.type == "cuda" else list(read)

        def begun() -> Any:
            with touched:
                return work()

        wait = run(self, begun, *read)
        made.outputs |= touched.outputs

        def waited() -> Any:
            for storage, name in touched.inputs.items():
                if storage not in made.outputs and storage.expired():  # type: ignore[no-untyped-call]  # torch
                    freed.append(name)
            held.clear()
            return wait()

        return waited

    with mock.patch.object(SideStream, "run", watched), few_tokens() if device.type == "cpu" else nullcontext():
        yield freed


class Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """The memory that operations read inside the block, with the first that does, and what memory they made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.inputs: dict[StorageWeakRef, str] = {}
        self.outputs: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operation gives."""
        result = func(*args, **(kwargs or {}))
        read = storages_of((args, kwargs))
        for storage in read:
            self.inputs.setdefault(storage, str(func))
        self.outputs |= storages_of(result) - read
        return result


def storages_of(values: Any) -> set[StorageWeakRef]:
    """The memory of the tensors among those values."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return {StorageWeakRef(each.untyped_storage()) for each in tensors}  # type: ignore[no-untyped-call]  # torch


@contextmanager
def few_tokens() -> Iterator[None]:
    """Inside the block few tokens fill up."""
    from blackswan.impl.fused import model  # imports Triton

    with ExitStack() as few:
        for module in (packing, model, step):
            few.enter_context(mock.patch.object(module, "GRAIN", FEW))
        yield


def _slowly(work: Callable[[], Any]) -> Callable[[], Any]:
    def slow() -> Any:
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]  # torch
        return work()

    return slow
