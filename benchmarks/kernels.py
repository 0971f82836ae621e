"""`python -m benchmarks.kernels`: time and bandwidth of each Triton kernel on a CUDA device, against torch's operation, plain and compiled.

Sizes are those of one layer of Qwen2.5-0.5B and Qwen3-4B with 4,096 tokens in bfloat16. A time is the median over many runs, the L2 cache
overwritten before each. GB/s counts what has to be read and written once. Exit status 6 where there is no CUDA device, 1 where Triton
is missing.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks import command
from benchmarks.timing import seconds_on_gpu
from blackswan.impl import kernels
from blackswan.impl.operations import OPERATIONS

COPY_RATE = 4.28e12
"""Bytes a second of a large copy on an H200."""
TOKENS, BLOCK_SIZE, THETA, EPS = 4096, 64, 1e6, 1e-6
FLUSH = 2 * 2**30

Run = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder block."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    qk_norm: bool


SHAPES = (
    Shape("Qwen2.5-0.5B", hidden=896, intermediate=4864, heads=14, head_dim=64, qk_norm=False),
    Shape("Qwen3-4B", hidden=2560, intermediate=9728, heads=32, head_dim=128, qk_norm=True),
)


@dataclass(frozen=True)
class Subject:
    """A kernel with buffers to write into, the bytes it moves, and the torch operation that it stands for, as a function of `inputs`.

    With `upstream` it is the operation's backward pass that is compared.
    """

    name: str
    bytes: int
    kernel: Run
    operation: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    upstream: Tensor | None = None


def subjects(shape: Shape) -> Iterator[Subject]:
    """Every kernel at the sizes of a block."""
    yield from _weights(shape)
    yield from _norms(shape)
    yield from _rotations(shape)
    yield from _gates(shape)
    yield from _losses()


def _weights(shape: Shape) -> Iterator[Subject]:
    from blackswan.impl.kernels.nf4_dequantize import nf4_dequantize

    rows, columns = shape.hidden, shape.intermediate
    count, out = rows * columns, _drawn(rows, columns)
    codes, absmax = OPERATIONS["nf4_quantize"](_drawn(rows, columns), BLOCK_SIZE)
    arguments = (rows, columns, BLOCK_SIZE, torch.bfloat16)
    size = count // 2 + 4 * absmax.numel() + 2 * count
    yield Subject(
        "nf4_dequantize",
        size,
        lambda: nf4_dequantize(codes, absmax, *arguments, out),
        lambda codes, absmax: OPERATIONS["nf4_dequantize"](codes, absmax, *arguments),
        (codes, absmax),
    )


def _norms(shape: Shape) -> Iterator[Subject]:
    from blackswan.impl.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward, rms_norm_weight_gradient

    x, residual, dy, out, total = (_drawn(TOKENS, shape.hidden) for _ in range(5))
    weight, rstd = _drawn(shape.hidden), torch.empty(TOKENS, device="cuda")
    rms_norm(x, weight, EPS, out, rstd)
    kept = rstd.clone()
    operation, size = OPERATIONS["rms_norm"], 2 * x.numel()
    yield Subject("rms_norm", 2 * size, lambda: rms_norm(x, weight, EPS, out, rstd), lambda x: operation(x, weight, EPS), (x,))
    yield Subject(
        "add_rms_norm",
        4 * size,
        lambda: add_rms_norm(x, residual, weight, EPS, total, out, rstd),
        lambda x, residual: operation(x + residual, weight, EPS),
        (x, residual),
    )
    yield Subject(
        "rms_norm_backward",
        3 * size,
        lambda: rms_norm_backward(dy, x, weight, kept, out=out),
        lambda x: operation(x, weight, EPS),
        (x,),
        dy,
    )
    yield Subject(
        "rms_norm_weight_gradient",
        2 * size,
        lambda: rms_norm_weight_gradient(dy, x, kept),
        lambda weight: operation(x, weight, EPS),
        (weight,),
        dy,
    )


def _rotations(shape: Shape) -> Iterator[Subject]:
    from blackswan.impl.kernels.rope import qk_norm_rope, qk_norm_rope_backward, rope_table

    x, dy, out = (_drawn(TOKENS, shape.heads, shape.head_dim) for _ in range(3))
    positions = torch.arange(TOKENS, device="cuda") % 256
    weight = _drawn(shape.head_dim) if shape.qk_norm else None
    rstd = torch.empty(TOKENS, shape.heads, device="cuda") if shape.qk_norm else None
    table = rope_table(positions, THETA, shape.head_dim)

    def separately(x: Tensor) -> Tensor:
        normed = x if weight is None else OPERATIONS["qk_norm"](x, weight, EPS)
        return OPERATIONS["rope"](normed[None], positions[None], THETA)[0]

    size, name = 2 * x.numel(), "qk_norm_rope" if shape.qk_norm else "rope"
    qk_norm_rope(x, positions, THETA, weight, EPS, out, rstd)
    yield Subject(name, 2 * size, lambda: qk_norm_rope(x, positions, THETA, weight, EPS, out, rstd), separately, (x,))
    yield Subject(
        f"{name}, table",
        2 * size + 4 * table.numel(),
        lambda: qk_norm_rope(x, positions, THETA, weight, EPS, out, rstd, table),
        separately,
        (x,),
    )
    yield Subject(
        f"{name}_backward, table",
        (3 if shape.qk_norm else 2) * size + 4 * table.numel(),
        lambda: qk_norm_rope_backward(dy, x, positions, THETA, weight, EPS, rstd, out, table),
        separately,
        (x,),
        dy,
    )


def _gates(shape: Shape) -> Iterator[Subject]:
    from blackswan.impl.kernels.swiglu import swiglu, swiglu_backward

    both, gradients = (_drawn(TOKENS, 2 * shape.intermediate) for _ in range(2))
    (gate, up), (dgate, dup) = both.chunk(2, dim=1), gradients.chunk(2, dim=1)
    dy, out = (_drawn(TOKENS, shape.intermediate) for _ in range(2))
    operation, size = OPERATIONS["swiglu"], 2 * out.numel()
    yield Subject("swiglu", 3 * size, lambda: swiglu(gate, up, out), operation, (gate, up))
    yield Subject("swiglu_backward", 5 * size, lambda: swiglu_backward(dy, gate, up, dgate, dup), operation, (gate, up), dy)


def _losses() -> Iterator[Subject]:
    """A classifier's batch: what is measured is a launch, not bandwidth."""
    from blackswan.impl.kernels.cross_entropy import weighted_cross_entropy

    logits, labels = _drawn(16, 5), torch.arange(16, device="cuda") % 5
    loss, dlogits = torch.empty((), device="cuda"), torch.empty(16, 5, device="cuda")
    yield Subject(
        "weighted_cross_entropy",
        2 * logits.numel() + 8 * labels.numel() + 4 * dlogits.numel(),
        lambda: weighted_cross_entropy(logits, labels, None, loss, dlogits),
        lambda logits: torch.nn.functional.cross_entropy(logits.float(), labels),
        (logits,),
    )


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def alternative(subject: Subject, operation: Callable[..., Any]) -> Run:
    """A run of the operation, or of its backward pass alone."""
    if subject.upstream is None:
        return lambda: operation(*subject.inputs)
    leaves = [value.detach().requires_grad_() for value in subject.inputs]
    y = operation(*leaves)
    return lambda: torch.autograd.grad(y, leaves, subject.upstream, retain_graph=True)


def median_seconds(run: Run, repeats: int) -> float:
    """The median time of a run on a cold cache. Overwriting it takes the device longer than the host takes to launch the run."""
    flush, times = torch.empty(FLUSH, dtype=torch.uint8, device="cuda"), []
    for _ in range(repeats + 3):
        flush.zero_()
        times.append(seconds_on_gpu(run))
    return statistics.median(times[3:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row a kernel and model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=command.positive, default=200, help="replays a median is taken of (default: 200)")
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME", help="kernels whose name begins so only; may be repeated")
    options = parser.parse_args(arguments)
    command.require_cuda()
    if (reason := kernels.why_not()) or kernels.interpreted():
        raise command.CannotRun(reason or "TRITON_INTERPRET is set: unset it to measure the device", 1)
    # A backward pass that is run many times keeps what it read.
    torch._functorch.config.donated_buffer = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {TOKENS} tokens, bfloat16, median of {options.repeats}")
    print(f"{'model':14} {'kernel':24} {'µs':>8} {'GB/s':>7} {'of copy':>8} {'torch':>7} {'compile':>8}   (times the kernel's time)")
    measured = 0
    for shape in SHAPES:
        for subject in subjects(shape):
            if not options.kernel or subject.name.startswith(tuple(options.kernel)):
                print(row(shape, subject, options.repeats), flush=True)
                measured += 1
    if not measured:
        raise command.CannotRun(f"no kernel's name begins with {' or '.join(options.kernel)}")
    return 0


def row(shape: Shape, subject: Subject, repeats: int) -> str:
    """A line of the table."""
    own = median_seconds(subject.kernel, repeats)
    plain = median_seconds(alternative(subject, subject.operation), repeats)
    torch.compiler.reset()
    compiled = median_seconds(alternative(subject, torch.compile(subject.operation, dynamic=False)), repeats)
    rate = subject.bytes / own
    left = f"{shape.name:14} {subject.name:24} {own * 1e6:8.1f} {rate / 1e9:7.0f} {rate / COPY_RATE:8.0%}"
    return f"{left} {plain / own:7.2f} {compiled / own:8.2f}"


if __name__ == "__main__":
    command.start(main)
