"""NF4, 4-bit NormalFloat (Dettmers et al. 2023, arXiv:2305.14314, §3 and appendix E), as bitsandbytes stores it.

The flattened weight is cut into blocks. A block keeps its absmax, and for each element the nearest of 16 codes of x / absmax. Which code is
nearest is decided in fp32, bit for bit, whatever the dtype of the weight:

    s = clamp(fl(x · fl(1 / max(absmax, 1e-38))), −1, 1),   code = number of fp32 midpoints of the codebook that are < s,

so that a tie goes to the lower code and a zero block to the code of zero, with absmax 0. Two codes share a byte, the first in the high
nibble. Dequantisation is fl(codebook[code] · absmax), in fp32 as well.
"""

import numpy as np

import blackswan.reference.linear as linear
from blackswan.reference.table import Array

CODEBOOK = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=np.float32,
)  # fmt: skip
MIDPOINTS = (CODEBOOK[1:] + CODEBOOK[:-1]) / 2
ZERO_CODE = 7
SMALLEST_DIVISOR = np.float32(1e-38)


def _blocks(flat: Array, block_size: int) -> Array:
    """[elements] → [blocks, block_size], the tail padded with zeros, in fp32."""
    count = -(-flat.size // block_size)
    padded = np.zeros(count * block_size, np.float32)
    padded[: flat.size] = flat
    return padded.reshape(count, block_size)


def quantize(weight: Array, block_size: int) -> tuple[Array, Array]:
    """weight [rows, columns] → codes [ceil(elements / 2)] uint8, absmax [blocks] float32."""
    blocks = _blocks(weight.ravel(), block_size)  # [blocks, block_size]
    absmax = np.abs(blocks).max(axis=1)  # [blocks]
    reciprocal = np.float32(1) / np.maximum(absmax, SMALLEST_DIVISOR)
    scaled = np.clip(blocks * reciprocal[:, None], -1, 1)  # [blocks, block_size]
    nearest = np.searchsorted(MIDPOINTS, scaled, side="left").astype(np.uint8).ravel()[: weight.size]
    if weight.size % 2:
        nearest = np.append(nearest, np.uint8(ZERO_CODE))
    return nearest[0::2] << 4 | nearest[1::2], absmax


def dequantize(codes: Array, absmax: Array, rows: int, columns: int, block_size: int) -> Array:
    """codes [ceil(rows·columns / 2)] uint8, absmax [blocks] → weight [rows, columns], an fp32 product in the dtype of absmax."""
    elements = rows * columns
    nibbles = np.stack([codes >> 4, codes & 0x0F], axis=-1).ravel()[:elements]  # [elements]
    scale = np.repeat(absmax.astype(np.float32), block_size)[:elements]  # [elements]
    product = CODEBOOK[nibbles] * scale
    return product.astype(absmax.dtype).reshape(rows, columns)


def linear_forward(
    x: Array, codes: Array, absmax: Array, in_features: int, out_features: int, block_size: int, bias: Array | None = None
) -> Array:
    """y = x dequantize(codes, absmax)ᵀ + b; x [..., in] → [..., out]."""
    weight = dequantize(codes, absmax, out_features, in_features, block_size).astype(x.dtype)
    return linear.forward(x, weight, bias)


def linear_backward(
    dy: Array,
    x: Array,
    codes: Array,
    absmax: Array,
    in_features: int,
    out_features: int,
    block_size: int,
    bias: Array | None = None,
) -> dict[str, Array]:
    """Gradient of x, the weight being frozen; dy [..., out]."""
    weight = dequantize(codes, absmax, out_features, in_features, block_size).astype(x.dtype)
    return linear.backward(dy, x, weight, bias, needs=("x",))
