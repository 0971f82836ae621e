"""The gradient of the loss of float32 logits, one of 16.7 and 4,096 of 0, with the label of the largest, by torch on the CPU.

Where: log_softmax adds e^(x - max) up in a few lanes of float32, and what is below half an ulp of 1 is lost beside the largest.

Explains torch, transformers: KERNEL-CE-GRADIENT.
"""

import torch

logits = torch.zeros(1, 4097, requires_grad=True)
logits.data[0, 0] = 16.7
torch.nn.functional.cross_entropy(logits, torch.tensor([0])).backward()
exact = torch.softmax(logits.detach().double(), -1)[0, 1:].sum().item()
print(f"gradient of the label's logit: expected {-exact:.5g}, got {logits.grad[0, 0].item():.5g}")
