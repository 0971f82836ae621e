"""The mean of the scales of 1,000 blocks, which double quantisation subtracts from them, and what bitsandbytes stores for it.

Where: functional.py:939 sums the scales in float32, and the mean depends on the order.
Explains bitsandbytes: NF4-DOUBLE-QUANTIZE.
"""

import torch
from bitsandbytes.functional import quantize_4bit

torch.manual_seed(0)
weight = torch.randn(1000, 64)
_, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
exact = weight.abs().amax(1).double().mean().float()
print("mean: expected", exact.item(), "got", state.offset.item())
