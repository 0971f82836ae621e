"""A weight [2, 1] is one byte of codes; bitsandbytes takes its shape for that of a transposed weight.

Where: functional.py:1076 takes a weight of one byte for a transposed one.
Explains bitsandbytes, bitsandbytes on cuda: KERNEL-NF4-DEQUANTIZE, NF4-DEQUANTIZE, KERNEL-NF4-LINEAR-GRADIENT, NF4-LINEAR-GRADIENT.
"""

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

codes = torch.full((1, 1), 0xFF, dtype=torch.uint8)
state = QuantState(torch.tensor([1.0]), torch.Size((2, 1)), get_4bit_type("nf4", "cpu"), 64, "nf4", torch.float32)
print("shape: expected (2, 1), got", tuple(dequantize_4bit(codes, state).shape))
