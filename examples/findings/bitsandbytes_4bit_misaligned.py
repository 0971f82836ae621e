"""A 4-bit layer on CUDA is given its input at an address that is no multiple of 16 bytes, as a view into another tensor is.

Where: csrc/gemm_4bit_simt.cu reads the input by 16 bytes wherever it begins. The claims are asked with --aligned.
Needs: CUDA.
"""

import bitsandbytes
import torch

layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).cuda()
memory = torch.ones(72, dtype=torch.bfloat16, device="cuda")
print("aligned: expected (1, 64) got", tuple(layer(memory[:64].view(1, 64)).shape))
try:
    got = layer(memory[1:65].view(1, 64))
    torch.cuda.synchronize()
    print("not aligned: expected (1, 64) got", tuple(got.shape))
except Exception as error:
    print("not aligned: expected (1, 64) got", str(error).partition("\n")[0])
