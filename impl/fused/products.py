"""Wide matrix products by the fastest of the library's algorithms among those that give equal bits."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blackswan.impl.fused.cublaslt import TYPES, Product

Key = tuple[object, ...]
Timer = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
CALLS, ROUNDS = 4, 5
LARGEST = 10**11
"""Floating-point operations of a product that is tuned. Beyond, a device's power is the limit and not the algorithm: what is faster alone
was not faster in a step."""


@dataclass(frozen=True)
class _Choice:
    product: Product
    algorithm: int


class Products:
    """y = a b + bias, by torch's own algorithm until `tune` has found a faster one for operands of that form.

    Only algorithms whose result equals torch's bit for bit are chosen, so that a result does not depend on what was found faster.
    """

    def __init__(self) -> None:
        self._chosen: dict[Key, _Choice | None] = {}

    def mm(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """A [m, k], b [k, n], bias [n] or none → [m, n]."""
        choice = self._chosen.get(_key(a, b, bias))
        if choice is None:
            return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        out = a.new_empty(a.shape[0], b.shape[1])
        choice.product.run(choice.algorithm, a, b, bias, out)
        return out

    @torch.no_grad()
    def tune(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
        """Times the algorithms on these operands, once for each form. Without cuBLASLt, for another dtype, or where that would not
        pay, torch's own stays.

        On a stream that can be captured, which the default one cannot.
        """
        key = _key(a, b, bias)
        if key in self._chosen:
            return
        self._chosen[key] = None
        if not a.is_cuda or a.dtype not in TYPES or 2 * a.numel() * b.shape[1] > LARGEST:
            return
        try:
            product = Product(a, b, bias)
        except (OSError, RuntimeError):
            return
        expected, out = self.mm(a, b, bias), a.new_empty(a.shape[0], b.shape[1])

        def own() -> object:
            return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

        def proposed(algorithm: int) -> Callable[[], object]:
            return lambda: product.run(algorithm, a, b, bias, out)

        fastest = fastest_of([own, *map(proposed, range(product.algorithms))], expected, out, graph_times)
        if fastest:
            self._chosen[key] = _Choice(product, fastest - 1)


def fastest_of(calls: Sequence[Callable[[], object]], expected: Tensor, out: Tensor, times: Timer) -> int:
    """The number of the fastest call; after the first, which is the standard, only those count that write `expected` into `out`."""
    equal = [0]
    for number, call in enumerate(calls[1:], start=1):
        out.zero_()
        try:
            call()
        except RuntimeError:
            continue
        if torch.equal(out, expected):
            equal.append(number)
    taken = times([calls[number] for number in equal])
    return min(zip(taken, equal, strict=True))[1]


def graph_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds of each call, the median over rounds in which they take turns: a device that grows hot slows all of them down."""
    graphs = [_captured(call) for call in calls]
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):
        for graph, found in zip(graphs, taken, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / CALLS)
    return [statistics.median(found[1:]) for found in taken]


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Some calls as one graph, which the host does not slow down; the current stream is not the default one."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(CALLS):
        call()
    graph.capture_end()
    return graph


def _key(a: Tensor, b: Tensor, bias: Tensor | None) -> Key:
    return a.shape, a.stride(), b.shape, b.stride(), None if bias is None else bias.stride(), a.dtype, a.device
