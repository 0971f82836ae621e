"""Streams of a hand-written step that are late, so that work which does not wait for what it needs meets something else there."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch

from blackswan.impl.fused import packing, step
from blackswan.impl.fused.side import SideStream

FEW = 16
CYCLES = 200_000
"""A tenth of a millisecond, in which a GPU does what a small step gives it many times over."""


@contextmanager
def late_stream(late: str, device: torch.device) -> Iterator[None]:
    """Inside the block each work beside the products begins late (`side`), or what was given before it ends late (`main`); or neither.

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
    with late_work, few_tokens() if device.type == "cpu" else nullcontext():
        yield


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
