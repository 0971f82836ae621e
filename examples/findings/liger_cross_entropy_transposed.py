"""The gradient of logits that lie transposed in memory, by Liger's cross-entropy on Triton's interpreter: it is the logits themselves.

Where: ops/cross_entropy.py:409 copies such logits, and line 459 asks the copy, which needs no gradient, whether one is to be computed.
Explains liger on cuda: KERNEL-CE-GRADIENT, LOSS-CE-GRADIENT, LOSS-CE-GRADIENT-ROWS, LOSS-LM-GRADIENT, LOSS-PER-SAMPLE-GRADIENT.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
from liger_kernel.ops import LigerCrossEntropyFunction

logits = torch.tensor([[3.0, 0.0], [0.0, 3.0]]).t().requires_grad_()
labels = torch.tensor([0, 1])
(expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), logits)
(got,) = torch.autograd.grad(LigerCrossEntropyFunction.apply(logits, labels, None)[0], logits)
print("gradient of the logits: expected", [round(value, 4) for value in expected[0].tolist()], "got", got[0].tolist())
