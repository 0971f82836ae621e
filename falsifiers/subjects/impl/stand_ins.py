"""Triton's kernels in the places of plain operations: on values that lie otherwise in memory or have another dtype, and what they refuse.

An answer is a label, what is right, and what was found. Imports Triton.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.impl import dispatch
from blackswan.impl.kernels import attention, cross_entropy, functions, nf4_dequantize, rope
from blackswan.impl.kernels.cross_entropy import WIDEST
from blackswan.impl.operations import OPERATIONS

Answer = tuple[str, Any, Any]
Situation = tuple[str, str, dict[str, Any], tuple[str, ...]]
"""A label, an operation, its arguments, and those of which there are gradients."""
BLOCK, UPSTREAM = 32, 3.0
"""A gradient that comes from above is one number in the place of all, as that of a sum is."""
TIMES = ("once more", "of a gradient that lies in memory")


def as_plain() -> Iterator[Answer]:
    """Results and gradients of each stand-in beside those of the operation on the same values without gaps."""
    for label, operation, arguments, wrt in _situations():
        whole = {name: value.clone().contiguous() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        right = _computed(OPERATIONS[operation], whole, wrt)
        for kind, computed in (("torch", OPERATIONS), ("Triton", functions.OPERATIONS)):
            found = _computed(computed[operation], arguments, wrt)
            held = _held(computed[operation], arguments)
            yield f"{operation} by {kind}, {label}: a result after the next", to_numpy(right[0].double()), to_numpy(held.double())
            for name, value in arguments.items():
                if isinstance(value, Tensor):
                    yield f"{operation} by {kind}, {label}: {name} afterwards", to_numpy(whole[name].double()), to_numpy(value.double())
            again = [f"{each}, {time}" for time in TIMES for each in wrt]
            names = ["result", *wrt, *again, "what comes from above, afterwards"] if wrt else ["result"]
            for name, one, other in zip(names, right, found, strict=True):
                yield f"{operation} by {kind}, {label}: {name}", to_numpy(one.double()), to_numpy(other.double())
                yield f"{operation} by {kind}, {label}: {name}, dtype", str(one.dtype), str(other.dtype)


def in_float64() -> Iterator[Answer]:
    """Torch computes what is in float64, or is asked for in it, where Triton is chosen: kernels have no such numbers."""
    codes, absmax = OPERATIONS["nf4_quantize"](_drawn(6, 32), BLOCK)
    stored = {"codes": codes, "absmax": absmax, "rows": 6, "columns": 32, "block_size": BLOCK, "dtype": torch.float64}
    asked: dict[str, dict[str, Any]] = {"nf4_dequantize": stored, "swiglu": {"gate": _drawn(2, 4).double(), "up": _drawn(2, 4).double()}}
    for operation, arguments in asked.items():
        with dispatch.backend("triton"):
            found = dispatch.call("float64", operation, **arguments)
        yield f"{operation} in float64", to_numpy(OPERATIONS[operation](**arguments)), to_numpy(found)
        yield f"{operation} in float64, dtype", "torch.float64", str(found.dtype)


def _computed(function: Callable[..., Tensor], arguments: dict[str, Any], wrt: Sequence[str]) -> list[Tensor]:
    given = {name: value.detach() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    leaves = [given[name].requires_grad_() for name in wrt]
    y = function(**given)
    if not wrt:
        return [y.detach()]
    # One graph is gone back through twice, with other gradients from above: each has its own answer, and the first one stays.
    first, second = (torch.autograd.grad(times * UPSTREAM * y.sum(), leaves, retain_graph=True) for times in (1, -2))
    # A gradient that arrives may be that of another use too, and is nobody's to write to.
    arrives = torch.full_like(y.detach(), UPSTREAM)
    third = torch.autograd.grad(y, leaves, arrives)
    return [y.detach(), *first, *second, *third, arrives]


def _held(function: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
    """A result without gradients, which is held while that of twice as large values is computed."""
    with torch.no_grad():
        y = function(**arguments)
        function(
            **{name: 2 * value if isinstance(value, Tensor) and value.is_floating_point() else value for name, value in arguments.items()}
        )
    return y


def _situations() -> Iterator[Situation]:
    x, up, weight = _transposed(2, 3, 24), _transposed(2, 3, 24), _column(24)
    yield "transposed", "swiglu", {"gate": x, "up": up}, ("gate", "up")
    yield "transposed, a column of weights", "rms_norm", {"x": x, "weight": weight, "eps": 0.01}, ("x", "weight")
    yield "with a frozen weight", "qk_norm", {"x": x[:, :, None], "weight": weight, "eps": 0.01}, ("x",)
    for operation, frozen in (("qk_norm", x[:, :, None]), ("rms_norm", x)):
        yield "with a weight alone", operation, {"x": frozen, "weight": weight, "eps": 0.01}, ("weight",)
    yield from ((f"with {one} alone", "swiglu", {"gate": x, "up": up}, (one,)) for one in ("gate", "up"))
    yield "more rows than parts that are summed", "rms_norm", {"x": _drawn(3, 3001, 8), "weight": _column(8), "eps": 0.01}, ("x", "weight")
    yield "rows beyond 16,384 numbers", "rms_norm", {"x": _drawn(2, 16400), "weight": _column(16400), "eps": 0.01}, ("x", "weight")
    yield "rows beyond 16,384 numbers", "swiglu", {"gate": _drawn(2, 16400), "up": _drawn(2, 16400)}, ("gate", "up")
    yield "as they are", "swiglu", {"gate": _drawn(2, 24), "up": _drawn(2, 24)}, ("gate", "up")
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
    late = {"x": _drawn(1, 3, 2, 64), "positions": torch.arange(31000, 31003)[None], "theta": 5e5}
    yield "late and scaled", "rope", {**late, **scaling}, ("x",)
    positions = torch.arange(3, dtype=torch.int32).expand(2, 3)
    yield (
        "transposed, positions of 32 bits",
        "rope",
        {"x": _drawn(2, 4, 3, 10).transpose(1, 2), "positions": positions, "theta": 50.0},
        ("x",),
    )
    labels = torch.stack([torch.arange(5) % 3, torch.zeros(5, dtype=torch.int64)], dim=1)[:, 0]
    weights = {"labels": labels, "class_weights": _column(3)}
    yield "transposed, a column of weights", "weighted_cross_entropy", {"logits": _drawn(3, 5).T, **weights}, ("logits",)
    loss = {"logits": _drawn(5, 3).bfloat16(), "labels": labels, "class_weights": torch.full((3,), 1 + 2.0**-8)}
    yield "weights of 32 bits beside logits of 16", "weighted_cross_entropy", loss, ()
    for classes in (WIDEST, WIDEST + 1):
        wide = {"logits": _drawn(2, classes), "labels": torch.tensor([0, classes - 1])}
        yield f"{classes} classes", "weighted_cross_entropy", wide, ("logits",)
    codes, absmax = OPERATIONS["nf4_quantize"](_drawn(6, 32), BLOCK)
    stored: dict[str, Any] = {
        "codes": torch.stack([codes, ~codes], dim=1)[:, 0],
        "absmax": torch.stack([absmax, -absmax], dim=1)[:, 0],
        "block_size": BLOCK,
    }
    for dtype, x in ((torch.float32, _transposed(2, 3, 32)), (torch.float16, _drawn(2, 3, 32))):
        of_dtype = {**stored, "absmax": stored["absmax"].to(dtype)}
        yield f"columns of codes and absmax, {dtype}", "nf4_dequantize", {**of_dtype, "rows": 6, "columns": 32}, ()
        product = {**of_dtype, "in_features": 32, "out_features": 6, "bias": _drawn(6), "x": x.half()}
        yield f"columns of codes and absmax, {dtype}, a bias of 32 bits", "nf4_linear", product, ("x",)
    codes, absmax = OPERATIONS["nf4_quantize"](_drawn(5, 1000), 1024)
    yield "blocks of 1,024", "nf4_dequantize", {"codes": codes, "absmax": absmax, "rows": 5, "columns": 1000, "block_size": 1024}, ()


def misuses() -> Iterator[Answer]:
    """A second derivative, which no kernel has, is refused, and so are shapes that hold as many numbers and values of another kind."""
    for label, operation, arguments, wrt in _situations():
        if wrt and "classes" not in label:
            yield _refused(f"{operation}, twice", _twice, functions.OPERATIONS[operation], arguments, wrt[0])
    gate, x = _drawn(2, 3, 4), _drawn(2, 3, 1, 4)
    bad: list[tuple[str, str, dict[str, Any]]] = [
        ("another shape", "swiglu", {"gate": gate, "up": gate.reshape(3, 2, 4)}),
        ("positions of another shape", "rope", {"x": x, "positions": torch.arange(6).view(3, 2), "theta": 50.0}),
        ("blocks of 16", "nf4_dequantize", {**_stored(16), "rows": 6, "columns": 32, "block_size": 16}),
        ("positions of fractions", "rope", {"x": x, "positions": torch.full((2, 3), 0.5), "theta": 50.0}),
        ("labels of fractions", "weighted_cross_entropy", {"logits": _drawn(5, 3), "labels": torch.full((5,), 0.9)}),
        ("an odd head", "rope", {"x": x[..., :3], "positions": torch.arange(6).view(2, 3), "theta": 50.0}),
    ]
    for value in (float("inf"), float("nan")):
        logits = torch.tensor([[0.0, 1.0], [2.0, value]])
        bad.append((f"{value}", "weighted_cross_entropy", {"logits": logits, "labels": torch.zeros(2, dtype=torch.int64)}))
    yield from (_refused(f"{operation}, {label}", functions.OPERATIONS[operation], **arguments) for label, operation, arguments in bad)
    for label, kernel, given in _bad_calls():
        yield _refused(f"the kernel itself, {label}", kernel, *given, error=ValueError)


def _bad_calls() -> Iterator[tuple[str, Callable[..., object], tuple[Any, ...]]]:
    """Calls of the kernels themselves, each with an argument that does not fit."""
    heads, bounds = _drawn(4, 2, 20).half(), torch.tensor([0, 4], dtype=torch.int32)
    for longest, scale in ((-1, 1.0), *((4, scale) for scale in (0.0, -1.0, float("inf"), float("nan")))):
        yield f"texts of {longest} tokens, scaled by {scale}", attention.attention_forward, (heads, heads, heads, bounds, longest, scale)
    for shape in ((5, 1), (5, WIDEST + 1), (0, 3), (5,)):
        yield f"logits of {shape}", cross_entropy.weighted_cross_entropy, (_drawn(*shape), torch.zeros(shape[0], dtype=torch.int64))
    for size in (-2, 0, 1, 48):
        given = (torch.zeros(96, dtype=torch.uint8), torch.ones(-(-192 // max(size, 1))), 6, 32, size, torch.float32)
        yield f"blocks of {size}", nf4_dequantize.nf4_dequantize, given
    yield "values in no heads", rope.qk_norm_rope, (heads[:, 0], torch.arange(4), 50.0)
    yield "positions elsewhere", rope.qk_norm_rope, (heads, torch.arange(4, device="meta"), 50.0)


def _stored(block: int) -> dict[str, Any]:
    """Codes of 192 numbers, and scales of blocks of that size."""
    return {"codes": torch.zeros(96, dtype=torch.uint8), "absmax": torch.ones(192 // block)}


def differentiated_twice() -> Iterator[Answer]:
    """A second derivative of torch's product with weights in NF4 is that of the product with these weights."""
    x, (codes, absmax) = _drawn(2, 3, 32).double(), OPERATIONS["nf4_quantize"](_drawn(6, 32), BLOCK)
    stored = {"codes": codes, "absmax": absmax, "block_size": BLOCK}
    weight = OPERATIONS["nf4_dequantize"](**stored, rows=6, columns=32, dtype=torch.float64)
    found = _twice(OPERATIONS["nf4_linear"], {"x": x, **stored, "in_features": 32, "out_features": 6}, "x")
    yield "nf4_linear, a second derivative", to_numpy(_twice(OPERATIONS["linear"], {"x": x, "weight": weight}, "x")), to_numpy(found)


def _twice(function: Callable[..., Tensor], arguments: dict[str, Any], name: str) -> Tensor:
    """The gradient of a result and a penalty of its gradient, which has to reach the input."""
    leaf = arguments[name].detach().requires_grad_()
    y = function(**{**arguments, name: leaf}).sum()
    (gradient,) = torch.autograd.grad(y.square(), leaf, create_graph=True)
    (y + gradient.square().sum()).backward()
    found: Tensor = leaf.grad
    return found


def _refused(
    label: str,
    ask: Callable[..., object],
    *given: Any,
    error: type[Exception] | tuple[type[Exception], ...] = (ValueError, RuntimeError),
    **named: Any,
) -> Answer:
    try:
        ask(*given, **named)
    except error:
        return label, "refused", "refused"
    return label, "refused", "accepted"


LENGTHS, BEFORE, AFTER, SCALE = (0, 70, 1, 33), 2, 3, 0.3
"""Tokens of packed sequences, and tokens before and after them that are none of theirs."""


def packed() -> Iterator[Answer]:
    """Attention of packed sequences with a scale of its own, beside float64's one by one: results, the logarithms of the sums and
    gradients; and what lies outside of the sequences."""
    for head, dtype in ((136, torch.float16), (72, torch.float16), (48, torch.float16), (20, torch.float16), (20, torch.float32)):
        tokens = BEFORE + sum(LENGTHS) + AFTER
        q, k, v, dy = (_drawn(tokens, heads, head).to(dtype) for heads in (2, 1, 1, 2))
        bounds = BEFORE + torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
        out, lse = torch.full_like(q, 7.0), torch.full((2, tokens), 7.0)
        attention.attention_forward(q, k, v, bounds, max(LENGTHS), SCALE, out=out, lse=lse)
        dq, dk, dv = (torch.full_like(value, 7.0) for value in (q, k, v))
        attention.attention_backward(dy, q, k, v, out, lse, bounds, max(LENGTHS), SCALE, dq=dq, dk=dk, dv=dv)
        found = {"y": out, "logarithms": lse.T, "dq": dq, "dk": dk, "dv": dv}
        for name, right in _one_by_one(q, k, v, dy).items():
            inside = found[name][BEFORE : tokens - AFTER]
            yield f"head {head}, {dtype}: {name}", to_numpy(right), to_numpy(inside.double())
            outside = torch.cat([found[name][:BEFORE], found[name][tokens - AFTER :]])
            yield f"head {head}, {dtype}: {name} outside of sequences", True, bool((outside == 7.0).all())


def _one_by_one(*given: Tensor) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {name: [] for name in ("y", "logarithms", "dq", "dk", "dv")}
    first = BEFORE
    for length in LENGTHS:
        q, k, v, dy = (value[first : first + length].double() for value in given)
        leaves = [value.requires_grad_() for value in (q, k, v)]
        scores = torch.einsum("thd,sd->hts", q, k[:, 0]) * SCALE
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        y = torch.einsum("hts,sd->thd", scores.softmax(-1), v[:, 0])
        results = [y.detach(), scores.logsumexp(-1).T.detach(), *torch.autograd.grad(y, leaves, dy)]
        for into, value in zip(parts.values(), results, strict=True):
            into.append(value)
        first += length
    return {name: torch.cat(values) for name, values in parts.items()}


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _transposed(*shape: int) -> Tensor:
    return _drawn(*shape[::-1]).permute(*reversed(range(len(shape))))


def _column(size: int) -> Tensor:
    """Positive numbers."""
    return (1 + _drawn(size, 2).abs())[:, 0]
