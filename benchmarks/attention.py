"""The attention kernels over tile sizes, beside torch's FlashAttention-2, at the shapes of fine-tuning steps.

    python benchmarks/attention.py --seq 256 --output FILE.json

A configuration is held to float64 attention first: an error over twice FlashAttention's disqualifies it. Times are of replays of a CUDA
graph of several calls on inputs that take turns, so that they are not read from the cache of the call before.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import command

SHAPES = {"qwen3-4b": (32, 8, 128), "qwen2.5-0.5b": (14, 2, 64)}
"""Heads, KV heads, head_dim."""
SWEPT: dict[tuple[str, int], list[tuple[int, int, int, int, bool]]] = {
    ("forward", 128): [
        (64, 64, 4, 2, False), (64, 64, 4, 2, True), (64, 64, 4, 3, False), (128, 64, 8, 2, False), (128, 64, 8, 3, False),
        (128, 128, 8, 2, False), (64, 128, 4, 2, False), (64, 32, 4, 3, False),
    ],
    ("query gradient", 128): [
        (64, 64, 4, 2, False), (64, 64, 4, 2, True), (64, 32, 4, 2, False), (64, 64, 4, 3, False), (128, 64, 8, 2, False),
    ],
    ("key gradient", 128): [
        (64, 64, 4, 2, True), (64, 64, 4, 2, False), (32, 64, 4, 2, True), (32, 64, 4, 3, True), (64, 64, 8, 2, True),
        (64, 128, 8, 2, True), (32, 128, 8, 2, True),
    ],
    ("forward", 64): [
        (64, 64, 4, 2, False), (64, 64, 4, 2, True), (64, 64, 4, 3, False), (128, 64, 4, 2, False), (128, 64, 8, 2, False),
        (64, 128, 4, 2, False), (128, 128, 8, 2, False),
    ],
    ("query gradient", 64): [
        (64, 64, 4, 2, False), (64, 64, 4, 2, True), (64, 64, 4, 3, False), (128, 64, 8, 2, False), (64, 128, 4, 2, False),
    ],
    ("key gradient", 64): [
        (64, 64, 4, 2, True), (64, 64, 4, 3, True), (32, 64, 4, 2, True), (64, 64, 8, 2, True), (64, 128, 8, 2, True),
        (64, 32, 4, 2, True), (128, 64, 8, 2, True),
    ],
}  # fmt: skip
"""Tokens of the query and key tiles, warps, stages, longest programs first."""
CALLS, REPLAYS, SETS = 12, 15, 3


def main() -> int:
    """Sweeps both shapes and prints microseconds a call, the fastest of each kernel marked; 6 without a CUDA device."""
    options = _options()
    command.require_cuda()
    import torch

    torch.manual_seed(0)
    started, rows = time.perf_counter(), []
    for name in options.only or SHAPES:
        rows += _shape(name, options)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.perf_counter() - started:.0f} s")
    if options.output:
        options.output.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tile sizes of the attention kernels on one GPU, beside FlashAttention-2.")
    parser.add_argument("--batch", type=command.positive, default=16)
    parser.add_argument("--seq", type=command.positive, default=256)
    parser.add_argument("--only", action="append", default=[], choices=SHAPES)
    parser.add_argument("--output", type=command.output)
    return parser.parse_args()


def _shape(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    heads, kv_heads, head_dim = SHAPES[name]
    print(f"{name}: {options.batch} × {options.seq} tokens, {heads}/{kv_heads} heads of {head_dim}, bfloat16", flush=True)
    bounds = torch.arange(options.batch + 1, dtype=torch.int32, device="cuda") * options.seq
    sets = [_inputs(int(bounds[-1]), heads, kv_heads, head_dim) for _ in range(SETS)]
    truth = _float64(*sets[0], options.batch)
    rows = _flash(sets, bounds, options.seq, truth)
    for kernel in ("forward", "query gradient", "key gradient"):
        rows += _sweep(kernel, sets, bounds, options.seq, truth, rows)
    for row in rows:
        time_us = f"{row['us']:8.1f} us" if "us" in row else row["failed"]
        print(f"  {row['kernel']:16} {row['blocks']!s:28} {time_us}{'  fastest' if row.get('fastest') else ''}", flush=True)
    ours = [row["us"] for row in rows if row.get("fastest")]
    print(f"  the fastest together {sum(ours):.1f} us, FlashAttention-2 {rows[0]['us'] + rows[1]['us']:.1f} us", flush=True)
    return [{"shape": name, **row} for row in rows]


def _inputs(tokens: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Any, ...]:
    import torch

    return tuple(torch.randn(tokens, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads, heads))


def _float64(q: Any, k: Any, v: Any, dy: Any, batch: int) -> list[Any]:
    """y, dq, dk and dv of torch's own softmax and products, two sequences at a time."""
    import torch

    parts: list[list[Any]] = []
    for rows in torch.arange(len(q), device="cuda").view(batch, -1).split(2):
        leaves = [t[rows].double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
        group = q.shape[1] // k.shape[1]
        asked, keys, values = leaves[0], *(t.repeat_interleave(group, dim=1) for t in leaves[1:])
        hidden = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool, device="cuda").triu(1)
        y = (asked @ keys.mT * q.shape[2] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ values
        gradients = torch.autograd.grad(y, leaves, dy[rows].double().transpose(1, 2))
        parts.append([t.detach().transpose(1, 2).flatten(0, 1) for t in (y, *gradients)])
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _flash(sets: list[Any], bounds: Any, longest: int, truth: list[Any]) -> list[dict[str, Any]]:
    import torch

    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    limits, scale = (bounds, bounds, longest, longest, 0.0, True), sets[0][0].shape[2] ** -0.5
    kept = [forward(q, k, v, *limits, False, scale=scale) for q, k, v, _ in sets]

    def back(index: int) -> Any:
        (q, k, v, dy), (y, sums, state, offset, _) = sets[index], kept[index]
        return backward(dy, q, k, v, y, sums, *limits, state, offset, scale=scale)

    errors = [_error(found, wanted) for found, wanted in zip((kept[0][0], *back(0)), truth, strict=True)]
    times = (_microseconds(lambda i: forward(*sets[i][:3], *limits, False, scale=scale)), _microseconds(back))
    return [
        {"kernel": "FA-2 forward", "blocks": "", "us": times[0], "errors": errors[:1]},
        {"kernel": "FA-2 backward", "blocks": "", "us": times[1], "errors": errors[1:]},
    ]


def _sweep(kernel: str, sets: list[Any], bounds: Any, longest: int, truth: list[Any], flash: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from triton.runtime.errors import OutOfResources

    from blackswan.impl.kernels.attention import Blocks

    allowed = [2 * error for row in flash[:2] for error in row["errors"]]
    rows: list[dict[str, Any]] = []
    for chosen in SWEPT[kernel, sets[0][0].shape[2]]:
        row: dict[str, Any] = {"kernel": kernel, "blocks": chosen}
        try:
            call, outputs = _call(kernel, Blocks(*chosen), sets, bounds, longest)
            call(0)
            row["errors"] = {i: _error(found, truth[i]) for i, found in outputs.items()}
            wrong = [error for i, error in row["errors"].items() if not error <= allowed[i]]
            row |= {"failed": f"wrong: {wrong}"} if wrong else {"us": _microseconds(call)}
        except OutOfResources as error:
            row["failed"] = str(error).splitlines()[0]
        rows.append(row)
    timed = [row for row in rows if "us" in row]
    if timed:
        min(timed, key=lambda row: row["us"])["fastest"] = True
    return rows


def _call(kernel: str, blocks: Any, sets: list[Any], bounds: Any, longest: int) -> tuple[Callable[[int], Any], dict[int, Any]]:
    """A call of that kernel alone on the inputs of that number, and the results of the first by their place in the truth."""
    import torch

    from blackswan.impl.kernels.attention import attention_forward, key_gradient, query_gradient

    outputs = [torch.full_like(t, torch.nan) for t in (sets[0][0], *sets[0][:3])]
    if kernel == "forward":
        lse = torch.empty(sets[0][0].shape[1], len(outputs[0]), device="cuda")
        return lambda i: attention_forward(*sets[i][:3], bounds, longest, out=outputs[0], lse=lse, blocks=blocks), {0: outputs[0]}
    kept = [attention_forward(*inputs[:3], bounds, longest) for inputs in sets]
    deltas = [torch.einsum("thd,thd->ht", inputs[3].float(), y.float()).contiguous() for inputs, (y, _) in zip(sets, kept, strict=True)]
    given: Any = lambda i: (sets[i][3], *sets[i][:3])  # noqa: E731  two lines are no function
    if kernel == "query gradient":
        return lambda i: query_gradient(*given(i), *kept[i], bounds, longest, outputs[1], deltas[i], blocks=blocks), {1: outputs[1]}
    return (
        lambda i: key_gradient(*given(i), kept[i][1], deltas[i], bounds, longest, outputs[2], outputs[3], blocks=blocks),
        {2: outputs[2], 3: outputs[3]},
    )


def _error(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def _microseconds(call: Callable[[int], Any]) -> float:
    """Median over replays of a graph of CALLS calls, by events."""
    import torch

    from benchmarks.timing import seconds_on_gpu

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(SETS):
            call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index % SETS)
    times = [1e6 * seconds_on_gpu(graph.replay) / CALLS for _ in range(REPLAYS + 3)]
    return statistics.median(times[3:])


if __name__ == "__main__":
    command.start(main)
