"""Work beside the products: a second stream of a GPU."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Side:
    """Runs work on a stream of its own on a CUDA device, where it fills what products leave idle; elsewhere at once.

    Work starts after all that the current stream was given before. Its results are for the current stream, which must have been given
    its last use of them before the next work is given.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch
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
