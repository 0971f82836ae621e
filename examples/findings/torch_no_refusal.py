"""A loss of NaN logits, of one class and of no token. Expected is a refusal; torch returns a number.

Where: nothing is refused.
Explains torch, transformers: LOSS-CE-REFUSES-NAN, LOSS-CE-REFUSES-ONE-CLASS, LOSS-LM-REFUSES-EMPTY.
"""

import torch
from torch.nn.functional import cross_entropy

print("logits NaN: expected an error, got", cross_entropy(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0])).item())
print("one class: expected an error, got", cross_entropy(torch.zeros(1, 1), torch.tensor([0])).item())
print("no label that counts: expected an error, got", cross_entropy(torch.zeros(1, 2), torch.tensor([-100])).item())
