"""Dequantises a weight [5, 16] whose two blocks of 64 elements have the scales 1 and 100; every code is 15, which stands for 1.

Where: backends/cpu/ops.py:211 calls a CPU kernel (AVX-512) that counts columns // block_size scales a row.
Needs: AVX512.
Explains transformers:TRAINER, transformers:TRAINER_ONE_BATCH: TRN-NF4-APPLIED.
Explains bitsandbytes: NF4-DEQUANTIZE, NF4-ROUNDTRIP-BOUND, KERNEL-NF4-LINEAR, PREC-NF4-LINEAR, PREC-KERNEL-NF4-LINEAR.
"""

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

codes = torch.full((40, 1), 0xFF, dtype=torch.uint8)
state = QuantState(torch.tensor([1.0, 100.0]), torch.Size((5, 16)), get_4bit_type("nf4", "cpu"), 64, "nf4", torch.float32)
print("second block: expected 100, got", dequantize_4bit(codes, state)[4, 0].item())
