"""The loss of bfloat16 logits, computed in float64 and by torch.

Where: the loss has the dtype of the logits; `--declare loss_dtype=storage` says so.
"""

import torch
from torch.nn.functional import cross_entropy

logits, label = torch.tensor([[0.0, 1.0, 2.0]]).bfloat16(), torch.tensor([0])
found = cross_entropy(logits, label)
print("expected", round(cross_entropy(logits.double(), label).item(), 6), "in float32, got", found.item(), "in", found.dtype)
