"""Triton's kernels, on a card where there is one, else under Triton's interpreter: what no claim asks of them.

The interpreter truncates float32 to bfloat16 where a card rounds to nearest, so that in bfloat16 an ulp is allowed.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from falsifiers_claims import CLAIMS
from torch import Tensor

from blackswan import reference
from blackswan.contracts.model import Claim
from blackswan.falsifiers.runner.engine import Options, falsify, replay
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.impl import dispatch, kernels
from blackswan.impl.kernels import cross_entropy, functions, nf4_dequantize, rms_norm, rope, swiglu
from blackswan.impl.operations import OPERATIONS
from blackswan.reference.table import Array

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS32 = torch.finfo(torch.float32).eps
nonfinite = pytest.mark.filterwarnings("ignore:(invalid|divide|overflow):RuntimeWarning")  # NumPy's, under the interpreter
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def strided(x: Tensor, before: int = 8, after: int = 24) -> Tensor:
    """The same values as a slice of wider rows."""
    wide = torch.full((*x.shape[:-1], before + x.shape[-1] + after), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., before : before + x.shape[-1]] = x
    return wide[..., before : before + x.shape[-1]]


def exact(value: Tensor) -> Array:
    return value.detach().double().cpu().numpy()


def ulp(expected: Array, dtype: torch.dtype) -> Array:
    info = torch.finfo(dtype)
    return np.maximum(info.eps * 2.0 ** (np.frexp(expected)[1] - 1), info.smallest_normal * info.eps)


def assert_close(actual: Tensor, expected: Array | Tensor, ulps: float = 1.0, rounding: float = 8.0) -> None:
    """Within `ulps` of the tensor's dtype element by element, and some roundings of float32 of the largest element (sums cancel)."""
    wanted = exact(expected) if isinstance(expected, Tensor) else expected
    assert tuple(actual.shape) == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(exact(actual)[~finite], wanted[~finite])
    limit = ulps * ulp(wanted[finite], actual.dtype) + rounding * EPS32 * np.abs(wanted[finite]).max(initial=0.0)
    error = np.abs(exact(actual)[finite] - wanted[finite])
    outside = error > limit
    assert not outside.any(), (
        f"{int(outside.sum())} of {outside.size} elements, the first off by {error[outside][0]:.3g}: at most {limit[outside][0]:.3g}"
    )


def values_of(inputs: dict[str, Tensor]) -> dict[str, Array]:
    return {name: exact(value) if value.is_floating_point() else value.cpu().numpy() for name, value in inputs.items()}


def expected(operation: str, scalars: dict[str, Any], **inputs: Tensor) -> Array:
    """The reference's float64 result."""
    (result,) = reference.evaluate(operation, values_of(inputs), scalars).values()
    return np.asarray(result)


def expected_gradients(
    operation: str, scalars: dict[str, Any], dy: Tensor, wrt: Sequence[str], output: str = "y", **inputs: Tensor
) -> list[Array]:
    """The reference's float64 gradients."""
    found = reference.differentiate(operation, values_of(inputs), scalars, {output: exact(dy)}, wrt)
    return [np.asarray(found[name]) for name in wrt]


def test_the_kernels_can_run_here() -> None:
    assert kernels.why_not() is None
    assert set(kernels.NAMES) == set(functions.OPERATIONS) <= set(OPERATIONS)


# Arguments of which the claims know nothing: slices of wider rows, what is added to a gradient, results in given tensors


def test_rows_may_be_slices_of_wider_ones() -> None:
    x, dy = strided(drawn(5, 100)), strided(drawn(5, 100, seed=1), 16, 0)
    weight, add, labels = drawn(100, seed=2), drawn(5, 100, seed=3), torch.arange(5, device=DEVICE)
    (y, rstd), dx = rms_norm.rms_norm(x, weight, 1e-5), rms_norm.rms_norm_backward(dy, x, weight, rms_norm.rms_norm(x, weight, 1e-5)[1])
    assert_close(rms_norm.rms_norm_backward(dy, x, weight, rstd, add=add), dx + add)
    alone = (x.contiguous(), dy.contiguous())
    for found, wanted in (
        (y, rms_norm.rms_norm(alone[0], weight, 1e-5)[0]),
        (dx, rms_norm.rms_norm_backward(alone[1], alone[0], weight, rstd)),
        (rms_norm.rms_norm_weight_gradient(dy, x, rstd), rms_norm.rms_norm_weight_gradient(alone[1], alone[0], rstd)),
        (swiglu.swiglu(x, dy), swiglu.swiglu(*alone)),
        *zip(cross_entropy.weighted_cross_entropy(x, labels), cross_entropy.weighted_cross_entropy(alone[0], labels), strict=True),
    ):
        assert torch.equal(found, wanted)


def test_gradients_of_gate_and_up_may_be_written_over_them() -> None:
    both, dy = 3 * drawn(3, 200), drawn(3, 100, seed=1)
    gate, up = both[:, :100], both[:, 100:]
    found = swiglu.swiglu_backward(dy, gate, up)
    assert swiglu.swiglu_backward(dy, gate, up, dgate=gate, dup=up)[0] is gate
    assert torch.equal(torch.cat(found, dim=1), both)


# NF4


def stored(rows: int, columns: int, block_size: int) -> tuple[Tensor, Tensor]:
    codes, absmax = OPERATIONS["nf4_quantize"](drawn(rows, columns), block_size)
    return codes, absmax


@nonfinite
def test_absmax_may_be_anything() -> None:
    codes = torch.tensor([0xF0, 0x1E, 0x7F], dtype=torch.uint8, device=DEVICE)
    infinite = nf4_dequantize.nf4_dequantize(codes, torch.tensor([float("inf")], device=DEVICE), 1, 5, 64, torch.float32)
    assert infinite.isnan().tolist() == [[False, False, False, False, True]]


def test_a_weight_is_written_where_it_is_asked_for() -> None:
    codes, absmax = stored(33, 129, 64)
    room = torch.full((33 * 129 + 50,), 7.0, device=DEVICE)
    out = room[: 33 * 129].view(33, 129)
    assert nf4_dequantize.nf4_dequantize(codes, absmax, 33, 129, 64, torch.float32, out) is out
    assert_close(out, OPERATIONS["nf4_dequantize"](codes, absmax, 33, 129, 64), ulps=0.0, rounding=0.0)
    assert room[33 * 129 :].eq(7.0).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    codes, absmax = stored(4, 64, 64)
    for changed, message in (
        ({"rows": 5}, "has 160 bytes of codes and 5 absmax"),
        ({"block_size": 48}, "power of two"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"absmax": absmax.double()}, "torch.float64"),
        ({"out": torch.empty(4, 32, device=DEVICE)}, "to write into"),
    ):
        given = {"codes": codes, "absmax": absmax, "rows": 4, "columns": 64, "block_size": 64, "dtype": torch.float32, **changed}
        with pytest.raises(ValueError, match=message):
            nf4_dequantize.nf4_dequantize(**given)


# RMSNorm


@pytest.mark.parametrize(("rows", "hidden"), [(200, 70), (rms_norm.ROWS_A_PART**2 + 100, 2)])
def test_the_weights_gradient_adds_up_many_rows_in_one_order(rows: int, hidden: int) -> None:
    x, dy = drawn(rows, hidden), drawn(rows, hidden, seed=1)
    _, rstd = rms_norm.rms_norm(x, torch.ones(hidden, device=DEVICE), 1e-5)
    found = rms_norm.rms_norm_weight_gradient(dy, x, rstd)
    assert_close(found, (exact(dy) * exact(x) * exact(rstd)[:, None]).sum(axis=0), rounding=50.0)
    assert torch.equal(found, rms_norm.rms_norm_weight_gradient(dy, x, rstd))


@dtypes
def test_sum_and_norm_in_one(dtype: torch.dtype) -> None:
    x, residual, weight = drawn(9, 130, dtype=dtype), drawn(9, 130, dtype=dtype, seed=1), drawn(130, dtype=dtype, seed=2)
    total, y, rstd = rms_norm.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(total, x + residual, ulps=1.0 if dtype == torch.bfloat16 else 0.0, rounding=0.0)
    separate, separate_rstd = rms_norm.rms_norm(total, weight, 1e-6)
    assert torch.equal(y, separate)
    assert torch.equal(rstd, separate_rstd)
    held, out, kept = residual.clone(), torch.empty_like(x), torch.empty(9, device=DEVICE)
    given = rms_norm.add_rms_norm(x, held, weight, 1e-6, total=held, out=out, rstd=kept)
    assert all(one is other for one, other in zip(given, (held, out, kept), strict=True))
    assert torch.equal(held, total)
    assert torch.equal(out, y)


@nonfinite
def test_what_is_not_finite_stays_where_it_is() -> None:
    x = drawn(4, 100)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("inf"), 0.0
    weight = drawn(100, seed=1)
    y, rstd = rms_norm.rms_norm(x, weight, 1e-6)
    assert_close(y, OPERATIONS["rms_norm"](x, weight, 1e-6))
    dx = rms_norm.rms_norm_backward(torch.ones_like(x), x, weight, rstd)
    assert dx.isnan().all(dim=1).tolist() == [False, True, True, False]
    assert dx[[0, 3]].isfinite().all()
    gate, up = drawn(2, 40), drawn(2, 40, seed=1)
    gate[0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, -100.0])
    up[1, :2] = torch.tensor([float("nan"), float("inf")])
    assert_close(swiglu.swiglu(gate, up), OPERATIONS["swiglu"](gate, up))


# Rotation

HEADS = [(1, 1, 2), (3, 14, 64), (2, 5, 24), (1, 17, 128)]


def placed(tokens: int) -> Tensor:
    """Positions up to 40,000, where float32 angles would be off by a thousandth."""
    return torch.linspace(0, 40_000, tokens).round().to(torch.int64).flip(0).to(DEVICE)


def test_angles_are_exact_at_far_positions() -> None:
    positions = torch.cat((torch.arange(40), torch.arange(39_950, 40_000), torch.tensor([2**31 - 1]))).to(DEVICE)
    table = rope.rope_table(positions, 1e6, 128)
    angle = positions.double().cpu().numpy()[:, None] * 1e6 ** -(np.arange(64) / 64)
    wanted = np.concatenate((np.cos(angle), np.sin(angle)), axis=1)
    assert np.abs(exact(table) - wanted)[:-1].max() <= 0.5 * EPS32 / 2 + 1e-9
    assert np.abs(exact(table) - wanted).max() <= 1e-6
    in_float32 = np.cos(angle.astype(np.float32))
    assert np.abs(in_float32 - wanted[:, :64]).max() > 1e-4, "the positions are not far enough for this test to say anything"


@dtypes
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), HEADS)
def test_rotations(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    fused = drawn(tokens, heads + 3, head_dim, dtype=dtype)
    x, positions = fused[:, 2 : 2 + heads], placed(tokens)
    y, rstd = rope.qk_norm_rope(x, positions, 1e6)
    assert rstd is None
    wanted = expected("rope", {"theta": 1e6}, x=x[None], positions=positions[None])[0]
    assert_close(y, wanted)
    table = rope.rope_table(positions, 1e6, head_dim)
    assert torch.equal(rope.qk_norm_rope(x, positions, 1e6, table=table)[0], y)
    assert rope.qk_norm_rope(x, positions, 1e6, out=x)[0] is x
    assert torch.equal(x, y)
    dy = drawn(tokens, heads, head_dim, dtype=dtype, seed=1)
    (dx,) = expected_gradients("rope", {"theta": 1e6}, dy[None], ("x",), x=x[None], positions=positions[None])
    assert_close(rope.qk_norm_rope_backward(dy, None, positions, 1e6, out=dy), dx[0])


@dtypes
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), HEADS)
def test_norm_and_rotation_in_one(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x, positions = drawn(tokens, heads + 3, head_dim, dtype=dtype)[:, 1 : 1 + heads], placed(tokens)
    weight = drawn(head_dim, dtype=dtype, seed=1) + 1
    y, rstd = rope.qk_norm_rope(x, positions, 1e4, weight, 1e-6)
    separate, separate_rstd = rms_norm.rms_norm(x.reshape(-1, head_dim), weight, 1e-6)
    assert_close(rstd.flatten(), separate_rstd)
    assert_close(y, rope.qk_norm_rope(separate.view(x.shape), positions, 1e4)[0], ulps=2.0)
    dy = drawn(tokens, heads, head_dim, dtype=dtype, seed=2)
    turned = expected_gradients("rope", {"theta": 1e4}, dy[None], ("x",), x=x[None], positions=positions[None])[0][0]
    (dx,) = expected_gradients("qk_norm", {"eps": 1e-6}, torch.from_numpy(turned)[None], ("x",), x=x[None], weight=weight)
    size = 16.0 * float(rstd.max() * np.abs(turned).max() * np.abs(exact(weight)).max() / max(np.abs(dx).max(), 1e-30))
    for kept in (rstd, None):
        found = rope.qk_norm_rope_backward(dy, x, positions, 1e4, weight, 1e-6, kept)
        assert_close(found, dx[0], rounding=size)
    table = rope.rope_table(positions, 1e4, head_dim)
    assert torch.equal(rope.qk_norm_rope_backward(dy, x, positions, 1e4, weight, 1e-6, out=dy, table=table), found)


@dtypes
def test_a_norm_and_rotation_with_a_weight_a_head_are_those_of_each_head_alone(dtype: torch.dtype) -> None:
    tokens, heads, head_dim = 2, 10, 12  # two programs a token, the second of them not full
    x, positions = drawn(tokens, heads + 1, head_dim, dtype=dtype)[:, 1:], placed(tokens)
    weight, dy = drawn(heads, head_dim, dtype=dtype, seed=1) + 1, drawn(tokens, heads, head_dim, dtype=dtype, seed=2)
    y, rstd = rope.qk_norm_rope(x, positions, 1e4, weight, 1e-6)
    dx = [rope.qk_norm_rope_backward(dy, x, positions, 1e4, weight, 1e-6, kept) for kept in (rstd, None)]
    for head in range(heads):
        alone, one = x[:, head : head + 1], weight[head]
        assert_close(y[:, head : head + 1], rope.qk_norm_rope(alone, positions, 1e4, one, 1e-6)[0])
        wanted = rope.qk_norm_rope_backward(dy[:, head : head + 1], alone, positions, 1e4, one, 1e-6)
        for found in dx:
            assert_close(found[:, head : head + 1], wanted)
    with pytest.raises(ValueError, match="for all heads"):
        rope.qk_norm_rope(x, positions, 1e4, weight[:-1], 1e-6)


# SwiGLU


def test_swiglu_of_a_closed_gate_is_not_lost_before_a_large_factor() -> None:
    gate = torch.tensor([[-80.0, -87.5, -90.0, -95.0, -100.0]], device=DEVICE)
    up, dy = torch.full_like(gate, 1e12), torch.full_like(gate, 1e14)

    def limit(wanted: Array) -> Array:
        """The exponent is of a number rounded to float32, as is its product with log2 e."""
        return 2 * EPS32 * np.abs(exact(gate)) * np.abs(wanted)

    wanted = expected("swiglu", {}, gate=gate, up=up)
    assert (np.abs(exact(swiglu.swiglu(gate, up)) - wanted) <= limit(wanted)).all()
    gradients = expected_gradients("swiglu", {}, dy, ("gate", "up"), gate=gate, up=up)
    for found, wanted in zip(swiglu.swiglu_backward(dy, gate, up), gradients, strict=True):
        assert (np.abs(exact(found) - wanted) <= limit(wanted)).all()


def test_offsets_are_64_bits_wide() -> None:
    """Rows 2³⁰ apart, of which the third begins where a 32-bit offset is negative. Of the 4 GiB of room a few pages are touched."""
    apart = 2**30
    room = torch.empty(2 * apart + 64, dtype=torch.float16, device=DEVICE)
    gate = room.as_strided((3, 64), (apart, 1))
    gate.copy_(drawn(3, 64))
    near, up = gate.clone(), drawn(3, 64, dtype=torch.float16)
    assert torch.equal(swiglu.swiglu(gate, up), swiglu.swiglu(near, up))
    assert torch.equal(rms_norm.rms_norm(gate, up[0], 1e-6)[0], rms_norm.rms_norm(near, up[0], 1e-6)[0])
    positions = placed(3)
    far = rope.qk_norm_rope(gate[:, None], positions, 1e4)[0]
    assert torch.equal(far, rope.qk_norm_rope(near[:, None], positions, 1e4)[0])


# The dispatch

CALLS: dict[str, Callable[[torch.dtype], tuple[dict[str, Any], tuple[str, ...]]]] = {
    "rms_norm": lambda dtype: ({"x": drawn(2, 3, 100, dtype=dtype), "weight": drawn(100, dtype=dtype), "eps": 1e-6}, ("x", "weight")),
    "qk_norm": lambda dtype: ({"x": drawn(2, 3, 4, 24, dtype=dtype), "weight": drawn(24, dtype=dtype), "eps": 1e-6}, ("x", "weight")),
    "rope": lambda dtype: ({"x": drawn(2, 3, 4, 24, dtype=dtype), "positions": placed(6).view(2, 3), "theta": 1e4}, ("x",)),
    "swiglu": lambda dtype: ({"gate": drawn(2, 3, 100, dtype=dtype), "up": drawn(2, 3, 100, dtype=dtype, seed=1)}, ("gate", "up")),
    "nf4_dequantize": lambda dtype: (
        dict(zip(("codes", "absmax"), stored(5, 43, 64), strict=True)) | {"rows": 5, "columns": 43, "block_size": 64, "dtype": dtype},
        (),
    ),
    "nf4_linear": lambda dtype: (
        dict(zip(("codes", "absmax"), stored(5, 43, 64), strict=True))
        | {"x": drawn(2, 3, 43, dtype=dtype), "in_features": 43, "out_features": 5, "block_size": 64, "bias": drawn(5)},
        ("x",),
    ),
    "weighted_cross_entropy": lambda dtype: (
        {"logits": drawn(3, 4, dtype=dtype), "labels": torch.tensor([0, 3, 1], device=DEVICE)},
        ("logits",),
    ),
}


def through_dispatch(operation: str, dtype: torch.dtype, choice: str) -> list[Tensor]:
    """The result and the gradients."""
    arguments, wrt = CALLS[operation](dtype)
    for name in wrt:
        arguments[name].requires_grad_()
    with dispatch.backend(choice):
        y = dispatch.call(operation, operation, **arguments)
    dy = drawn(*y.shape, dtype=y.dtype, seed=5)
    return [y, *(torch.autograd.grad(y, [arguments[name] for name in wrt], dy) if wrt else ())]


@pytest.mark.parametrize("operation", kernels.NAMES)
def test_a_kernel_stands_in_for_its_operation_in_float16_and_leaves_float64_to_torch(operation: str) -> None:
    """The claims about kernels are asked in float32 and bfloat16."""
    for dtype in (torch.float16, torch.float64):
        found, wanted = through_dispatch(operation, dtype, "triton"), through_dispatch(operation, dtype, "torch")
        assert [value.dtype for value in found] == [value.dtype for value in wanted]
        sums = torch.finfo(dtype).eps / EPS32 if operation == "nf4_linear" else 1.0
        for one, other in zip(found, wanted, strict=True):
            if dtype == torch.float64:
                assert torch.equal(one, other)
            else:
                assert_close(one, other, rounding=16.0 * sums)


def test_what_computes_can_be_chosen_and_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name, table in (("triton", functions.OPERATIONS), ("torch", OPERATIONS)):
        monkeypatch.setitem(table, "swiglu", lambda gate, name=name, **_: ran.append(name) or gate)
    x = torch.zeros(1, 1)
    dispatch.call("", "swiglu", gate=x, up=x)
    with dispatch.backend("triton"):
        dispatch.call("", "swiglu", gate=x, up=x)
        dispatch.call("", "swiglu", gate=x.double(), up=x)
        with dispatch.replaced({"swiglu": lambda gate, **_: ran.append("replaced") or gate}):
            dispatch.call("", "swiglu", gate=x, up=x)
        assert dispatch.backend_on(x.device) == "triton"
        assert dispatch.describe_backend(x.device).startswith("Triton for nf4_dequantize")
    assert ran == ["torch", "triton", "torch", "replaced"]
    assert dispatch.backend_on(x.device) == dispatch.describe_backend(x.device) == "torch"
    assert dispatch.backend_on(torch.device("cuda")) == "triton"
    monkeypatch.setattr(kernels, "why_not", lambda: "no Triton here")
    assert dispatch.backend_on(torch.device("cuda")) == "torch"
    assert dispatch.describe_backend(torch.device("cuda")) == "torch (no Triton here)"
    with pytest.raises(RuntimeError, match="no Triton here"), dispatch.backend("triton"):
        pass
    with pytest.raises(ValueError, match="expected auto, torch or triton"), dispatch.backend("cuda"):
        pass


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(kernels.importlib, "import_module", missing)
    kernels.missing.cache_clear()
    try:
        assert "No module named 'triton'" in str(kernels.why_not())
    finally:
        kernels.missing.cache_clear()


def test_rows_that_are_not_contiguous_are_refused() -> None:
    x = drawn(4, 8)
    crossed, weight, positions = drawn(8, 4).T, drawn(8), placed(4)
    for call in (
        lambda: rms_norm.rms_norm(crossed, weight, 1e-6),
        lambda: rms_norm.add_rms_norm(x, crossed, weight, 1e-6),
        lambda: rms_norm.rms_norm_backward(crossed, x, weight, drawn(4)),
        lambda: rms_norm.rms_norm_weight_gradient(x, crossed, drawn(4)),
        lambda: rms_norm.rms_norm(x, weight, 1e-6, out=crossed),
        lambda: rope.qk_norm_rope(crossed[:, None], positions, 1e4),
        lambda: swiglu.swiglu(x, crossed),
        lambda: cross_entropy.weighted_cross_entropy(crossed, positions),
    ):
        with pytest.raises(ValueError, match="expected its last axis to be contiguous"):
            call()


def claimed(name: str, **changes: Any) -> Claim:
    claim = CLAIMS[name]
    return replace(claim, domain=replace(claim.domain, sizes={**claim.domain.sizes, **changes}, boundary=()))


def test_a_claim_about_triton_attacks_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claimed("KERNEL-SWIGLU", intermediate=(7, 64))
    assert claim.backend == "triton"
    subject, ran = Implementation(str(DEVICE)), []
    right = functions.OPERATIONS["swiglu"]
    monkeypatch.setitem(functions.OPERATIONS, "swiglu", lambda gate, up: ran.append("kernel") or right(gate, up))
    monkeypatch.setitem(OPERATIONS, "swiglu", lambda gate, **_: ran.append("torch") or gate)
    assert falsify(claim, "float32", subject, Options("quick")).state is State.HELD
    assert set(ran) == {"kernel"}
    monkeypatch.setitem(functions.OPERATIONS, "swiglu", lambda gate, up: right(up, gate))
    verdict = falsify(claim, "float32", subject, Options("quick", shrink=False))
    assert verdict.state is State.FALSIFIED
    assert replay(claim, verdict.case, subject).state is State.FALSIFIED


def test_a_subject_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Implementation(str(DEVICE)).using("triton")
    assert pickle.loads(pickle.dumps(subject)).backend == "triton"
    assert subject.unsupported("swiglu", "float32") is None
    assert subject.unsupported("swiglu", "float64") == "impl has no triton swiglu in float64"
    assert "no triton softmax" in str(subject.unsupported("softmax", "float32"))
    monkeypatch.setattr(kernels, "why_not", lambda: "no Triton here")
    verdict = falsify(claimed("KERNEL-SWIGLU"), "float32", Implementation(str(DEVICE)), Options("quick"))
    assert (verdict.state, verdict.reason) == (State.NOT_RUN, "no Triton here")


def test_bad_labels_and_logits_are_refused_as_by_torch() -> None:
    arguments, _ = CALLS["weighted_cross_entropy"](torch.float32)
    for changed in ({"labels": torch.tensor([0, 4, 1], device=DEVICE)}, {"logits": arguments["logits"] * float("nan")}):
        messages = []
        for choice in ("triton", "torch"):
            with dispatch.backend(choice), pytest.raises(ValueError, match=next(iter(changed))) as raised:
                dispatch.call("loss", "weighted_cross_entropy", **{**arguments, **changed})
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
