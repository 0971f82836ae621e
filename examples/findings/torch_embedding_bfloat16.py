"""The gradient of an embedding's row in bfloat16, for a token that occurs 1,000 times with the cotangent 1, by torch on the CPU.

Where: embedding_dense_backward_cpu in aten/src/ATen/native/Embedding.cpp adds up in the weight's dtype, rounding each sum.

Explains torch: OP-EMBEDDING-GRADIENT.
"""

import torch

weight = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.embedding(torch.zeros(1000, dtype=torch.long), weight).sum().backward()
print("gradient: expected 1000.0, got", weight.grad.item())
