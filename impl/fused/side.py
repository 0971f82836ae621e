"""The streams of a GPU that steps run on: one that is captured, and one for work beside the products."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


@cache
def captured_stream(device: torch.device) -> torch.cuda.Stream:
    """What is captured on a device, named with its index: what must follow one upon the other goes before what runs beside it.

    One for all trainers of a process, and `side_stream` likewise: cuBLAS keeps a workspace for every stream that it has seen.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # torch


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """What runs beside the captured stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch


class SideStream:
    """Runs work on a stream of its own on a CUDA device, where it fills what products leave idle; elsewhere at once.

    Work starts after all that the current stream was given before. Its results are for the current stream, which must have been given
    its last use of them before the next work is given.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = side_stream(device) if device.type == "cuda" else None
        self._open: Callable[[], object] | None = None

    def run(self, work: Callable[[], T], *read: object) -> Callable[[], T]:
        """Starts the work. The function that it returns makes the current stream wait for it and gives its result.

        `read` are the current stream's own tensors that the work reads, or what holds them: they live until then, since their memory is
        reused in the order of that stream.
        """
        if self._stream is None:
            result = work()
            return lambda: result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = work()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            done.record()
        held = list(read)

        def wait() -> T:
            torch.cuda.current_stream().wait_event(done)
            held.clear()
            return result

        return wait

    def later(self, work: Callable[[], object], *read: object) -> None:
        """Starts work whose results are read after `finish`; the current stream waits for the work that was given here before."""
        self.finish()
        self._open = self.run(work, *read)

    def finish(self) -> None:
        """The current stream waits for what was left for later."""
        if self._open is not None:
            self._open()
        self._open = None
