"""RMSNorm of one row in bfloat16, against the same in float64 rounded once.

Where: modeling_qwen2.py:245 rounds twice; `--declare intermediates=storage` says so.
"""

import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

torch.manual_seed(0)
x, norm = torch.randn(1000, 64).bfloat16(), Qwen2RMSNorm(64).bfloat16()
norm.weight.data.normal_()
wide = x.double()
expected = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()).bfloat16()
print("elements that are not the rounded result: expected 0, got", int((norm(x) != expected).sum()), "of", x.numel())
