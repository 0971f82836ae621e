"""The dtypes of tensors in .apr files: their codes, their sizes in bytes, and how they are read and written.

The layouts are those of APR v2 (paiml/aprender, crates/aprender-quant), where Q4_K and Q6_K are GGML's. A quantised tensor is read as
float32, each element by the operations of its formula in that order, so that every reader which follows it has the same bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 4096
"""Blocks that are decoded at a time, so that what it takes beside the result stays small."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class DType:
    """A stored dtype: `block` elements take `size` bytes after a `prefix` of bytes.

    `plain` is torch's name for what is stored as it is, and `decode` makes float32 [n, block] of uint8 [n, size] where it is not; a dtype
    with neither holds no weights. The rows of a `row_padded` dtype may each end with a block of their own.
    """

    name: str
    block: int
    size: int
    prefix: int = 0
    plain: torch.dtype | None = None
    decode: Callable[[Tensor], Tensor] | None = None
    row_padded: bool = False

    def flat_bytes(self, shape: Shape) -> int:
        """Bytes of a tensor whose elements follow each other without regard to rows."""
        return self.prefix + -(-math.prod(shape) // self.block) * self.size

    def padded_bytes(self, shape: Shape) -> int:
        """Bytes of a tensor whose every row begins a block."""
        return _rows(shape) * -(-_columns(shape) // self.block) * self.size

    def size_problem(self, shape: Shape, size: int) -> str | None:
        """What is wrong with that number of bytes for a tensor of that shape, in words; None where nothing is."""
        flat, padded = self.flat_bytes(shape), self.padded_bytes(shape) if self.row_padded else None
        if size not in (flat, padded):
            return f"{size}; expected {flat}" + (f", or {padded} with padded rows," if padded not in (None, flat) else "")
        if padded == flat and _rows(shape) > 1 and _columns(shape) % self.block:
            return f"{size} both with padded rows and without, which are different tensors; neither can be chosen"
        return None


def decoded(dtype: DType, content: Tensor, shape: Shape) -> Tensor:
    """The tensor of that shape in bytes (uint8) whose number `size_problem` has passed; float32 where it is quantised."""
    if dtype.plain is not None:
        return content.view(dtype.plain).view(shape)
    if dtype.name == "AprQ8":
        return (content[dtype.prefix :].view(torch.int8).float() * _float32(content[: dtype.prefix])).view(shape)
    assert dtype.decode is not None
    blocks = content.view(len(content) // dtype.size, dtype.size)
    elements = torch.empty(len(blocks), dtype.block, dtype=torch.float32, device="cpu")
    for start in range(0, len(blocks), CHUNK):
        elements[start : start + CHUNK] = dtype.decode(blocks[start : start + CHUNK])
    if len(content) == dtype.flat_bytes(shape):
        return elements.view(-1)[: math.prod(shape)].view(shape)
    return elements.view(_rows(shape), -1)[:, : _columns(shape)].reshape(shape)


def encoded(dtype: DType, tensor: Tensor) -> Tensor:
    """The bytes (uint8) of a tensor in a plain dtype, AprQ8 or AprQ4; with a scale, |x − s·q| ≤ s/2 but for the rounding of s itself."""
    if dtype.plain is not None:
        return tensor.to(dtype.plain).contiguous().view(-1).view(torch.uint8)
    flat = tensor.float().reshape(-1)
    if dtype.name == "AprQ8":
        scale = (flat.abs().max() / 127).reshape(1)
        return torch.cat([scale.view(torch.uint8), _steps(flat, scale, -127, 127).to(torch.int8).view(torch.uint8)])
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % dtype.block)).view(-1, dtype.block)
    scale = (blocks.abs().amax(1, keepdim=True) / 7).half()
    nibbles = (_steps(blocks, scale.float(), -8, 7) + 8).to(torch.uint8)
    return torch.cat([scale.view(torch.uint8), nibbles[:, ::2] | nibbles[:, 1::2] << 4], 1).view(-1)


def fits(dtype: DType, tensor: Tensor) -> bool:
    """Whether `encoded` of a tensor is finite: as it is in a plain dtype, and quantised the scales too, which AprQ4 holds in float16."""
    largest = tensor.abs().max().float()
    return bool(torch.isfinite((largest / 7).half() if dtype is APR_Q4 else largest))


def _steps(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """The multiples of the scale that are nearest; 0 where the scale is 0."""
    return torch.where(scale > 0, values / scale, torch.zeros((), device="cpu")).round().clamp(least, most)


def _rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


def _columns(shape: Shape) -> int:
    return shape[-1] if shape else 1


def _float32(content: Tensor) -> Tensor:
    return content.clone().view(torch.float32)


def _half(content: Tensor) -> Tensor:
    """Numbers in float16, two bytes each, as float32."""
    return content.contiguous().view(torch.float16).float()


def _nibbles(content: Tensor) -> Tensor:
    """[…, n] → the low and the high half of each byte, [2, …, n]."""
    return torch.stack([content & 15, content >> 4])


def _apr_q4(blocks: Tensor) -> Tensor:
    """Float16 scale, 16 bytes: element i is in byte i // 2, the even ones in the low half; x = (nibble − 8) · s."""
    low, high = _nibbles(blocks[:, 2:])
    return (torch.stack([low, high], -1).flatten(1).float() - 8) * _half(blocks[:, :2])


def _q4_k(blocks: Tensor) -> Tensor:
    """Float16 d and dmin, 12 bytes of scales, 128 bytes: 8 sub-blocks of 32 elements; x = d · scale · q − dmin · min."""
    scales, minima = _q4_k_scales(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).permute(1, 2, 0, 3).reshape(-1, 8, 32)
    steps, offsets = _half(blocks[:, :2]) * scales.float(), _half(blocks[:, 2:4]) * minima.float()
    return (steps[..., None] * codes.float() - offsets[..., None]).flatten(1)


def _q4_k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima, 6 bits each, [n, 8]: whole for the first four; of the others the two high bits lie in the bytes of the first."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6) << 4], 1)
    return scales, torch.cat([second & 63, (rest >> 4) | (second >> 6) << 4], 1)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low halves, 64 of pairs of high bits, 16 scales in int8, float16 d; x = d · scale · (q − 32)."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 2, 32)).permute(1, 2, 0, 3, 4).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu").view(4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (low | high << 4).float() - 32
    steps = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (steps[..., None] * codes.reshape(-1, 16, 16)).flatten(1)


F32 = DType("F32", 1, 4, plain=torch.float32)
F16 = DType("F16", 1, 2, plain=torch.float16)
BF16 = DType("BF16", 1, 2, plain=torch.bfloat16)
APR_Q4 = DType("AprQ4", 32, 18, decode=_apr_q4)
APR_Q8 = DType("AprQ8", 1, 1, prefix=4)
DTYPES: dict[int, DType] = {
    0: F32,
    1: F16,
    3: DType("F64", 1, 8),
    4: DType("I32", 1, 4),
    5: DType("I64", 1, 8),
    6: DType("I8", 1, 1),
    7: DType("U8", 1, 1),
    12: DType("Q4_K", 256, 144, decode=_q4_k, row_padded=True),
    14: DType("Q6_K", 256, 210, decode=_q6_k, row_padded=True),
    30: BF16,
    128: APR_Q4,
    129: APR_Q8,
    8: APR_Q4,
    9: APR_Q8,
}
"""By code; 8 and 9 are what older files say for 128 and 129."""
WRITTEN = {"float32": F32, "float16": F16, "bfloat16": BF16, "q8": APR_Q8, "q4": APR_Q4}
"""What an .apr file can be written in, by the name of the setting."""


def holds_weights(dtype: DType) -> bool:
    """Whether weights can be read from tensors of that dtype."""
    return dtype.plain is not None or dtype.decode is not None or dtype is APR_Q8
