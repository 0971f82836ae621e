"""Wrong NF4 quantisation, dequantisation, fused product and double quantisation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import Arguments, call, dropped, in_bfloat16, pull, with_arguments, with_gradients
from blackswan.falsifiers.mutants.registry import mutant
from blackswan.reference import nf4, nf4_double
from blackswan.reference.table import Array, Operation

FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
"""The positive levels of bitsandbytes' FP4 by code; the other eight are their negatives."""


def _swapped_nibbles(codes: Array) -> Array:
    return codes << 4 | codes >> 4


@mutant("nf4_dequantize", "P19")
def nf4_nibbles_swapped(correct: Operation) -> Operation:
    """First element read from the low nibble."""
    return with_arguments(correct, codes=lambda a: _swapped_nibbles(a["codes"]))


@mutant("nf4_quantize", "P19")
def nf4_quantize_nibbles_swapped(correct: Operation) -> Operation:
    """First element written to the low nibble."""

    def forward(**a: Any) -> tuple[Array, Array]:
        codes, absmax = call(correct, a)
        return _swapped_nibbles(codes), absmax

    return replace(correct, forward=forward)


def _quantizer(correct: Operation, code: Callable[[Array], Array], absmax_of: Callable[[Array], Array] | None = None) -> Operation:
    """Quantisation with another choice of code for the scaled elements [blocks, block_size] in [−1, 1], or another scale of a block."""

    def forward(weight: Array, block_size: int) -> tuple[Array, Array]:
        count = -(-weight.size // block_size)
        flat = np.zeros(count * block_size, np.float32)
        flat[: weight.size] = weight.ravel()
        blocks = flat.reshape(count, block_size)
        absmax = np.abs(blocks).max(axis=1) if absmax_of is None else absmax_of(blocks)
        scaled = np.clip(blocks * (np.float32(1) / np.maximum(absmax, nf4.SMALLEST_DIVISOR))[:, None], -1, 1)
        codes = code(scaled).astype(np.uint8).ravel()[: weight.size]
        codes = np.append(codes, np.uint8(nf4.ZERO_CODE)) if weight.size % 2 else codes
        return codes[0::2] << 4 | codes[1::2], absmax

    return replace(correct, forward=forward)


def _nearest(scaled: Array) -> Array:
    return np.searchsorted(nf4.MIDPOINTS, scaled, side="left")


@mutant("nf4_quantize", "P21")
def nf4_absmax_signed(correct: Operation) -> Operation:
    """Maximum instead of absolute maximum."""
    return _quantizer(correct, _nearest, lambda blocks: np.asarray(blocks.max(axis=1)))


@mutant("nf4_quantize", "own")
def nf4_nearest_truncated(correct: Operation) -> Operation:
    """Code at or below the value instead of the nearest."""
    return _quantizer(correct, lambda scaled: np.searchsorted(nf4.CODEBOOK, scaled, side="right") - 1)


@mutant("nf4_quantize", "own", hidden_in=("bfloat16",))
def nf4_ties_to_upper(correct: Operation) -> Operation:
    """A tie goes to the upper code."""
    return _quantizer(correct, lambda scaled: np.searchsorted(nf4.MIDPOINTS, scaled, side="right"))


@mutant("nf4_quantize", "own")
def nf4_zero_code_is_last(correct: Operation) -> Operation:
    """A zero block gets the last code, as 0/0 does in a search."""
    return _quantizer(correct, lambda scaled: np.where((scaled == 0).all(axis=1, keepdims=True), 15, _nearest(scaled)))


@mutant("nf4_quantize", "P20")
def nf4_blocks_per_row(correct: Operation) -> Operation:
    """Blocks start anew at each row."""

    def forward(weight: Array, block_size: int) -> tuple[Array, Array]:
        columns = weight.shape[1]
        blocks = -(-columns // block_size)
        padded = np.zeros_like(weight, shape=(len(weight), blocks * block_size))
        padded[:, :columns] = weight
        packed, absmax = call(correct, {"weight": padded, "block_size": block_size})
        codes = np.stack([packed >> 4, packed & 0x0F], axis=-1).ravel()[: padded.size].reshape(padded.shape)[:, :columns].ravel()
        codes = np.append(codes, np.uint8(nf4.ZERO_CODE)) if codes.size % 2 else codes
        return codes[0::2] << 4 | codes[1::2], absmax

    return replace(correct, forward=forward)


def _dequantizer(correct: Operation, levels: Array) -> Operation:
    """Dequantisation with other values for the codes."""

    def forward(codes: Array, absmax: Array, rows: int, columns: int, block_size: int) -> Array:
        nibbles = np.stack([codes >> 4, codes & 0x0F], axis=-1).ravel()[: rows * columns]
        scale = np.repeat(absmax.astype(np.float32), block_size)[: rows * columns]
        return np.asarray((levels.astype(np.float32)[nibbles] * scale).astype(absmax.dtype).reshape(rows, columns))

    return replace(correct, forward=forward)


@mutant("nf4_dequantize", "P22")
def nf4_codebook_off_by_one(correct: Operation) -> Operation:
    """Code i reads entry i + 1."""
    return _dequantizer(correct, nf4.CODEBOOK[np.minimum(np.arange(16) + 1, 15)])


@mutant("nf4_dequantize", "own")
def nf4_uniform_codebook(correct: Operation) -> Operation:
    """Sixteen evenly spaced levels."""
    return _dequantizer(correct, np.linspace(-1, 1, 16))


@mutant("nf4_dequantize", "own")
def nf4_fp4_codebook(correct: Operation) -> Operation:
    """The FP4 levels."""
    return _dequantizer(correct, np.concatenate([FP4, -FP4]))


@mutant("nf4_dequantize", "P20")
def nf4_dequantize_blocks_per_row(correct: Operation) -> Operation:
    """Blocks start anew at each row."""

    def forward(codes: Array, absmax: Array, rows: int, columns: int, block_size: int) -> Array:
        unit = np.ones_like(absmax, shape=-(-rows * columns // block_size))
        levels = call(correct, {"codes": codes, "absmax": unit, "rows": rows, "columns": columns, "block_size": block_size})
        blocks = np.arange(rows)[:, None] * -(-columns // block_size) + np.arange(columns) // block_size
        return np.asarray(levels * absmax[np.minimum(blocks, len(absmax) - 1)])

    return replace(correct, forward=forward)


@mutant("nf4_dequantize", "P15")
def nf4_block_zeroed(correct: Operation) -> Operation:
    """The last block dequantises to zeros."""

    def last_zeroed(a: Arguments) -> Array:
        return np.concatenate([a["absmax"][:-1], np.zeros_like(a["absmax"][-1:])])

    return with_arguments(correct, absmax=last_zeroed)


@mutant("nf4_dequantize", "P16")
def nf4_absmax_shifted(correct: Operation) -> Operation:
    """A block takes its neighbour's absmax."""
    return with_arguments(correct, absmax=lambda a: np.roll(a["absmax"], 1))


@mutant("nf4_dequantize", "own", hidden_in=("bfloat16",))
def nf4_absmax_rounded(correct: Operation) -> Operation:
    """Absmax kept in bfloat16."""
    return with_arguments(correct, absmax=lambda a: in_bfloat16(a["absmax"]))


@mutant("nf4_linear", "P17")
def nf4_linear_ignores_absmax(correct: Operation) -> Operation:
    """Fused product uses the first block's absmax for all."""
    return with_arguments(correct, absmax=lambda a: np.full_like(a["absmax"], a["absmax"][0]))


@mutant("nf4_linear", "S1")
def nf4_linear_bias_dropped(correct: Operation) -> Operation:
    """Bias dropped in the fused product."""
    return dropped(correct, "bias")


@mutant("nf4_linear", "P17")
def nf4_linear_gradient_untransposed(correct: Operation) -> Operation:
    """Input gradient from the weight with its rows reversed."""
    return with_gradients(correct, lambda _, dy, a: pull(correct, dy[..., ::-1], a))


@mutant("nf4_double_dequantize", "own")
def nf4_double_offset_dropped(correct: Operation) -> Operation:
    """Mean of absmax not added back."""
    return with_arguments(correct, offset=lambda a: np.zeros_like(a["offset"]))


@mutant("nf4_double_dequantize", "P16")
def nf4_double_block_size(correct: Operation) -> Operation:
    """Every group takes the first group's scale."""
    return with_arguments(correct, scales=lambda a: np.full_like(a["scales"], a["scales"][0]))


@mutant("nf4_double_dequantize", "own")
def nf4_double_linear_codebook(correct: Operation) -> Operation:
    """Evenly spaced levels instead of the dynamic type."""

    def forward(codes: Array, scales: Array, offset: Array) -> Array:
        levels = np.linspace(-1, 1, 256, dtype=np.float32)[codes]
        return np.asarray(levels * np.repeat(scales.astype(np.float32), nf4_double.GROUP)[: codes.size] + np.asarray(offset, np.float32))

    return replace(correct, forward=forward)


@mutant("nf4_double_quantize", "own")
def nf4_double_quantize_without_offset(correct: Operation) -> Operation:
    """Mean not subtracted (offset zero)."""

    def forward(absmax: Array) -> tuple[Array, Array, Array]:
        codes, scales = nf4_double.quantize_centred(absmax.astype(np.float32))
        return codes, scales, np.zeros((), np.float32)

    return replace(correct, forward=forward)
