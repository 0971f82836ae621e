"""The scale of a block of zeros is 0; bitsandbytes stores 1e-38 for one that is shorter than a block.

Where: backends/default/ops.py:247 raises the scale of a short last block to 1e-38.
Explains bitsandbytes, bitsandbytes on cuda: NF4-QUANTIZE.
"""

import torch
from bitsandbytes.functional import quantize_4bit

_, full = quantize_4bit(torch.zeros(1, 64), blocksize=64, quant_type="nf4")
_, tail = quantize_4bit(torch.zeros(1, 63), blocksize=64, quant_type="nf4")
print("full block: expected 0, got", full.absmax.item())
print("tail block: expected 0, got", tail.absmax.item())
