"""The dtypes and flavours of inputs that claims may name, and the kinds of device. All else about a dtype is derived from this table."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """An element type or a policy of arithmetic.

    `storage` is the element type that values are held in, as NumPy, ml_dtypes and torch name it, and `unit_roundoff` is that type's: half
    the distance from 1 to the next number. `cuda_only` says why other devices do not have it.
    """

    storage: str
    unit_roundoff: float
    cuda_only: str | None = None


DTYPES: Mapping[str, Dtype] = {
    "float32": Dtype("float32", 2.0**-24),
    "bfloat16": Dtype("bfloat16", 2.0**-8),
    "float16": Dtype("float16", 2.0**-11),
    "float64": Dtype("float64", 2.0**-53),
    "tf32": Dtype("float32", 2.0**-24, cuda_only="TF32 products exist on CUDA only"),
}
ACCELERATORS = ("cuda", "xpu", "mps", "hip")
"""The kinds of accelerator that have names, which are torch's. ROCm's devices, `hip`, are `cuda` to torch."""
FLAVOURS: Mapping[str, str] = {
    "normal": "from the standard normal distribution",
    "wide": "of either sign, magnitudes from 1e-3 to 1e3, uniform in the logarithm",
    "outliers": "normal, with one element in a hundred a hundred times larger",
    "zeros": "the first real input all zero",
    "ties": "few distinct values, so that maxima and midpoints tie",
    "midpoints": "midway between two levels of NF4, times a power of two or any other absmax",
    "tiny_norm": "rows whose mean square is about a norm's epsilon, 1e-8 to 1e-4",
    "minute": "normal, times a power of two from 2^-90 to 2^-30",
    "subnormal": "below the smallest normal float32, 2^-126",
    "masked": "normal, with padding anywhere",
    "one_hot": "one large value a row and zeros, which saturates a softmax",
    "sharp": "the first real input 24 times the standard normal, so that the scores of attention lie far apart",
    "constant": "one value everywhere",
    "long_context": "normal, with positions up to 32,768",
    "confident": "logits of a trained model: each label has a probability of 0.88 to 0.9999",
    "soft": "normal, with targets between 0 and 1",
    "certain": "logits of a trained model: each label is 18 to 80 ahead of all others",
    "right_padded": "normal, with shorter samples padded at the end",
    "left_padded": "normal, with shorter samples padded at the start",
}
"""Each flavour says how the values of a case are drawn."""
