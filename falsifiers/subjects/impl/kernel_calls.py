"""Triton's kernels as functions on tensors: in memory that they are given, over their inputs and of 16 bits, and what they refuse.

An answer is a label, what is right by another call of the same kernels, and what was found. Imports Triton.
"""

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.falsifiers.subjects.guards import GuardedAllocations
from blackswan.impl.kernels import attention, cross_entropy, nf4_dequantize, rms_norm, rope, swiglu

Answer = tuple[str, Any, Any]
FILLED, EPS, THETA, SCALE = 7.0, 1e-2, 50.0, 0.7
NORM_COLUMNS, HEAD = 32768, 256
"""Numbers of a row that a norm's kernel holds at most, and of a head that attention's does."""
APART, TOGETHER = 2**31, 2**16
"""Numbers between the first row of an array and the last one, more than 32 bits count; and between the first rows of two arrays."""
NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python has no name for before 3.13."""
HEADS, TOKENS = 20, 60
"""More heads and tokens of a rotation than one program has."""
NARROW = torch.float16
"""Triton's interpreter rounds to it as a card does, and not to bfloat16."""


@dataclass(frozen=True)
class Call:
    """A kernel's function on tensors.

    The rows of `inputs` may lie in wider ones, `others` may not. `outputs` are the names of what it writes, in the order of its results;
    those that are `flat` have no gaps. `over` says over which inputs an output may be written. All of `alike` have one dtype.
    """

    function: Callable[..., Any]
    inputs: dict[str, Tensor]
    others: dict[str, Any]
    outputs: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    over: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alike: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The function's name, and whether there is a weight."""
        return f"{self.function.__name__}{' with a weight' if 'weight' in self.others else ''}"

    def __call__(self, **changed: Any) -> list[Tensor]:
        """Its results, with some of the arguments changed; memory that nothing was written to holds NaN."""
        with _unwritten():
            found = self.function(**{**self.inputs, **self.others, **changed})
        return [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]


def calls(tokens: int, dtype: torch.dtype = torch.float32) -> list[Call]:
    """Every kernel on so many rows. Values are so small that an epsilon counts; sequences of attention are of no token too."""
    draw = _drawing(dtype)
    x, dy, add, weight, rstd = draw(tokens, 24), draw(tokens, 24), draw(tokens, 24), 1 + draw(24), 1 + draw(tokens).float().abs()
    heads, turned, head_weight = draw(tokens, 3, 10), draw(tokens, 3, 10), 1 + draw(3, 10)
    positions, most = torch.arange(tokens) ** 2, max(0, tokens - 1)
    table, bounds = rope.rope_table(positions, THETA, 10), torch.tensor([0, 0, most, most, tokens], dtype=torch.int32)
    q, k, v = draw(tokens, 4, 10), draw(tokens, 2, 10), draw(tokens, 2, 10)
    packed: dict[str, Any] = {"bounds": bounds, "longest": tokens, "scale": SCALE}
    y, lse = attention.attention_forward(q, k, v, **packed)
    normed, of_heads = {"weight": weight, "eps": EPS}, {"positions": positions, "theta": THETA}
    kept = rope.qk_norm_rope(heads, positions, THETA, head_weight, EPS)[1]
    found = [
        Call(rms_norm.rms_norm, {"x": x}, normed, ("out", "rstd")),
        Call(rms_norm.add_rms_norm, {"x": x, "residual": dy}, normed, ("total", "out", "rstd"), over={"total": ("x", "residual")}),
        Call(
            rms_norm.rms_norm_backward,
            {"dy": dy, "x": x, "add": add},
            {"weight": weight, "rstd": rstd},
            ("out",),
            over={"out": ("dy", "x", "add")},
        ),
        Call(rms_norm.rms_norm_weight_gradient, {"dy": dy, "x": x}, {"rstd": rstd}),
        Call(swiglu.swiglu, {"gate": x, "up": add}, {}, ("out",), over={"out": ("gate", "up")}, alike=("gate", "up")),
        Call(
            swiglu.swiglu_backward,
            {"gate": x, "up": add, "dy": dy},
            {},
            ("dgate", "dup"),
            over=dict.fromkeys(("dgate", "dup"), ("gate", "up", "dy")),
            alike=("gate", "up"),
        ),
        Call(rope.rope_table, {}, {**of_heads, "head_dim": 10}, ("out",), flat=("out",)),
        Call(rope.qk_norm_rope, {"x": heads}, {**of_heads, "table": table}, ("out",), over={"out": ("x",)}),
        Call(
            rope.qk_norm_rope,
            {"x": heads},
            {**of_heads, "weight": head_weight, "eps": EPS},
            ("out", "rstd"),
            flat=("rstd",),
            over={"out": ("x",)},
        ),
        Call(
            rope.qk_norm_rope_backward,
            {"dy": turned, "x": heads},
            {**of_heads, "weight": head_weight, "eps": EPS, "rstd": kept},
            ("out",),
            over={"out": ("dy", "x")},
        ),
        Call(attention.attention_forward, {"q": q, "k": k, "v": v}, packed, ("out", "lse"), alike=("q", "k", "v")),
        Call(
            attention.attention_backward,
            {"q": q, "k": k, "v": v, "y": y, "dy": draw(tokens, 4, 10)},
            {**packed, "lse": lse},
            ("dq", "dk", "dv", "delta"),
            alike=("q", "k", "v"),
        ),
    ]
    return found + _of_batches(draw, tokens, dtype) if tokens else found


def _of_batches(draw: Callable[..., Tensor], rows: int, dtype: torch.dtype) -> list[Call]:
    labels, absmax = torch.arange(rows) % 3, draw(-(-rows * 3 // 4)).float().abs()
    codes = (torch.arange((rows * 3 + 1) // 2) * 37 % 256).to(torch.uint8)
    stored = {"codes": codes, "absmax": absmax, "rows": rows, "columns": 3, "block_size": 4, "dtype": dtype}
    weights = {"labels": labels, "class_weights": 1 + draw(3).abs()}
    return [
        Call(cross_entropy.weighted_cross_entropy, {"logits": draw(rows, 3)}, weights, ("loss", "dlogits"), flat=("loss",)),
        Call(nf4_dequantize.nf4_dequantize, {}, stored, ("out",), flat=("out",)),
    ]


def in_given_memory(rows: int) -> Iterator[Answer]:
    """A call whose inputs and outputs lie in wider rows, or whose output is an input, gives the plain call's bits and writes nothing else.

    No two of a call's arrays have rows of one width, so that each has strides of its own.
    """
    for call in calls(rows):
        wider = itertools.count(16, 8)
        plain = call()
        shapes = dict(zip(call.outputs, [*plain, *plain], strict=False))
        if "delta" in shapes:
            shapes["delta"] = call.others["lse"]
        rooms = {name: _room(value, FILLED, name in call.flat, next(wider)) for name, value in shapes.items()}
        given = {name: slot for name, (_, slot) in rooms.items()}
        read = call.inputs | {name: value for name, value in call.others.items() if name == "lse"}
        found = call(**{name: _room(value, float("nan"), wider=next(wider))[1] for name, value in read.items()}, **given)
        yield from _each(call.name, plain, found)
        yield (
            f"{call.name}, results that are elsewhere",
            0,
            sum(one is not other for one, other in zip(found, given.values(), strict=False)),
        )
        for name, (room, slot) in rooms.items():
            slot.fill_(FILLED)
            yield f"{call.name}, around {name}", True, bool((room == FILLED).all())
        for output, inputs in call.over.items():
            for name in inputs:
                copies = {key: value.clone() for key, value in call.inputs.items()}
                yield from _each(f"{call.name}, {output} over {name}", plain, call(**copies, **{output: copies[name]}))


def rows_far_apart(rows: int) -> Iterator[Answer]:
    """Kernels give the bits of the plain call where rows of inputs and outputs have more numbers between them than 32 bits count.

    The memory is promised only, and what an offset that wraps would read lies in it too.
    """
    promised = mmap.mmap(-1, 2 * (2 * APART + 64 * TOGETHER), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    room, starts = torch.frombuffer(promised, dtype=NARROW), itertools.count(APART, TOGETHER)
    for call in calls(rows, NARROW):
        plain = call()

        def far(value: Tensor) -> Tensor:
            strides = (APART // (rows - 1), *value.contiguous().stride()[1:])
            return room.as_strided(value.shape, strides, next(starts)).copy_(value)

        outputs = {name: value for name, value in zip(call.outputs, plain, strict=False) if value.dim() > 1 and _is_narrow(value)}
        given = {name: far(torch.full_like(value, torch.nan)) for name, value in outputs.items() if name not in call.flat}
        found = call(**{name: far(value) for name, value in call.inputs.items()}, **given)
        yield from _each(f"{call.name}, rows far apart", plain, found)


def in_parts() -> Iterator[Answer]:
    """Rotations and their table give for more heads and tokens than a program has what they give for some at a time.

    Memory that is taken holds NaN, so that what is not written shows.
    """
    with GuardedAllocations():
        draw = _drawing(torch.float32)
        positions, (x, dy, weight) = torch.arange(TOKENS), (draw(TOKENS, HEADS, 10), draw(TOKENS, HEADS, 10), 1 + draw(HEADS, 10))
        turn: dict[str, Any] = {"positions": positions, "theta": THETA, "eps": EPS}
        parts = list(zip(*(torch.split(value, 7, dim=value.dim() - 2) for value in (x, dy, weight)), strict=True))
        y, rstd = rope.qk_norm_rope(x, weight=weight, **turn)
        assert rstd is not None
        by_heads = [rope.qk_norm_rope(of_x.contiguous(), weight=of_heads, **turn) for of_x, _, of_heads in parts]
        yield from _each("a rotation of many heads", [torch.cat(each, dim=1) for each in zip(*by_heads, strict=True)], [y, rstd])
        back = [
            rope.qk_norm_rope_backward(of_dy.contiguous(), of_x.contiguous(), weight=of_heads, **turn) for of_x, of_dy, of_heads in parts
        ]
        for kept in (rstd, None):
            found = rope.qk_norm_rope_backward(dy, x, weight=weight, rstd=kept, **turn)
            yield from _each("the gradient of many heads", [torch.cat(back, dim=1)], [found])
        tables = [rope.rope_table(part.contiguous(), THETA, 10) for part in torch.split(positions, TOKENS // 3)]
        yield from _each("a table of many tokens", [torch.cat(tables)], [rope.rope_table(positions, THETA, 10)])


def programs(rows: int) -> list[tuple[str, int, int]]:
    """By kernel and axis how many programs are launched for so many rows; none is run."""
    found = list[tuple[str, int, int]]()

    class Noted:
        """Stands for a kernel, and is launched without being run."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            """Note the programs along each axis, and give a function that runs nothing."""
            found.extend((self.name, axis, count) for axis, count in enumerate(grid))
            return mock.Mock()

    with ExitStack() as patched:
        for module in (attention, cross_entropy, nf4_dequantize, rms_norm, rope, swiglu):
            kernels = [name for name, value in vars(module).items() if isinstance(value, KernelInterface | InterpretedFunction)]
            for name in kernels:
                patched.enter_context(mock.patch.object(module, name, Noted(name)))
        for call in calls(rows):
            call()
    return found


def of_no_rows() -> Iterator[Answer]:
    """Of no rows results have none, and a sum over them is zero."""
    for call in calls(0):
        yield call.name, [0.0] * len(call()), [float(each.abs().sum()) for each in call()]


def refusals(rows: int) -> Iterator[Answer]:
    """An output of another shape, dtype, layout or device is refused, and inputs that do not fit together or lie as kernels read them."""
    for call in calls(rows):
        arguments, first = call.inputs | call.others, next(iter(call.inputs), "")
        results = dict(zip(call.outputs, call(), strict=False))
        for name, value in results.items():
            yield from _refused(call, f"{name} of another dtype", {name: value.to(torch.bfloat16)})
            yield from _refused(call, f"{name} on another device", {name: value.to("meta")})
            if value.dim():
                yield from _refused(call, f"{name} with a row more", {name: torch.cat([value, value[:1]])})
                yield from _refused(call, f"{name} with gaps", {name: _gaps(value)})
        for name, value in ({name: results[name] for name in call.flat} | call.others).items():
            if isinstance(value, Tensor) and value.dim() > 1 and name != "lse":
                yield from _refused(call, f"{name} in wider rows", {name: _room(value, FILLED)[1]})
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or (name == "rstd" and first == "dy" and value.dim() > 1):
                continue
            yield from _refused(call, f"{name} with gaps", {name: _gaps(value)})
            if name not in (first, "bounds", "positions") or (name == "positions" and first):
                yield from _refused(call, f"{name} with a row less", {name: value[:-1]})
        for name in call.alike:
            yield from _refused(call, f"{name} of another dtype", {name: call.inputs[name].to(NARROW)})
        if "weight" in call.others and "dy" in call.inputs:
            yield from _refused(call, "no x", {"x": None})
        if first:
            yield from _refused(call, "float64", {name: value.double() for name, value in call.inputs.items()})


def widest() -> Iterator[Answer]:
    """Kernels are asked to take the widest rows and heads that they hold in registers and to refuse wider ones, on no token at all."""
    bounds = torch.zeros(1, dtype=torch.int32)
    for columns, taken in ((NORM_COLUMNS, True), (NORM_COLUMNS + 1, False)):
        yield f"a norm of {columns} columns", taken, _takes(rms_norm.rms_norm, torch.zeros(0, columns), torch.ones(columns), EPS)
    for size, taken in ((HEAD, True), (HEAD + 1, False)):
        heads = torch.zeros(0, 2, size)
        yield f"attention by heads of {size}", taken, _takes(attention.attention_forward, heads, heads, heads, bounds, 0)


def _takes(function: Callable[..., Any], *given: Any) -> bool:
    try:
        function(*given)
    except ValueError:
        return False
    return True


def _refused(call: Call, label: str, changed: dict[str, Any]) -> Iterator[Answer]:
    try:
        call(**changed)
    except (ValueError, AttributeError) as error:
        yield f"{call.name}: {label}", "ValueError", "ValueError" if changed.get("x", 0) is None else type(error).__name__
    else:
        yield f"{call.name}: {label}", "ValueError", "accepted"


def rounded_once(rows: int) -> Iterator[Answer]:
    """Of the same numbers in 16 bits what they give in 32, rounded once: a sum of rows before its norm, and a norm before its rotation."""
    for call in calls(rows, NARROW):
        if call.name.startswith(("add_", "attention", "rope_table")) or call.name == "qk_norm_rope with a weight":
            continue
        wide = {name: value.float() if _is_narrow(value) else value for name, value in (call.inputs | call.others).items()}
        wide |= {"dtype": torch.float32} if "dtype" in wide else {}
        found = call()
        yield from _each(call.name, [right.to(each.dtype) for right, each in zip(call(**wide), found, strict=True)], found)
    yield from _composed(rows)


def _composed(rows: int) -> Iterator[Answer]:
    by_name = {call.name: call for call in calls(rows, NARROW)}
    added, turned = by_name["add_rms_norm with a weight"], by_name["qk_norm_rope with a weight"]
    total, *normed = added()
    parts = [total, *rms_norm.rms_norm(total, added.others["weight"], EPS)]
    yield from _each("a sum and its norm", parts, [total, *normed])
    y, rstd = turned()
    heads = (turned.inputs["x"].float() * rstd[..., None] * turned.others["weight"].float()).to(NARROW)
    yield from _each("a norm and its rotation", [rope.qk_norm_rope(heads, turned.others["positions"], THETA)[0]], [y])
    back = by_name["qk_norm_rope_backward with a weight"]
    yield from _each("a norm that was not kept", back(), back(rstd=None))


def _each(label: str, right: Sequence[Tensor], found: Sequence[Tensor]) -> Iterator[Answer]:
    """Results as they are now: their memory is written to later."""
    for number, pair in enumerate(zip(right, found, strict=True)):
        one, other = (to_numpy(value.clone()) for value in pair)
        yield f"{label}, result {number}", one, other


def _is_narrow(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == NARROW


def _drawing(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: (0.1 * torch.randn(shape, generator=generator)).to(dtype)


def _room(value: Tensor, filled: float, flat: bool = False, wider: int = 16) -> tuple[Tensor, Tensor]:
    """Memory filled with that number, and the value inside of it: without gaps, or in rows that are so much wider. Behind it there is room
    for rows as wide as another array's: what a kernel takes to lie there is the number."""
    if flat or not value.dim():
        room = value.new_full((value.numel() + 16,), filled)
        slot = room[8 : 8 + value.numel()].view(value.shape)
    else:
        room = value.new_full((8, *value.shape[:-1], value.shape[-1] + wider), filled)
        slot = room[0, ..., 8 : 8 + value.shape[-1]]
    slot.copy_(value)
    return room, slot


def _gaps(value: Tensor) -> Tensor:
    """The same values, every second one along the last axis."""
    return torch.stack([value, value], dim=-1).flatten(-2)[..., ::2]


@contextmanager
def _unwritten() -> Iterator[None]:
    empty = torch.empty

    def filled(*given: Any, **named: Any) -> Tensor:
        found = empty(*given, **named)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    with mock.patch.object(torch, "empty", filled):
        yield
