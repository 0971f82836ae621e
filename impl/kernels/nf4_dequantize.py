"""NF4 codes to weights (Dettmers et al. 2023, QLoRA §3)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blackswan.impl.kernels.launch import buffer, launch, require_storage
from blackswan.impl.tensors import kept_on_devices

CODEBOOK = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of N(0, 1), scaled to −1 … 1 (QLoRA, appendix E)."""

# Eight bytes a thread: sixteen results, which in bfloat16 are two stores of 16 bytes and need no exchange between threads.
BYTES, WARPS = 1024, 4


@triton.jit
def _nf4_dequantize(codes, absmax, codebook, out, packed, count, HALF_BLOCK: tl.constexpr, BYTES: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BYTES
    byte = start + tl.arange(0, BYTES)
    pair = tl.load(codes + byte, mask=byte < packed, other=0).to(tl.int32)
    scale = tl.load(absmax + byte // HALF_BLOCK, mask=byte < packed, other=0.0)
    # The codebook is half a cache line: 32 look-ups are one access, where a tree of selections is 15 instructions each.
    high = tl.load(codebook + (pair >> 4)) * scale
    low = tl.load(codebook + (pair & 15)) * scale
    element = 2 * start + tl.arange(0, 2 * BYTES)
    tl.store(out + element, tl.interleave(high, low).to(out.dtype.element_ty), mask=element < count)


@kept_on_devices
def _codebook(device: torch.device) -> Tensor:
    return torch.tensor(CODEBOOK, dtype=torch.float32, device=device)


def nf4_dequantize(
    codes: Tensor, absmax: Tensor, rows: int, columns: int, block_size: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """codebook[code] · absmax[block] in float32, rounded once to `dtype`: [rows, columns].

    codes uint8 [ceil(rows·columns / 2)], the first of a pair in the high nibble; absmax float32 [ceil(rows·columns / block_size)] of
    blocks over the flattened weight; block_size a power of two from 2. Raises a ValueError for other sizes or dtypes.
    """
    require_storage("the weight", dtype)
    if block_size < 2 or block_size & (block_size - 1):
        raise ValueError(f"block size {block_size}: expected a power of two from 2")
    count = rows * columns
    packed, blocks = (count + 1) // 2, -(-count // block_size)
    if codes.numel() != packed or absmax.numel() != blocks:
        raise ValueError(
            f"a [{rows}, {columns}] weight in blocks of {block_size} has {packed} bytes of codes and {blocks} absmax, "
            f"not {codes.numel()} and {absmax.numel()}"
        )
    if codes.dtype != torch.uint8 or absmax.dtype != torch.float32 or not (codes.is_contiguous() and absmax.is_contiguous()):
        raise ValueError(f"codes are {codes.dtype} and absmax {absmax.dtype}: expected contiguous torch.uint8 and torch.float32")
    out = buffer("out", out, (rows, columns), codes, dtype)
    if not out.is_contiguous():
        raise ValueError("out is not contiguous: blocks run over the flattened weight")
    if count:
        grid, codebook = (triton.cdiv(packed, BYTES),), _codebook(codes.device)
        launch(_nf4_dequantize, grid, codes, absmax, codebook, out, packed, count, block_size // 2, BYTES, num_warps=WARPS)
    return out
