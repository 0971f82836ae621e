"""A step of bitsandbytes' AdamW on CUDA from a parameter of 0, with a learning rate of 0.1 and a weight decay of 1.

Where: csrc, kOptimizer32bit2State and kOptimizerStatic8bit2StateBlockwise decay the parameter that the step has moved; AdamW decays first.
Needs: CUDA.
Explains bitsandbytes:ADAMW_8BIT on cuda: OPT-ADAMW-DECOUPLED, OPT-ADAMW-FIRST-STEP, OPT-ADAMW-8BIT-STEP.
"""

import bitsandbytes
import torch

moved = {}
for name, optimiser in (("torch", torch.optim.AdamW), ("32 bits", bitsandbytes.optim.AdamW32bit), ("8 bits", bitsandbytes.optim.AdamW8bit)):
    parameter = torch.nn.Parameter(torch.zeros(4096, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimiser([parameter], lr=0.1, weight_decay=1.0).step()
    moved[name] = round(parameter[0].item(), 6)
print(f"32 bits: expected {moved['torch']} got {moved['32 bits']}")
print(f"8 bits: expected {moved['torch']} got {moved['8 bits']}")
