"""The sum of a row of the gradient of a cross-entropy for logits near 10,000, which is exactly 0, in torch and in Unsloth.

Where: kernels/cross_entropy_loss.py takes exp(logit − logsumexp), rounded as the logits' size is; torch subtracts the largest logit.
Needs: CUDA.
"""

import torch
from unsloth.kernels.cross_entropy_loss import fast_cross_entropy_loss

torch.manual_seed(0)
logits = (10000 + torch.randn(1, 4, 13, device="cuda")).requires_grad_()
labels = torch.arange(4, device="cuda")[None]
(expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum"), logits)
(got,) = torch.autograd.grad(fast_cross_entropy_loss(logits.clone(), labels) * 4, logits)
print(f"row sum: expected at most {expected.double().sum(-1).abs().max():.1e} got {got.double().sum(-1).abs().max():.1e}")
