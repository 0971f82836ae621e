"""What stands for cuBLASLt where cards are feigned; names and numbers are those of cublasLt.h."""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch


class Library:
    """Stands for cuBLASLt: proposes two algorithms and computes nothing. Of a product it notes devices and what its addresses hold."""

    HANDLES: ClassVar[dict[int, torch.device]] = {}
    BIAS_POINTER, PROPOSALS = 8, 2
    _NUMBERS = itertools.count(1)

    def __init__(self, cards: Any) -> None:
        self._cards = cards
        self._biases: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        """A function that makes something with a number of its own, or does nothing."""

        def call(first: Any, *_: Any) -> int:
            if name.endswith("Create"):
                first._obj.value = next(self._NUMBERS)
            return 0

        return call

    def cublasLtCreate(self, found: Any) -> int:  # noqa: N802  the library's name
        """A handle for the current device."""
        found._obj.value = next(self._NUMBERS)
        self.HANDLES[found._obj.value] = self._cards.current
        return 0

    def cublasLtMatmulDescSetAttribute(self, product: Any, attribute: int, value: Any, size: Any) -> int:  # noqa: N802  likewise
        """Keeps the address of a bias."""
        del size
        if attribute == self.BIAS_POINTER:
            self._biases[product.value] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, *given: Any) -> int:  # noqa: N802  likewise
        """All zeros."""
        self._cards.note("handles", self.HANDLES[handle.value])
        given[-1]._obj.value = self.PROPOSALS
        return 0

    def cublasLtMatmul(self, handle: Any, product: Any, *given: Any) -> int:  # noqa: N802  likewise
        """Notes them."""
        cards = self._cards
        one, b, _, a, _, zero, y, _, into, _, algorithm, workspace, size, stream = given
        del one, zero, algorithm, size
        cards.note("handles", self.HANDLES[handle.value])
        if stream.value != cards.stream_of(cards.used).cuda_stream:
            cards.done["products", "a stream that is not the current one"] += 1
        cards.note("products", cards.used)
        addresses = {"a": a, "b": b, "y": y, "result": into, "workspace": workspace}
        for name, address in addresses.items():
            cards.read(f"{name} of a product", address.value)
        bias = [self._biases[product.value]] if product.value in self._biases else []
        for address in bias:
            cards.read("bias of a product", address)
        written = cards.stored(y.value, into.value, workspace.value)
        cards.accesses.take(cards.own, "a product", cards.stored(a.value, b.value, *bias) - written, written)
        return 0
