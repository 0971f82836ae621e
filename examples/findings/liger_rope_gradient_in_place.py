"""The gradient that Liger's rotary positions are given, before and after the backward pass, on Triton's interpreter.

Where: ops/rope.py:239 turns the gradient where it lies, which autograd may give to others too.
Explains liger on cuda: KERNEL-ROPE-GRADIENT, OP-ROPE-GRADIENT, OP-ROPE-LLAMA3-GRADIENT.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
from liger_kernel.transformers.rope import liger_rotary_pos_emb

queries = torch.ones(1, 2, 1, 1).transpose(1, 2).expand(1, 1, 2, 2).clone().requires_grad_()
keys, angles = queries.detach().clone(), torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])
turned, _ = liger_rotary_pos_emb(queries, keys, angles.cos(), angles.sin())
gradient = torch.ones(1, 2, 1, 2).transpose(1, 2)
turned.backward(gradient)
print("gradient: expected", torch.ones(2).tolist(), "got", [round(value, 4) for value in gradient[0, 0, 1].tolist()])
