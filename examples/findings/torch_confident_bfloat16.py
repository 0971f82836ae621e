"""The gradient of the loss of bfloat16 logits [6, 0] with the label 0, which is p − 1 for p = 0.9975, by torch.

Where: log_softmax on the CPU rounds within; `--declare intermediates=storage` says so.
"""

import torch

logits = torch.tensor([[6.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.cross_entropy(logits, torch.tensor([0])).backward()
exact = torch.softmax(logits.detach().double(), -1)[0, 0].item() - 1
print("gradient of the label's logit: expected", round(exact, 7), "got", logits.grad[0, 0].item())
