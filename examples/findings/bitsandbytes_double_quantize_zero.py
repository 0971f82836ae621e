"""The code of 0 in the dynamic 8-bit code book, and what bitsandbytes stores for a group whose values are all 0.

Where: a group whose values are all 0 gets the code 0, which stands for −0.993, and not that of zero.
Explains bitsandbytes, bitsandbytes on cuda: NF4-DOUBLE-QUANTIZE.
"""

import torch
from bitsandbytes.functional import create_dynamic_map, quantize_blockwise

codes, _ = quantize_blockwise(torch.zeros(2), blocksize=256)
print("expected", create_dynamic_map().abs().argmin().item(), "got", codes[0].item())
