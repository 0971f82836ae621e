"""The gate that Liger's SwiGLU is given, before and after the backward pass on CUDA: its gradient lies there.

Where: ops/swiglu.py:104 and 105 write the gradients over the gate and the up projection, and return that memory.
Needs: CUDA.
Explains liger on cuda: KERNEL-SWIGLU-GRADIENT, OP-SWIGLU-GRADIENT, PREC-SWIGLU, PREC-KERNEL-SWIGLU.
"""

import torch
from liger_kernel.ops import LigerSiLUMulFunction

gate, up = (torch.full((1, 2), value, device="cuda", requires_grad=True) for value in (2.0, 1.0))
LigerSiLUMulFunction.apply(gate, up).sum().backward()
print("gate: expected", [2.0, 2.0], "got", [round(value, 4) for value in gate.tolist()[0]])
