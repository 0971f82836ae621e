"""The codes of 1.73 and 1.4903578 in a block of 64 and in one of 62: expected is the same code whatever the block's length.

Where: backends/default/ops.py:249 divides a short last block by its scale, 245 multiplies by 1 / scale.
Explains bitsandbytes: NF4-QUANTIZE.
"""

import torch
from bitsandbytes.functional import quantize_4bit

weight = torch.full((1, 64), 1.4903578)
weight[0, 0] = 1.73
full, _ = quantize_4bit(weight, blocksize=64, quant_type="nf4")
tail, _ = quantize_4bit(weight[:, :62].contiguous(), blocksize=64, quant_type="nf4")
print("code of 1.4903578: expected", full[1].item() % 16, "got", tail[1].item() % 16)
