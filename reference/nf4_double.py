"""Double quantisation of the NF4 scales (Dettmers et al. 2023, arXiv:2305.14314, §3, "Double Quantization"), as bitsandbytes stores them.

The scales minus their mean are cut into blocks of 256, each scaled by its own absmax, and an element is coded by the nearest of 256 values
of the signed dynamic 8-bit type (Dettmers 2015, arXiv:1511.04561; Dettmers et al. 2021, arXiv:2110.02861, §1.3). All in fp32.

The dynamic type: for each exponent e = 0 … 6, the midpoints of 2^e equal intervals of [0.1, 1], times 10^(e − 6), with both signs; and 0
and 1. Its unsigned form has twice as many intervals and no negative values.
"""

import numpy as np

from blackswan.reference.nf4 import SMALLEST_DIVISOR
from blackswan.reference.table import Array

GROUP = 256


def _interval_ends(intervals: int) -> Array:
    """intervals + 1 equal steps from 0.1 to 1 in fp32, each one rounding of a multiple of the fp32 step from the nearer end."""
    low, high = np.float32(0.1), np.float32(1)
    step = float((high - low) / np.float32(intervals))
    index = np.arange(intervals + 1)
    return np.where(index < (intervals + 1) // 2, float(low) + step * index, float(high) - step * (intervals - index)).astype(np.float32)


def _dynamic_codebook(signed: bool) -> Array:
    values: list[Array] = [np.array([0, 1], np.float32)]
    for exponent in range(7):
        ends = _interval_ends(2**exponent if signed else 2 ** (exponent + 1))
        midpoints = (ends[1:] + ends[:-1]) / 2
        magnitude = np.float32(10.0 ** (exponent - 6)) * midpoints
        values += [magnitude, -magnitude] if signed else [magnitude]
    return np.sort(np.concatenate(values))


CODEBOOK = _dynamic_codebook(signed=True)  # [256]
UNSIGNED = _dynamic_codebook(signed=False)  # [256]
MIDPOINTS = (CODEBOOK[1:] + CODEBOOK[:-1]) / 2


def quantize(absmax: Array) -> tuple[Array, Array, Array]:
    """absmax [blocks] → codes [blocks] uint8, scales [groups] float32, offset [] float32.

    The mean is summed in float64 and rounded once: it is the exact mean's fp32 neighbour, in whatever order a device sums.
    """
    offset = np.asarray(np.mean(absmax, dtype=np.float64), np.float32)  # []
    codes, scales = quantize_centred(absmax.astype(np.float32) - offset)
    return codes, scales, offset


def quantize_centred(centred: Array) -> tuple[Array, Array]:
    """Blocks of 256 of the fp32 values [blocks] → codes [blocks] uint8, scales [groups] float32; a zero group has scale 0 and code of 0."""
    groups = -(-centred.size // GROUP)
    padded = np.zeros(groups * GROUP, np.float32)
    padded[: centred.size] = centred
    blocks = padded.reshape(groups, GROUP)
    scales = np.abs(blocks).max(axis=1)  # [groups]
    reciprocal = np.float32(1) / np.maximum(scales, SMALLEST_DIVISOR)
    scaled = np.clip(blocks * reciprocal[:, None], -1, 1)  # [groups, GROUP]
    codes = np.searchsorted(MIDPOINTS, scaled, side="left").astype(np.uint8).ravel()[: centred.size]
    return codes, scales


def dequantize(codes: Array, scales: Array, offset: Array) -> Array:
    """codebook[code] · scale + offset: codes [blocks], scales [groups], offset [] → absmax [blocks], computed in fp32."""
    scale = np.repeat(scales.astype(np.float32), GROUP)[: codes.size]  # [blocks]
    return CODEBOOK[codes] * scale + np.asarray(offset, np.float32)
