"""Time on a device."""

import time
from collections.abc import Callable

import torch


def now(device: torch.device) -> float:
    """Seconds of a clock, once everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_on_gpu(run: Callable[[], object]) -> float:
    """From the start to the end of a run on the current stream, by events: what the host takes to launch it is not in it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
