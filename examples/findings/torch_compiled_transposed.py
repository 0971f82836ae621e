"""The largest relative error of a row of RMSNorm in float32 whose input is transposed, by torch and by torch.compile of the same.

Where: _inductor/codegen/cpp.py:2273 adds up to 4,096 numbers one after the other where a row is not contiguous.
Explains torch:COMPILED, torch:OURS_COMPILED: KERNEL-RMSNORM, OP-RMSNORM.
"""

import torch


def norm(x, weight):
    """RMSNorm of rows of 896."""
    return torch.nn.functional.rms_norm(x, (896,), weight, 1e-5)


torch.manual_seed(0)
x, weight = torch.randn(896, 2000).t(), torch.randn(896)
exact = norm(x.double(), weight.double())
errors = [((found(x, weight) - exact).norm(dim=1) / exact.norm(dim=1)).max().item() for found in (norm, torch.compile(norm))]
print(f"error: expected about {errors[0]:.1e}, got {errors[1]:.1e}")
