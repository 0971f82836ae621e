"""torch's attention on CUDA is given tensors at an address that is no multiple of 16 bytes, as a view into another tensor is.

Where: scaled_dot_product_attention chooses kernels that read by vectors by sizes and strides, not by addresses.
Needs: CUDA.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

memory = torch.ones(80, device="cuda")
print("aligned: expected (1, 1, 8, 8) got", tuple(attention(*[memory[:64].view(1, 1, 8, 8)] * 3).shape))
try:
    got = attention(*[memory[1:65].view(1, 1, 8, 8)] * 3)
    torch.cuda.synchronize()
    print("not aligned: expected (1, 1, 8, 8) got", tuple(got.shape))
except Exception as error:
    print("not aligned: expected (1, 1, 8, 8) got", str(error).partition("\n")[0])
