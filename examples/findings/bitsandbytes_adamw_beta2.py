"""The second moment after one step of bitsandbytes' AdamW on CUDA with a gradient of 1 and beta2 0.999, which is 1 − beta2.

Where: csrc, kOptimizer32bit2State and kOptimizerStatic8bit2StateBlockwise subtract beta2 from 1 when it is rounded to float32.
Needs: CUDA.
Explains bitsandbytes:ADAMW_8BIT on cuda: OPT-ADAMW, OPT-ADAMW-8BIT-MOMENTS.
"""

import bitsandbytes
import torch

parameter = torch.nn.Parameter(torch.zeros(4096, device="cuda"))
parameter.grad = torch.ones_like(parameter)
optimiser = bitsandbytes.optim.AdamW32bit([parameter], betas=(0.9, 0.999))
optimiser.step()
print(f"expected {torch.tensor(0.001).item():.9f} got {optimiser.state[parameter]['state2'][0].item():.9f}")
