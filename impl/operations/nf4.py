"""NF4 (Dettmers et al. 2023, QLoRA §3) through bitsandbytes' functional interface.

Not `Linear4bit`: in evaluation on a CPU with AVX512-BF16 it repacks its weight in place.
"""

import functools
import logging
from collections.abc import Callable
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from blackswan.impl.tensors import kept_on_devices
from blackswan.impl.validation import require_shape

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUP_SIZE, LARGEST_READ = 256, 1024
"""Blocks that have a scale together; and the largest blocks that the library is given to dequantise."""


_setting = Lock()
"""Held while torch has a compiler or a default dtype that is put back: of two threads the later one would put back the earlier one's."""


@functools.cache
def _library() -> ModuleType:
    # On some CPUs the import warns that a fused 4-bit product is missing; the functional interface does not use it.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with _setting:
        compile_at_once, torch.compile = torch.compile, _compile_when_called  # type: ignore[assignment]
        try:
            import bitsandbytes.functional  # only where NF4 is used
        finally:
            torch.compile = compile_at_once
    return bitsandbytes.functional


def _compile_when_called(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` for functions of the library that nothing here calls: the import of the compiler takes two seconds."""
    compiled = functools.cache(lambda: torch.compile(function, **options))
    return lambda *given, **named: compiled()(*given, **named)


def nf4_quantize(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Weight [rows, columns] → codes uint8 [(rows·columns + 1) // 2] (first of a pair in the high nibble), absmax float32 [blocks].

    Blocks run over the flattened weight. Raises a ValueError for another block size than BLOCK_SIZES.
    """
    require_block_size(block_size)
    flat = weight.detach().reshape(-1).float()
    # Not the library's quantize_4bit: on an H200 its kernel gave a value within an ulp of a midpoint, and a block of zeros, other codes
    # than on the CPU, and one checkpoint becomes two models.
    blocks = functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp(-1.0, 1.0)
    codes = torch.bucketize(scaled, _nf4_midpoints(flat.device)).to(torch.uint8).view(-1, 2)
    return (codes[:, 0] << 4 | codes[:, 1])[: (flat.numel() + 1) // 2], absmax


@kept_on_devices
def _nf4_midpoints(device: torch.device) -> Tensor:
    library = _library()
    with _setting:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # in which the library makes the codebook
        try:
            codebook: Tensor = library.get_4bit_type("nf4", device=device)
        finally:
            torch.set_default_dtype(usual)
    return (codebook[:-1] + codebook[1:]) / 2


def nf4_dequantize(codes: Tensor, absmax: Tensor, rows: int, columns: int, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """codebook[code] · absmax[block] in float32, rounded once to `dtype`: [rows, columns]. float64 is the float32 result, widened."""
    require_block_size(block_size)
    count = rows * columns
    packed, blocks = (count + 1) // 2, -(-count // block_size)
    if codes.numel() != packed or absmax.numel() != blocks:
        raise ValueError(
            f"a [{rows}, {columns}] weight in blocks of {block_size} has {packed} bytes of codes and {blocks} absmax, "
            f"not {codes.numel()} and {absmax.numel()}"
        )
    library = _library()
    # Flat, of even length and in blocks of 1,024 at most: bitsandbytes sends an odd last axis, and on CPUs with AVX-512 larger blocks,
    # through torch.compile. Without gaps: it reads memory, not strides.
    if block_size > LARGEST_READ:
        absmax, block_size = absmax.repeat_interleave(block_size // LARGEST_READ)[: -(-count // LARGEST_READ)], LARGEST_READ
    state = library.QuantState(
        absmax=absmax.float().contiguous(),
        shape=(1, 2 * packed),
        dtype=torch.float32 if dtype == torch.float64 else dtype,
        blocksize=block_size,
        quant_type="nf4",
    )
    flat: Tensor = library.dequantize_4bit(codes.contiguous().view(-1, 1), state).flatten()
    return flat[:count].view(rows, columns).to(dtype)


class _Nf4Linear(torch.autograd.Function):
    """x Wᵀ + b that keeps the codes, not the dequantised weight, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, shape: tuple[int, int], block_size: int) -> Tensor:
        ctx.save_for_backward(codes, absmax)
        ctx.shape, ctx.block_size = shape, block_size
        weight = nf4_dequantize(codes, absmax, *shape, block_size, dtype=x.dtype)
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        codes, absmax = ctx.saved_tensors
        rows, columns = ctx.shape
        weight = nf4_dequantize(codes, absmax, rows, columns, ctx.block_size, dtype=cotangent.dtype)
        return cotangent @ weight, None, None, None, None, None


def nf4_linear(
    x: Tensor, codes: Tensor, absmax: Tensor, in_features: int, out_features: int, block_size: int, bias: Tensor | None = None
) -> Tensor:
    """y = x dequantize(codes, absmax)ᵀ + b; x [..., in] → [..., out]. Weight and bias are frozen: only x has a gradient."""
    y: Tensor = _Nf4Linear.apply(x, codes, absmax, bias, (out_features, in_features), block_size)  # type: ignore[no-untyped-call]  # torch
    return y


def nf4_double_quantize(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """absmax [blocks] → codes uint8 [blocks], scales float32 [ceil(blocks / 256)], offset float32 [] (QLoRA §3, double quantisation).

    Not the library's quantize_blockwise: on the CPU it looks values up in a coarser table and misses the nearest code near a midpoint.
    """
    offset = absmax.double().mean().float()  # the exact mean's neighbour, in whatever order the device sums
    centred = absmax.float() - offset
    blocks = functional.pad(centred, (0, -centred.numel() % GROUP_SIZE)).view(-1, GROUP_SIZE)
    scales = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / scales.clamp(min=1e-38))[:, None]).clamp(-1.0, 1.0)
    codes = torch.bucketize(scaled, _dynamic_midpoints(absmax.device)).flatten()[: centred.numel()]
    return codes.to(torch.uint8), scales, offset  # cut before it is converted: a view would keep the codes of the padding


@kept_on_devices
def _dynamic_midpoints(device: torch.device) -> Tensor:
    codebook = _dynamic_codebook(device)
    return (codebook[:-1] + codebook[1:]) / 2


@kept_on_devices
def _dynamic_codebook(device: torch.device) -> Tensor:
    return _dynamic_map().to(device)


@functools.cache
def _dynamic_map() -> Tensor:
    with torch.device("cpu"):  # not where torch's default is
        codebook: Tensor = _library().create_dynamic_map()
    return codebook


def nf4_double_dequantize(codes: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
    """codebook8[code] · scale + offset, float32 [blocks]. Raises a ValueError for another number of scales: the library would read on."""
    require_shape("scales", scales, (-(-codes.numel() // GROUP_SIZE),))
    # Its own codebook the library keeps on the device that asked first, which may be one without content.
    codebook = _dynamic_codebook(codes.device)
    # The library ignores strides and reads memory in order.
    stored = {"A": codes.contiguous(), "absmax": scales.float().contiguous()}
    restored: Tensor = _library().dequantize_blockwise(**stored, code=codebook, blocksize=GROUP_SIZE)
    return restored + offset.float()


def require_block_size(block_size: int) -> None:
    """Raises a ValueError for another block size than BLOCK_SIZES."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"NF4 block size {block_size}: expected one of {', '.join(map(str, BLOCK_SIZES))}")
