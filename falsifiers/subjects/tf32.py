"""The implementation on the CPU with the operands of its products rounded as a GPU's tensor cores round them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from blackswan.falsifiers.numeric.rounding import to_tf32
from blackswan.falsifiers.subjects.implementation import Implementation

_ATEN = torch.ops.aten
OPERANDS = {_ATEN.mm.default: (0, 1), _ATEN.bmm.default: (0, 1), _ATEN.addmm.default: (1, 2), _ATEN.baddbmm.default: (1, 2)}
"""Products of matrices as PyTorch runs them, and the places of their operands."""


class Tf32Emulation(Implementation):
    """`impl` under the policy tf32 without a GPU; attention unfused, as on CUDA. `rounding` is what an operand becomes."""

    def __init__(self, rounding: Callable[[Tensor], Tensor] = to_tf32) -> None:
        super().__init__("cpu")
        self.rounding = rounding

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Why the operation cannot run in that dtype here; None when it can."""
        return super().unsupported(operation, "float32" if dtype == "tf32" else dtype)

    @contextmanager
    def _products(self, dtype: str) -> Iterator[None]:
        if dtype != "tf32":
            yield
            return
        with sdpa_kernel(SDPBackend.MATH), _Rounding(self.rounding):
            yield


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Rounds what products multiply, in the forward and the backward pass."""

    def __init__(self, rounding: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._rounding = rounding

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs the operation, a product on rounded operands."""
        places = OPERANDS.get(func, ())
        given = [self._rounding(value) if place in places and value.dtype == torch.float32 else value for place, value in enumerate(args)]
        return func(*given, **(kwargs or {}))
