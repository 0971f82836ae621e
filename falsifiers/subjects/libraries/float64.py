"""torch without float32, for models that cast to it by name.

`.double()` alone is good to 3e-7 only: RMSNorm, the rotary tables and the eager softmax of transformers force float32. A TorchFunctionMode
turns each of these casts into one to float64.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        widened = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        called: Callable[..., Any] = torch.Tensor.double if func is torch.Tensor.float else func
        return called(*widened, **named)


@contextmanager
def true_float64() -> Iterator[None]:
    """Inside, torch has no float32: what asks for it gets float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)
