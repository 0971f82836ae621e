"""Packed causal attention in Triton against float64: on the CUDA device, or where there is none in Triton's interpreter."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blackswan.impl.kernels import attention
from blackswan.impl.kernels.attention import Blocks, attention_backward, attention_forward

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDINGS = {"float32": 32, "float16": 8, "bfloat16": 8}
"""How many a token's error may be: p, ds and y (and with it Σ dy · y) are rounded, towards zero in the interpreter: twice as far."""
RESULTS = ("y", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Lengths of sequences, heads, KV heads, head_dim, dtype; blocks as (queries, keys, long_first) and scale where not the usual ones."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    blocks: tuple[int, int, bool] | None = None
    scale: float = 0.0

    @property
    def factor(self) -> float:
        return self.scale or self.head_dim**-0.5


CASES = {
    "one group of one head": Case((1, 2, 63, 0, 64, 65), 2, 2, 16, "float32"),
    "groups of two": Case((0, 65, 1), 4, 2, 64, "float16"),
    "groups of four, wide": Case((70, 2), 8, 2, 128),
    "groups of seven": Case((66, 3), 7, 1, 64),
    "129 tokens": Case((129, 0, 0, 5), 2, 1, 64, "float16"),
    "300 tokens": Case((7, 300), 1, 1, 16),
    "a head of 24": Case((40, 5), 2, 1, 24, "float32"),
    "a head of 8": Case((20,), 1, 1, 8),
    "wide query blocks": Case((33, 0, 70), 4, 2, 16, "float16", (32, 16, True)),
    "wide key blocks": Case((33, 0, 70), 4, 2, 16, "float16", (16, 32, False)),
    "a scale of its own": Case((20, 35), 2, 1, 16, "float32", scale=0.6),
    "large scores": Case((35,), 2, 1, 16, "float32", scale=30.0),
}


def expected(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, lengths: tuple[int, ...], scale: float) -> dict[str, Tensor]:
    """All results in float64, a sequence and a head at a time."""
    leaves = [value.double().detach().requires_grad_() for value in (q, k, v)]
    asked, keys, values = leaves
    group, rows, sums, start = q.shape[1] // k.shape[1], [], [], 0
    for length in lengths:
        here, start = slice(start, start + length), start + length
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = [(asked[here, h] @ keys[here, h // group].T * scale).masked_fill(hidden, -torch.inf) for h in range(q.shape[1])]
        rows.append(torch.stack([s.softmax(1) @ values[here, h // group] for h, s in enumerate(scores)], 1))
        sums.append(torch.stack([s.logsumexp(1) for s in scores]))
    y = torch.cat(rows)
    gradients = torch.autograd.grad(y, leaves, dy.double())
    return dict(zip(RESULTS, (y.detach(), torch.cat(sums, 1).detach(), *gradients), strict=True))


def draw(case: Case) -> tuple[list[Tensor], Tensor]:
    """q, k, v, dy and the bounds of sequences."""
    generator, tokens = torch.Generator().manual_seed(0), sum(case.lengths)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    made = [torch.randn(tokens, count, case.head_dim, generator=generator) for count in heads]
    bounds = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    return [value.to(DEVICE, getattr(torch, case.dtype)) for value in made], bounds


def error(found: Tensor, wanted: Tensor) -> float:
    """The worst row's error to its norm, or to the rows' mean norm where its own is smaller."""
    norms = wanted.norm(dim=-1)
    worst = ((found.double() - wanted).norm(dim=-1) / norms.clamp_min(norms.mean())).max()
    return float(worst) if bool(found.isfinite().all()) else float("inf")


def compute(inputs: list[Tensor], bounds: Tensor, case: Case, longest: int | None = None, **buffers: Tensor) -> dict[str, Tensor]:
    """What the kernels give, forward and backward."""
    q, k, v, dy = inputs
    blocks = None if case.blocks is None else Blocks(*case.blocks[:2], 4, 2, case.blocks[2])
    most, scale = max(case.lengths) if longest is None else longest, case.scale or None
    y, lse = attention_forward(q, k, v, bounds, most, scale, buffers.get("y"), buffers.get("lse"), blocks=blocks)
    given = {name: buffers[name] for name in ("dq", "dk", "dv", "delta") if name in buffers}
    chosen = {"query_blocks": blocks, "key_blocks": blocks}
    return dict(zip(RESULTS, (y, lse, *attention_backward(dy, q, k, v, y, lse, bounds, most, scale, **given, **chosen)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_float64(name: str) -> None:
    case = CASES[name]
    inputs, bounds = draw(case)
    found = compute(inputs, bounds, case, max(case.lengths) + 40)
    wanted = expected(*inputs, case.lengths, case.factor)
    errors = {name: error(*(t.mT[..., None] if name == "lse" else t for t in (found[name], wanted[name]))) for name in RESULTS}
    # Large scores carry their rounding into the exponent.
    allowed = ROUNDINGS[case.dtype] * ROUNDING[case.dtype] * max(1.0, case.scale * case.head_dim / 4)
    assert all(value <= allowed for value in errors.values()), (errors, allowed)


def test_strided_inputs_and_outputs() -> None:
    """Everything is strided and given, and full of NaN where it is written to."""
    case = Case((20, 0, 37), 4, 2, 16, "float32")
    (q, k, v, dy), bounds = draw(case)
    wanted = expected(q, k, v, dy, case.lengths, 0.25)
    fused = torch.cat((q, k, v), dim=1)
    views = [*fused.split([4, 2, 2], dim=1), dy.transpose(0, 1).contiguous().transpose(0, 1)]
    whole = torch.full((len(q) + 3, 9, 16), torch.nan, device=DEVICE)
    buffers = dict(zip(("dq", "dk", "dv"), whole[:-3, :8].split([4, 2, 2], dim=1), strict=True))
    buffers["y"] = torch.full((4, len(q), 16), torch.nan, device=DEVICE).transpose(0, 1)
    buffers |= {name: torch.full((4, len(q) + 1), torch.nan, device=DEVICE)[:, :-1] for name in ("lse", "delta")}
    found = compute(views, bounds, case, **buffers)
    errors = {name: error(found[name], wanted[name]) for name in RESULTS}
    assert all(value <= 32 * ROUNDING["float32"] for value in errors.values()), errors
    assert all(found[name].data_ptr() == buffers[name].data_ptr() for name in RESULTS), "a given buffer was not used"
    assert bool(whole[-3:].isnan().all() and whole[:, 8].isnan().all()), "something was written beside the slices"


@pytest.mark.parametrize("first", [33, 64])
def test_a_sequence_is_computed_as_if_it_were_alone(first: int) -> None:
    """Between sequences of NaN and tokens of nobody."""
    case = Case((first, 50, 20), 2, 1, 16)
    inputs, bounds = draw(case)
    mine = slice(first, first + 50)
    alone = compute([t[mine] for t in inputs], torch.tensor([0, 50], dtype=torch.int32, device=DEVICE), case)
    for value in inputs:
        value[:first], value[first + 50 :] = torch.nan, torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the neighbours' own results are NaN
        found = compute(inputs, bounds, case)
    for name in RESULTS:
        assert torch.equal(found[name][:, mine] if name == "lse" else found[name][mine], alone[name]), name
    marked = {name: torch.full_like(found[name], 7.0) for name in RESULTS}
    found = compute(inputs, bounds[1:3].contiguous(), case, **marked)
    lse = found.pop("lse").mT[..., None]
    assert all(bool((t[:first] == 7).all() and (t[first + 50 :] == 7).all()) for t in (lse, *found.values()))


def test_equal_bits_whatever_the_order_of_programs() -> None:
    runs = []
    for long_first in (False, True, True):
        case = Case((33, 0, 20), 2, 1, 16, "bfloat16", (16, 16, long_first))
        runs.append(compute(*draw(case), case))
    assert all(torch.equal(run[name], runs[0][name]) for run in runs for name in RESULTS)


def test_no_tokens_or_no_sequences() -> None:
    none, three = Case((0, 0), 2, 1, 16), Case((3,), 2, 1, 16)
    empty = compute(*draw(none), none)
    assert [empty[name].shape[1 if name == "lse" else 0] for name in RESULTS] == [0] * len(RESULTS)
    compute(draw(three)[0], torch.zeros(1, dtype=torch.int32, device=DEVICE), three)


def test_what_does_not_fit_is_refused() -> None:
    (q, k, v, dy), bounds = draw(Case((5,), 4, 2, 16))
    y, lse = attention_forward(q, k, v, bounds, 5)
    wrong: dict[str, Callable[[], object]] = {
        "a multiple of kv_heads": lambda: attention_forward(q[:, :3], k, v, bounds, 5),
        r"expected \[tokens, heads, d\]": lambda: attention_forward(q[:4], k, v, bounds, 5),
        "v has shape": lambda: attention_forward(q, k, v[:, :1], bounds, 5),
        "expected one dtype": lambda: attention_forward(q, k.float(), v, bounds, 5),
        "torch.float64": lambda: attention_forward(q.double(), k.double(), v.double(), bounds, 5),
        r"contiguous torch.int32 \[sequences \+ 1\]": lambda: attention_forward(q, k, v, bounds.long(), 5),
        "longest is -1": lambda: attention_forward(q, k, v, bounds, -1),
        "scale is 0.0": lambda: attention_forward(q, k, v, bounds, 5, 0.0),
        "head_dim 257": lambda: attention_forward(*(q.new_zeros(5, 1, 257),) * 3, bounds, 5),
        r"out is torch.bfloat16 \[4, 4, 16\]": lambda: attention_forward(q, k, v, bounds, 5, out=q[:4]),
        "q has strides": lambda: attention_forward(q.mT.contiguous().mT, k, v, bounds, 5),
        "dy has shape": lambda: attention_backward(dy[:4], q, k, v, y, lse, bounds, 5),
        "lse is torch.float16": lambda: attention_backward(dy, q, k, v, y, lse.half(), bounds, 5),
        r"dk is torch.bfloat16 \[5, 4, 16\]": lambda: attention_backward(dy, q, k, v, y, lse, bounds, 5, dk=q),
    }
    for said, call in wrong.items():
        with pytest.raises(ValueError, match=said):
            call()


def for_hopper() -> dict[str, dict[str, int]]:
    """Each kernel compiled for an H200, here: bytes of shared memory, and products on Hopper's tensor cores."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    kernels = {"_attention": attention.FORWARD, "_query_gradient": attention.QUERY_GRADIENT, "_key_gradient": attention.KEY_GRADIENT}
    found = {}
    for name, table in kernels.items():
        for head_dim, blocks in ((64, table[64]), (128, table[128])):
            kernel = getattr(attention, name)
            constants = {"GROUP": 4, "D": head_dim, "BLOCK_D": head_dim, "QUERIES": blocks.queries, "KEYS": blocks.keys}
            constants["LONG_FIRST"] = blocks.long_first
            types = {"bounds": "*i32", "lse": "*fp32", "delta": "*fp32", "scale": "fp32", **dict.fromkeys(constants, "constexpr")}
            types |= dict.fromkeys(("dy", "q", "k", "v", "y", "dq", "dk", "dv"), "*bf16")
            signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
            aligned = [i for i, (n, t) in enumerate(signature.items()) if t[0] == "*" or n.endswith(("_token", "_head"))]
            source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
            made = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": blocks.warps, "num_stages": blocks.stages})
            products = made.asm["ptx"].count("wgmma.mma_async")
            found[f"{name} {head_dim} {blocks.queries}"] = {"shared": made.metadata.shared, "products": products}
    return found


def test_compiles_for_hopper_within_its_shared_memory(tmp_path: Path) -> None:
    """In a process of its own: whether kernels are interpreted is decided when Triton is imported."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, __file__], env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    compiled = json.loads(ran.stdout.splitlines()[-1])
    assert len(compiled) == 6
    assert all(kernel["shared"] <= 227 * 1024 and kernel["products"] > 0 for kernel in compiled.values()), compiled


if __name__ == "__main__":
    print(json.dumps(for_hopper()))
