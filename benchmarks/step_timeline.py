"""What each kernel of a training step is for, and how a step's time is shared out among the parts, from torch's profiler's traces.

A captured graph's trace has kernels alone. What they are for is told by a trace of the same step without capture, in which each kernel
belongs to a call on the host.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PRODUCTS, ATTENTION, SWIGLU, NORMS, ROTATION = "products", "attention", "SwiGLU", "norms", "QK-norm and RoPE"
LORA, DEQUANTISE, REST, NOTHING = "LoRA", "dequantisation", "head, loss, optimiser, copies", "nothing"
PARTS = (PRODUCTS, ATTENTION, SWIGLU, NORMS, ROTATION, LORA, DEQUANTISE, REST)
"""In the order in which they claim time that several spend at once: what is further on runs beside what is before it."""
WIDE = "wide product"
"""The range of the host's calls that are the frozen products."""
NARROW = frozenset({"aten::mm", "aten::addmm", "aten::addmm_"})

_OURS = {
    "_attention": ATTENTION, "_query_gradient": ATTENTION, "_key_gradient": ATTENTION, "_swiglu": SWIGLU, "_swiglu_backward": SWIGLU,
    "_rms_norm": NORMS, "_rms_norm_backward": NORMS, "_qk_norm_rope": ROTATION, "_qk_norm_rope_backward": ROTATION,
    "_rope_table": ROTATION, "_nf4_dequantize": DEQUANTISE,
}  # fmt: skip

Event = Mapping[str, Any]


class Kernel(NamedTuple):
    """A kernel's run: what tells it from others, its start and its length in microseconds."""

    signature: tuple[Any, ...]
    start: float
    length: float


def kernels_of(events: Iterable[Event]) -> list[Kernel]:
    """The kernels and copies of a trace."""
    return [_kernel(event) for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def _kernel(event: Event) -> Kernel:
    arguments = event.get("args", {})
    return Kernel((event["name"], *map(tuple, (arguments.get("grid", ()), arguments.get("block", ())))), event["ts"], event["dur"])


def purposes(events: Sequence[Event]) -> dict[tuple[Any, ...], dict[str, float]]:
    """From a trace without capture: a kernel's signature → part → its mean length there.

    The library may take one kernel for a frozen product and for an update's; then the lengths tell them apart.
    """
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "args" in e}
    wide = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == WIDE]
    narrow = [e for e in events if e.get("cat") == "cpu_op" and e["name"] in NARROW]
    lengths: defaultdict[tuple[Any, ...], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.get("cat") != "kernel":
            continue
        kernel, launch = _kernel(event), launches.get(event["args"].get("correlation"))
        part = _OURS.get(event["name"])
        if part is None:
            inside = [name for name, ranges in ((PRODUCTS, wide), (LORA, narrow)) if launch and _within(launch["ts"], ranges)]
            part = inside[0] if inside else REST
        lengths[kernel.signature][part].append(kernel.length)
    return {signature: {part: statistics.mean(taken) for part, taken in parts.items()} for signature, parts in lengths.items()}


def _within(moment: float, ranges: Iterable[Event]) -> bool:
    return any(event["ts"] <= moment <= event["ts"] + event["dur"] for event in ranges)


def part_of(kernel: Kernel, known: Mapping[tuple[Any, ...], Mapping[str, float]]) -> str:
    """The part that a kernel of a captured step belongs to; of several that its signature served, the one with the nearest length."""
    parts = known.get(kernel.signature)
    if not parts:
        return _OURS.get(kernel.signature[0], REST)
    return min(parts, key=lambda part: abs(parts[part] - kernel.length))


def shared_out(runs: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    """Each part's time between the first start and the last end of runs (start, end, part); together they are all of it.

    Of parts that run at once the first of PARTS gets the time, and NOTHING where none runs.
    """
    changes = sorted([(start, 1, part) for start, _, part in runs] + [(end, -1, part) for _, end, part in runs])
    running, found = dict.fromkeys(PARTS, 0), dict.fromkeys((*PARTS, NOTHING), 0.0)
    before = changes[0][0] if changes else 0.0
    for moment, change, part in changes:
        found[next((name for name in PARTS if running[name]), NOTHING)] += moment - before
        before = moment
        running[part] += change
    return found
