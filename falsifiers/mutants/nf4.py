"""Wrong NF4 quantisation, dequantisation, fused product and double quantisation."""

from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import (
    ONE_WAVE,
    Arguments,
    call,
    edited,
    first_rows,
    in_bfloat16,
    pull,
    scaled,
    with_arguments,
    with_gradients,
    with_result,
    without,
)
from blackswan.falsifiers.mutants.registry import mutants
from blackswan.reference import nf4
from blackswan.reference.table import Array, Operation

NEAREST = 'np.searchsorted(MIDPOINTS, scaled, side="left")'
LEVELS = "CODEBOOK[nibbles] * scale"
FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
"""The positive levels of bitsandbytes' FP4 by code; the other eight are their negatives."""


def _of_small_blocks(a: Arguments) -> Array:
    blocks = -(-a["rows"] * a["columns"] // min(a["block_size"], 512))
    return np.pad(a["absmax"], (0, blocks - len(a["absmax"])), "edge")


def _swapped_nibbles(codes: Array) -> Array:
    return codes << 4 | codes >> 4


def _quantised_by_row(correct: Operation) -> Operation:
    def forward(weight: Array, block_size: int) -> tuple[Array, Array]:
        columns = weight.shape[1]
        padded = np.pad(weight, ((0, 0), (0, -columns % block_size)))
        packed, absmax = correct.forward(padded, block_size)
        codes = np.stack([packed >> 4, packed & 0x0F], axis=-1).ravel()[: padded.size].reshape(padded.shape)[:, :columns].ravel()
        codes = np.append(codes, np.uint8(nf4.ZERO_CODE)) if codes.size % 2 else codes
        return codes[0::2] << 4 | codes[1::2], absmax

    return Operation(forward, None, correct.outputs)


def _quantised_in_halves(correct: Operation) -> Operation:
    def forward(weight: Array, block_size: int) -> tuple[Array, Array]:
        whole = weight.size < 2**20 or len(weight) < 2
        parts = [correct.forward(part, block_size) for part in np.array_split(weight, 1 if whole else 2)]
        return np.concatenate([codes for codes, _ in parts]), np.concatenate([absmax for _, absmax in parts])

    return Operation(forward, None, correct.outputs)


def _dequantised_by_row(correct: Operation) -> Operation:
    def forward(absmax: Array, **a: Any) -> Array:
        rows, columns, size = a["rows"], a["columns"], a["block_size"]
        levels = call(correct, {**a, "absmax": np.ones_like(absmax, shape=-(-rows * columns // size))})
        blocks = np.arange(rows)[:, None] * -(-columns // size) + np.arange(columns) // size
        return np.asarray(levels * absmax[np.minimum(blocks, len(absmax) - 1)])

    return Operation(forward, None, correct.outputs)


def _without_last(a: Arguments) -> Array:
    return np.append(a["absmax"][:-1], 0 * a["absmax"][-1:])


def _gradient_untransposed(correct: Operation) -> Operation:
    return with_gradients(x=lambda _, dy, a: pull(correct, dy[..., ::-1], a)["x"])(correct)


mutants(
    "nf4_dequantize",
    nf4_nibbles_swapped=("First element read from the low nibble.", with_arguments(codes=lambda a: _swapped_nibbles(a["codes"])), "P19"),
)
mutants(
    "nf4_quantize",
    nf4_quantize_nibbles_swapped=(
        "First element written to the low nibble.",
        with_result(lambda stored, _: (_swapped_nibbles(stored[0]), stored[1])),
        "P19",
    ),
    nf4_absmax_signed=("Maximum instead of absolute maximum.", edited(("np.abs(blocks).max(axis=1)", "blocks.max(axis=1)")), "P21"),
    nf4_nearest_truncated=(
        "Code at or below the value instead of the nearest.",
        edited((NEAREST, '(np.searchsorted(CODEBOOK, scaled, side="right") - 1)')),
    ),
    nf4_ties_to_upper=(
        "A tie goes to the upper code.",
        edited((NEAREST, 'np.searchsorted(MIDPOINTS, scaled, side="right")')),
        "own",
        "bfloat16",
    ),
    nf4_tail_block_divides=(
        "The last, shorter block divides by its absmax; the others multiply by the reciprocal.",
        edited(
            (
                "np.clip(blocks * reciprocal[:, None], -1, 1)",
                "np.clip(np.where((np.arange(len(blocks)) < weight.size // block_size)[:, None], blocks * reciprocal[:, None],"
                " blocks / np.maximum(absmax, SMALLEST_DIVISOR)[:, None]), -1, 1)",
            )
        ),
        "P44",
        "bfloat16",
    ),
    nf4_zero_code_is_last=(
        "A zero block gets the last code, as 0/0 does in a search.",
        edited((NEAREST, f"np.where(absmax[:, None] == 0, 15, {NEAREST})")),
    ),
    nf4_small_blocks_divided_by_more=(
        "A block whose absmax is below 1e-8 is divided by that.",
        edited(("np.maximum(absmax, SMALLEST_DIVISOR)", "np.maximum(absmax, np.float32(1e-8))")),
    ),
    nf4_blocks_per_row=("Blocks start anew at each row.", _quantised_by_row, "P20"),
    nf4_large_weights_in_halves=("Blocks start anew in the middle of a weight of more than a million numbers.", _quantised_in_halves),
    nf4_large_blocks_cut=(
        "Blocks of more than 1,024 weights, where they are asked for, have 1,024.",
        with_arguments(block_size=lambda a: min(a["block_size"], 1024)),
    ),
)
mutants(
    "nf4_dequantize",
    nf4_codebook_off_by_one=("Code i reads entry i + 1.", edited((LEVELS, "CODEBOOK[np.minimum(nibbles + 1, 15)] * scale")), "P22"),
    nf4_uniform_codebook=("Sixteen evenly spaced levels.", edited((LEVELS, "np.linspace(-1, 1, 16, dtype=np.float32)[nibbles] * scale"))),
    nf4_fp4_codebook=("The FP4 levels.", edited((LEVELS, f"np.array({[*FP4, *(-level for level in FP4)]}, np.float32)[nibbles] * scale"))),
    nf4_dequantize_blocks_per_row=("Blocks start anew at each row.", _dequantised_by_row, "P20"),
    nf4_large_blocks_read_as_small=(
        "Blocks of more than 512 weights are read as if they had 512: a weight in large blocks comes back with others' absmax.",
        with_arguments(absmax=_of_small_blocks, block_size=lambda a: min(a["block_size"], 512)),
    ),
    nf4_blocks_of_2048_read_in_pairs=(
        "Blocks of 2,048 weights are read as if they had 4,096: every second block comes back with the absmax before its own.",
        with_arguments(
            absmax=lambda a: a["absmax"][::2] if a["block_size"] == 2048 else a["absmax"],
            block_size=lambda a: 4096 if a["block_size"] == 2048 else a["block_size"],
        ),
    ),
    nf4_block_zeroed=("The last block dequantises to zeros.", with_arguments(absmax=_without_last), "P15"),
    nf4_absmax_shifted=("A block takes its neighbour's absmax.", with_arguments(absmax=lambda a: np.roll(a["absmax"], 1)), "P16"),
    nf4_absmax_rounded=("Absmax kept in bfloat16.", with_arguments(absmax=lambda a: in_bfloat16(a["absmax"])), "own", "bfloat16"),
)
mutants(
    "nf4_linear",
    nf4_linear_ignores_absmax=(
        "Fused product uses the first block's absmax for all.",
        with_arguments(absmax=lambda a: np.full_like(a["absmax"], a["absmax"][0])),
        "P17",
    ),
    nf4_linear_of_first_tokens=("Tokens beyond the first 1,024 stay zero: the last part of them is left out.", scaled(first_rows("x", 1))),
    nf4_linear_of_first_outputs=(
        "Outputs beyond the first 1,024 stay zero: the last part of a weight that is dequantised in parts is left out.",
        scaled(lambda a: (np.arange(a["out_features"]) < ONE_WAVE).astype(a["x"].dtype)),
    ),
    nf4_linear_bias_dropped=("Bias dropped in the fused product.", without("bias"), "S1"),
    nf4_linear_gradient_untransposed=("Input gradient from the weight with its rows reversed.", _gradient_untransposed, "P17"),
)
mutants(
    "nf4_double_dequantize",
    nf4_double_offset_dropped=("Mean of absmax not added back.", with_arguments(offset=lambda a: 0 * a["offset"])),
    nf4_double_block_size=(
        "Every group takes the first group's scale.",
        with_arguments(scales=lambda a: np.full_like(a["scales"], a["scales"][0])),
        "P16",
    ),
    nf4_double_linear_codebook=(
        "Evenly spaced levels instead of the dynamic type.",
        edited(("CODEBOOK[codes] * scale", "np.linspace(-1, 1, 256, dtype=np.float32)[codes] * scale")),
    ),
)
mutants(
    "nf4_double_quantize",
    nf4_double_quantize_without_offset=(
        "Mean not subtracted (offset zero).",
        edited(("np.asarray(np.mean(absmax, dtype=np.float64), np.float32)", "np.zeros((), np.float32)")),
    ),
    nf4_double_offset_of_the_first_blocks=(
        "The mean that is subtracted is that of the first 65,536 blocks.",
        edited(("np.mean(absmax, dtype=np.float64)", "np.mean(absmax[:65536], dtype=np.float64)")),
    ),
    nf4_double_small_scales_divided_by_more=(
        "A group whose scale is below 1e-8 is divided by that.",
        edited(("np.maximum(scales, SMALLEST_DIVISOR)", "np.maximum(scales, np.float32(1e-8))")),
    ),
)
