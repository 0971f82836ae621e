"""A loss of NaN logits, of one class and of no token by Liger on Triton's interpreter. Expected is a refusal; it returns a number.

Where: nothing is refused.
Explains liger on cuda: LOSS-CE-REFUSES-NAN, LOSS-CE-REFUSES-ONE-CLASS, LOSS-LM-REFUSES-EMPTY.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
from liger_kernel.transformers import LigerCrossEntropyLoss

loss = LigerCrossEntropyLoss()
print("logits NaN: expected an error, got", loss(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0])).item())
print("one class: expected an error, got", loss(torch.zeros(1, 1), torch.tensor([0])).item())
print("no label that counts: expected an error, got", loss(torch.zeros(1, 2), torch.tensor([-100])).item())
