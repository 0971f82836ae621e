"""Time on a device."""

import statistics
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


def matmul_rate() -> float:
    """Floating-point operations a second of one large product in bfloat16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [seconds_on_gpu(lambda: a @ b) for _ in range(13)]
    return 2 * 8192**3 / statistics.median(times[3:])


def copy_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    source, target = (torch.empty(2**31, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.numel() / statistics.median(seconds_on_gpu(lambda: target.copy_(source)) for _ in range(10))
