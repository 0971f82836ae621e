"""A second moment of 1e-7 beside one of 1, held in 8 bits: the nearest unsigned dynamic code is that of 0.

Where: backends/cpu/ops.py:48 calls a CPU kernel that finds codes by a table of equal steps, which are wider than the gaps next to zero.
Explains bitsandbytes:ADAMW_8BIT: OPT-ADAMW-8BIT-MOMENTS.
"""

import torch
from bitsandbytes.functional import create_dynamic_map, quantize_blockwise

codebook, moments = create_dynamic_map(signed=False), torch.tensor([1.0, 1e-7])
codes, _ = quantize_blockwise(moments, code=codebook, blocksize=256)
print("expected", codebook[(codebook - 1e-7).abs().argmin()].item(), "got", codebook[codes[1].long()].item())
