"""The loss of a confident answer, float32 logits 300 and 294, by Liger's cross-entropy on Triton's interpreter.

Where: ops/cross_entropy.py:190 adds the maximum, and its rounding, to a logarithm beside which line 297 leaves a small loss.
Explains liger on cuda: KERNEL-CE.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
from liger_kernel.ops import LigerCrossEntropyFunction

logits, label = torch.tensor([[300.0, 294.0]]), torch.tensor([0])
exact = torch.nn.functional.cross_entropy(logits.double(), label).item()
got = LigerCrossEntropyFunction.apply(logits.clone(), label, None)[0].item()
print(f"loss: expected {exact:.6g}, got {got:.6g}")
