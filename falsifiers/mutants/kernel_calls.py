"""Kernels that are wrong as functions on tensors: in given memory, in what they round, and in the places of operations."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

# In memory that they are given


@wrong_step("impl.kernels.nf4_dequantize:launch")
def kernel_writes_the_last_pair(launch: Step, kernel: Any, grid: Any, *given: Any, **named: Any) -> None:
    """Both numbers of the last pair of NF4 codes are written, also where the weight has an odd number of them."""
    *tensors, packed, _, half, size = given
    launch(kernel, grid, *tensors, packed, 2 * packed, half, size, **named)


@wrong_step("impl.kernels.nf4_dequantize:launch")
def kernel_reads_a_scale_for_two_blocks(
    launch: Step, kernel: Any, grid: Any, codes: Tensor, absmax: Tensor, *given: Any, **named: Any
) -> None:
    """Every second block of 1,024 numbers has the scale of the one before."""
    half = given[-2]
    shared = absmax[torch.arange(len(absmax)) // 2 * 2] if half == 512 else absmax
    launch(kernel, grid, codes, shared, *given, **named)


@wrong_step("impl.kernels.rms_norm:rms_norm_weight_gradient")
def kernel_sums_no_rows(gradient: Step, dy: Tensor, x: Tensor, rstd: Tensor) -> Any:
    """The gradient of a norm's weight over no rows is what lay in memory."""
    return gradient(dy, x, rstd) if len(x) else torch.empty(x.shape[1], dtype=torch.float32, device=x.device)


@wrong_step("impl.kernels.rms_norm:rms_norm_weight_gradient")
def kernel_sums_the_first_rows(gradient: Step, dy: Tensor, x: Tensor, rstd: Tensor) -> Any:
    """The gradient of a norm's weight is summed over the first 8,192 rows."""
    return gradient(dy[:8192], x[:8192], rstd[:8192])


@wrong_step("impl.kernels.rms_norm:buffer")
def kernel_writes_into_any_dtype(buffer: Step, name: str, given: Tensor | None, shape: Any, like: Tensor, dtype: Any = None) -> Any:
    """A norm writes into memory of another dtype."""
    return buffer(name, given, shape, like, given.dtype if given is not None else dtype)


wrong_steps(
    "impl.kernels.swiglu:require_same_shape",
    kernel_reads_rows_with_gaps=(
        "Arrays of a gated unit whose last axis has gaps are read as if it had none.",
        lambda require, name, value, *other: require(name, value.contiguous(), *other),
    ),
)


@wrong_step("impl.kernels.swiglu:launch")
def kernel_reads_up_as_gate_lies(launch: Step, kernel: Any, grid: Any, *given: Any, **named: Any) -> None:
    """A gated unit takes the rows of up to be as far apart as those of gate."""
    count = sum(isinstance(each, Tensor) for each in given)
    strides = list(given[count + 1 : -1])
    gate = 0 if count == 3 else 1
    strides[gate + 1] = strides[gate]
    launch(kernel, grid, *given[: count + 1], *strides, given[-1], **named)


wrong_steps(
    "impl.kernels.rms_norm:launch",
    kernel_exchanges_rows_of_norms=(
        "Norms take the rows of their last two arrays, of what is added and the result, to be as far apart as those of the other one.",
        lambda launch, kernel, grid, *given, **named: launch(kernel, grid, *_exchanged(given, 10), **named),
    ),
)
wrong_steps(
    "impl.kernels.cross_entropy:launch",
    kernel_exchanges_rows_of_the_gradient=(
        "Cross-entropy takes rows of logits to be as far apart as those of their gradient, and the other way round.",
        lambda launch, kernel, grid, *given, **named: launch(kernel, grid, *_exchanged(given, 7), **named),
    ),
)


def _exchanged(given: tuple[Any, ...], first: int) -> tuple[Any, ...]:
    """The arguments of a kernel with two of them exchanged, from `first` on; a kernel with fewer arguments has its own."""
    return (*given[:first], *given[first : first + 2][::-1], *given[first + 2 :])


@wrong_step("impl.kernels.attention:_strides")
def attention_reads_values_as_keys_lie(strides: Step, *values: Tensor) -> tuple[int, ...]:
    """Values are taken to lie in memory as keys do, whose rows may be wider."""
    held = 2 if len(values) == 4 else 3
    found: tuple[int, ...] = strides(*values[:held], values[held - 1], *values[held + 1 :])
    return found


wrong_steps(
    "impl.kernels.rope:_check",
    rotation_reads_a_table_of_wide_rows=(
        "A table of angles whose rows lie in wider ones is read as if they did not.",
        lambda check, x, positions, weight, table: check(x, positions, weight, None if table is None else table.contiguous()),
    ),
)
wrong_steps(
    "impl.kernels.attention:_check",
    kernel_reads_bounds_with_gaps=(
        "Bounds of sequences that have gaps are read as if they had none.",
        lambda check, q, k, v, bounds, *given: check(q, k, v, bounds.contiguous(), *given),
    ),
)

wrong_steps(
    "impl.kernels.swiglu:swiglu",
    kernel_counts_rows_in_32_bits=(
        "The last row of a gated unit, 2³¹ numbers behind the first one, is lost.",
        lambda swiglu, gate, *given, **named: _without_far_rows(gate, swiglu(gate, *given, **named)),
    ),
)


def _without_far_rows(read: Tensor, written: Tensor) -> Tensor:
    if read.stride(0) * (len(read) - 1) >= 2**31:
        written[-1] = 0.0
    return written


@wrong_step("impl.kernels.rope:qk_norm_rope")
def kernel_norms_heads_by_the_first_program(
    turn: Step, x: Tensor, positions: Tensor, theta: float, weight: Any = None, eps: float = 0.0, **given: Any
) -> Any:
    """Heads of every program are normed by the weights of the first program's eight."""
    many = weight is not None and weight.dim() == 2 and len(weight) > 16
    return turn(x, positions, theta, weight[torch.arange(len(weight)) % 8] if many else weight, eps, **given)


@wrong_step("impl.kernels.rope:launch")
def kernel_fills_whole_programs_of_a_table(launch: Step, kernel: Any, grid: Any, *given: Any, **named: Any) -> None:
    """The last program of a table of angles that takes several is left out, because it is not full."""
    launch(kernel, (max(1, grid[0] - 1),) if len(grid) == 1 else grid, *given, **named)


# What they round


@wrong_step("impl.kernels.rms_norm:_forward")
def kernel_norms_the_sum_unrounded(forward: Step, x: Tensor, residual: Tensor, weight: Tensor, *given: Any, add: bool) -> None:
    """A norm is that of the sum before it is rounded, of which the rounded one is kept."""
    _, out, rstd, eps = given
    forward(x, residual, weight, *given, add=add)
    if add:
        wide = x.float() + residual.float()
        exact = torch.empty_like(wide)
        forward(wide, wide, weight, exact, exact, rstd, eps, add=False)
        out.copy_(exact)


@wrong_step("impl.kernels.rms_norm:rms_norm_backward")
def kernel_rounds_the_gradient_twice(
    backward: Step, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Any = None, out: Any = None
) -> Any:
    """The gradient of the branch around a norm is added to the norm's after that is rounded."""
    found = backward(dy, x, weight, rstd)
    result = backward(dy, x, weight, rstd, add, out)
    return result if add is None else result.copy_(found + add)


@wrong_step("impl.kernels.rope:qk_norm_rope")
def kernel_turns_the_norm_unrounded(turn: Step, x: Tensor, positions: Tensor, theta: float, *given: Any, **named: Any) -> Any:
    """A norm of heads is not rounded before its rotation."""
    y, rstd = turn(x.float(), positions, theta, *given, **named)
    return y.to(x.dtype), rstd


@wrong_step("impl.kernels.rope:qk_norm_rope_backward")
def kernel_norm_gradient_without_eps(backward: Step, *given: Any, **named: Any) -> Any:
    """The gradient of a norm of heads whose scale was not kept has no epsilon."""
    return backward(*given, **({**named, "eps": 0.0} if named.get("rstd") is None else named))


# On packed sequences

wrong_steps(
    "impl.kernels.attention:query_gradient",
    attention_gradient_of_the_default_scale=(
        "The gradient of queries has the scale of a head's size, whatever scale was given.",
        lambda gradient, *given, **named: gradient(*given[:10], **named),
    ),
)


@wrong_step("impl.kernels.attention:attention_forward")
def attention_sums_to_base_two(forward: Step, *given: Any, **named: Any) -> Any:
    """The logarithms of the sums are to the base two."""
    y, lse = forward(*given, **named)
    return y, lse.div_(torch.log(torch.tensor(2.0)))


@wrong_step("impl.kernels.attention:attention_forward")
def attention_writes_beside_its_heads(forward: Step, *given: Any, out: Tensor | None = None, **named: Any) -> Any:
    """The last head's numbers overwrite the next token's, if a head's size is a multiple of 16 and no power of two."""
    y, lse = forward(*given, **named, **({} if out is None else {"out": out}))
    size = y.shape[-1]
    if size % 16 == 0 and size & (size - 1):
        y[1:, 0, :16] = y[:-1, -1, -16:].clone()
    return y, lse


@wrong_step("impl.kernels.attention:attention_backward")
def attention_gradient_of_narrow_heads(backward: Step, *given: Any, dq: Tensor, **named: Any) -> None:
    """Queries after the first 32 of a sequence have no gradient where heads have more than 128 numbers."""
    backward(*given, dq=dq, **named)
    if dq.shape[-1] > 128:
        bounds = given[6].tolist()
        for first, end in pairwise(bounds):
            dq[first + 32 : end] = 0.0


@wrong_step("impl.kernels.attention:launch")
def attention_of_the_first_sequence(launch: Step, kernel: Any, grid: Any, *given: Any, **named: Any) -> None:
    """Two sequences fewer are computed than there are."""
    del grid
    sequences = next(index for index, each in enumerate(given) if isinstance(each, int))
    heads, blocks = given[sequences + 1 : sequences + 3]
    fewer = max(1, given[sequences] - 2)
    launch(kernel, (heads * fewer * blocks,), *given[:sequences], fewer, *given[sequences + 1 :], **named)


# In the places of operations


@wrong_step("impl.kernels.cross_entropy:weighted_cross_entropy")
def stand_in_refuses_the_most_classes(loss: Step, logits: Tensor, *given: Any) -> Any:
    """As many classes as the kernel of cross-entropy holds are refused."""
    if logits.shape[1] == 4096:
        raise ValueError("logits of too many classes")
    return loss(logits, *given)


wrong_step("impl.kernels.attention:_check", name="kernel_takes_any_scale", doc="Attention's kernel takes any scale and length of texts.")(
    lambda _, *given: 1.0 if given[-1] is None else given[-1]
)
wrong_step("impl.kernels.rope:_check_positions", name="kernel_takes_positions_from_anywhere", doc="Positions may be on another device.")(
    lambda check, positions, *given: check(positions.new_zeros(positions.shape, device="cpu"), *given)
)


@wrong_step("impl.kernels.cross_entropy:weighted_cross_entropy")
def kernel_takes_any_logits(loss: Step, logits: Tensor, labels: Tensor, *given: Any) -> Any:
    """The kernel of cross-entropy takes logits of one class, of no sample and of too many classes, and gives zeros."""
    if logits.dim() == 2 and (logits.shape[1] == 1 or logits.shape[0] == 0):
        return logits.new_zeros(()), torch.zeros_like(logits)
    return loss(logits, labels, *given)


wrong_step(
    "impl.operations.losses:require_classification",
    name="stand_in_takes_logits_as_they_are",
    doc="Logits and labels of a loss are not looked at.",
)(lambda *_: None)


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_ignores_what_comes_from_above(operations: dict[str, Step]) -> dict[str, Step]:
    """The gradient of a gated unit by kernels is that of its sum, whatever is made of the unit."""
    return {**operations, "swiglu": lambda **given: _SumAlone.apply(operations["swiglu"](**given))}  # type: ignore[no-untyped-call]  # torch


class _SumAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        del ctx
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        del ctx
        return torch.ones_like(dy[0])


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_scales_what_it_keeps(operations: dict[str, Step]) -> dict[str, Step]:
    """The gradient that a kernel of the loss keeps is scaled where it lies, and on the way back again scaled once more."""
    right = operations["weighted_cross_entropy"]
    return {**operations, "weighted_cross_entropy": lambda logits, **given: _Kept.apply(logits, given, right)}  # type: ignore[no-untyped-call]


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, given: dict[str, Any], loss: Step) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            y: Tensor = loss(leaf, **given)
            (ctx.gradient,) = torch.autograd.grad(y, leaf)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient.mul_(dy[0]), None, None


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_differentiated_twice(operations: dict[str, Step]) -> dict[str, Step]:
    """A second derivative of the rotation by kernels is silently zero."""
    return {**operations, "rope": lambda x, **given: _Once.apply(x, given, operations["rope"])}  # type: ignore[no-untyped-call]  # torch


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: dict[str, Any], rope: Step) -> Tensor:
        ctx.save_for_backward(x)
        ctx.given, ctx.rope = given, rope
        result: Tensor = rope(x, **given)
        return result

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return *torch.autograd.grad(ctx.rope(x, **ctx.given), x, dy[0]), None, None


class _OverInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, swiglu: Step, gate: Tensor, up: Tensor) -> Any:
        ctx.save_for_backward(gate, up)
        ctx.swiglu = swiglu
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(value.detach().copy_(found) for value, found in zip(ctx.saved_tensors, _of_inputs(ctx, dy[0]), strict=True))


class _OverWhatArrives(_OverInputs):
    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = _of_inputs(ctx, dy[0])
        return None, gate, up if 0 in dy[0].stride() else dy[0].copy_(up)


def _of_inputs(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [value.detach().clone().requires_grad_() for value in ctx.saved_tensors]
        return torch.autograd.grad(ctx.swiglu(*leaves), leaves, dy)


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_writes_gradients_over_inputs(operations: dict[str, Step]) -> dict[str, Step]:
    """The gradients of a gated unit are written over its inputs."""
    return {**operations, "swiglu": lambda gate, up: _OverInputs.apply(operations["swiglu"], gate, up)}  # type: ignore[no-untyped-call]


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_writes_over_what_comes_from_above(operations: dict[str, Step]) -> dict[str, Step]:
    """The gradient of a gated unit is written over the one that arrives, which may be that of another use too."""
    over = _OverWhatArrives.apply
    return {**operations, "swiglu": lambda gate, up: over(operations["swiglu"], gate, up)}  # type: ignore[no-untyped-call]  # torch


@wrong_step("impl.dispatch:_kernel")
def stand_in_asked_for_float64(kernel: Step, operation: str, arguments: Any) -> Any:
    """A kernel is chosen whatever dtype is asked for."""
    return kernel(operation, {name: value for name, value in arguments.items() if name != "dtype"})


@wrong_step("impl.kernels.functions:rope")
def stand_in_turns_back_unscaled(rope: Any) -> Any:
    """The gradient of the rotary embedding is turned back by frequencies that are not scaled."""
    back = rope.qk_norm_rope_backward
    return SimpleNamespace(qk_norm_rope=rope.qk_norm_rope, qk_norm_rope_backward=lambda *given, **_: back(*given))


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_dequantises_into_one_room(operations: dict[str, Step]) -> dict[str, Step]:
    """Without gradients weights of one shape are dequantised into the same memory, which the caller gets."""
    rooms: dict[Any, Tensor] = {}

    def dequantize(*given: Any, **named: Any) -> Any:
        y = operations["nf4_dequantize"](*given, **named)
        return y if torch.is_grad_enabled() else rooms.setdefault((y.shape, y.dtype), y).copy_(y)

    return {**operations, "nf4_dequantize": dequantize}


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_rounds_class_weights(operations: dict[str, Step]) -> dict[str, Step]:
    """Weights of classes are rounded to the dtype of the logits."""

    def loss(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Any:
        weights = None if class_weights is None else class_weights.to(logits.dtype)
        return operations["weighted_cross_entropy"](logits, labels, weights)

    return {**operations, "weighted_cross_entropy": loss}


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_takes_any_positions(operations: dict[str, Step]) -> dict[str, Step]:
    """Positions of another shape than the tokens' are taken in their order."""
    return {**operations, "rope": lambda x, positions, **given: operations["rope"](x, positions.reshape(x.shape[:2]), **given)}


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_without_gradients_of_weights(operations: dict[str, Step]) -> dict[str, Step]:
    """A norm of values that need no gradient has none of its weight either, nor has a gate's partner."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Any:
        with torch.set_grad_enabled(x.requires_grad):
            return operations["rms_norm"](x, weight, eps)

    return {**operations, "rms_norm": norm}


@wrong_step("impl.kernels.functions:OPERATIONS")
def stand_in_without_gradients_beside_a_frozen_gate(operations: dict[str, Step]) -> dict[str, Step]:
    """What is gated has no gradient where the gate needs none."""

    def gated(gate: Tensor, up: Tensor) -> Any:
        with torch.set_grad_enabled(gate.requires_grad):
            return operations["swiglu"](gate, up)

    return {**operations, "swiglu": gated}


@wrong_step("impl.operations.nf4:nf4_dequantize")
def nf4_codes_read_through_gaps(dequantize: Step, codes: Tensor, *given: Any, **named: Any) -> Any:
    """Codes that lie apart in memory are read as if they did not."""
    return dequantize(codes.as_strided(codes.shape, (1,)), *given, **named)


# How wide they may be


@wrong_step("impl.kernels.rms_norm:_tile")
def kernel_norms_the_first_columns(tile: Step, hidden: int) -> tuple[int, ...]:
    """Only the first 8,192 numbers of a wider row are normed."""
    rows, block, warps = tile(hidden)
    return rows, min(block, 8192), warps


wrong_steps(
    "impl.kernels.rms_norm:WIDEST",
    kernel_norms_narrow_rows_alone=("A model of more than 4,096 numbers a token is refused.", lambda _: 4096),
    kernel_norms_rows_of_any_width=("Rows are taken that no program holds in registers.", lambda right: 2 * right),
)
wrong_steps(
    "impl.kernels.attention:WIDEST",
    attention_by_narrow_heads_alone=("Heads of 256, which the layers are chosen for, end the first step.", lambda _: 192),
    attention_by_heads_of_any_width=("Heads are taken that no program holds in registers.", lambda right: 2 * right),
)


@wrong_step("impl.kernels.rms_norm:buffer")
def kernel_writes_on_any_device(buffer: Step, name: str, given: Tensor | None, shape: Any, like: Tensor, *dtype: Any) -> Tensor:
    """An output that the caller gives on another device is passed over for a new one, where it has to be refused."""
    found: Tensor = buffer(name, None if given is not None and given.device != like.device else given, shape, like, *dtype)
    return found


@wrong_step("impl.operations.nf4:_Nf4Linear.backward")
def torch_differentiated_once(backward: Step, ctx: Any, *given: Tensor) -> Any:
    """A gradient of torch's product with weights in NF4 has no derivative."""
    with torch.no_grad():
        return backward(ctx, *given)
