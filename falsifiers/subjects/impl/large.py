"""The kernels on many rows: what they give for rows beyond 2³¹ elements and for these alone, and what they give again."""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.impl.operations import layers
from blackswan.reference.table import Array

LAST, COLUMNS, HEAD = 4, 4096, 128
ROWS = 2**31 // COLUMNS + 2 * LAST
"""The last rows begin beyond 2³¹ elements; they are one sequence of attention."""
MANY, TIMES = 2**14, 8
"""Rows and repetitions in which sums that are added up in the order of a clock would differ."""
COPIES = 12
"""So many tensors of this size are there at once at most."""
EPS, THETA = 1e-6, 1e4


def last_rows(device: torch.device) -> Iterator[tuple[str, Array, Array]]:
    """Kernel and place of the output, [LAST, …] each: the last rows of the large input, and these rows by themselves.

    On a CPU the input is small, and the norm is that of automatic differentiation, without a kernel.
    """
    on_gpu, rows = device.type == "cuda", ROWS if device.type == "cuda" else 4 * LAST
    needed = COPIES * rows * COLUMNS * 2
    if on_gpu and (free := torch.cuda.mem_get_info(device)[0]) < needed:
        raise Lacks(f"the device has {free / 2**30:.0f} GiB free; rows beyond 2³¹ elements need {needed / 2**30:.0f}")
    x = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device=device).normal_(generator=torch.Generator(device).manual_seed(0))
    for name, kernel in (KERNELS if on_gpu else {"rms_norm": _torch_norm}).items():
        whole = [each[-LAST:].clone() for each in kernel(x)]
        for number, pair in enumerate(zip(whole, kernel(x[-LAST:].clone()), strict=True)):
            yield f"{name}, output {number}", to_numpy(pair[0]), to_numpy(pair[1])


def changed_when_repeated(device: torch.device) -> dict[str, int]:
    """By kernel and output, on thousands of rows, how often of TIMES a bit is another than at first. On a CPU as `last_rows`."""
    on_gpu, rows = device.type == "cuda", MANY if device.type == "cuda" else 4 * LAST
    x = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device=device).normal_(generator=torch.Generator(device).manual_seed(0))
    changed = Counter[str]()
    for name, kernel in ({**KERNELS, "weight of rms_norm": _weight_gradient} if on_gpu else {"rms_norm": _torch_norm}).items():
        first = kernel(x)
        for _ in range(TIMES):
            changed.update({f"{name}, output {n}": not torch.equal(*pair) for n, pair in enumerate(zip(first, kernel(x), strict=True))})
    return dict(changed)


def _rms_norm(x: Tensor) -> tuple[Tensor, ...]:
    from blackswan.impl.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward

    weight = torch.ones(COLUMNS, dtype=x.dtype, device=x.device)
    y, rstd = rms_norm(x, weight, EPS)
    return y, rms_norm_backward(y, x, weight, rstd, x), *add_rms_norm(x, y, weight, EPS)[:2]


def _weight_gradient(x: Tensor) -> tuple[Tensor, ...]:
    from blackswan.impl.kernels.rms_norm import rms_norm_weight_gradient

    return (rms_norm_weight_gradient(x, x, torch.ones(len(x), device=x.device)),)


def _torch_norm(x: Tensor) -> tuple[Tensor, ...]:
    return (layers.rms_norm(x, torch.ones(COLUMNS, dtype=x.dtype), EPS),)


def _rope(x: Tensor) -> tuple[Tensor, ...]:
    from blackswan.impl.kernels.rope import qk_norm_rope, qk_norm_rope_backward

    heads, weight = x.view(len(x), -1, HEAD), torch.ones(HEAD, dtype=x.dtype, device=x.device)
    positions = torch.arange(len(x), device=x.device) % LAST
    y, rstd = qk_norm_rope(heads, positions, THETA, weight, EPS)
    return y, qk_norm_rope_backward(y, heads, positions, THETA, weight, EPS, rstd), qk_norm_rope(heads, positions, THETA)[0]


def _swiglu(x: Tensor) -> tuple[Tensor, ...]:
    """Gate and up are halves of one buffer, as in the fused engine."""
    from blackswan.impl.kernels.swiglu import swiglu, swiglu_backward

    gate, up = x.chunk(2, dim=1)
    y = swiglu(gate, up)
    return y, *swiglu_backward(y, gate, up)


def _attention(x: Tensor) -> tuple[Tensor, ...]:
    from blackswan.impl.kernels.attention import attention_backward, attention_forward

    q = x.view(len(x), -1, HEAD)
    k, v = q[:, ::2], q[:, 1::2]
    bounds = torch.arange(0, len(x) + 1, LAST, dtype=torch.int32, device=x.device)
    y, lse = attention_forward(q, k, v, bounds, LAST)
    return y, *attention_backward(y, q, k, v, y, lse, bounds, LAST)


KERNELS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "attention": _attention,
}
