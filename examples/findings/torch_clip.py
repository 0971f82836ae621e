"""Clips a gradient of norm 1e-3 to 0.3e-3.

Where: nn/utils/clip_grad.py:164 adds 1e-6 to the norm; `--declare eps=1e-6` says so.
"""

import torch

parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.tensor([1e-3])
torch.nn.utils.clip_grad_norm_([parameter], 0.3e-3)
print(f"expected {0.3e-3:.6g}, got {parameter.grad.item():.6g}")
