"""A loss of NaN logits, of a label of no class, of one class and of no token by Unsloth. Expected is a refusal; it returns a number.

Where: nothing is refused.
Needs: CUDA.
"""

import torch
from unsloth.kernels.cross_entropy_loss import fast_cross_entropy_loss

CASES = {
    "logits NaN": ([float("nan"), 0.0], 0),
    "label 2 of 2": ([0.0, 0.0], 2),
    "one class": ([0.0], 0),
    "no label that counts": ([0.0, 0.0], -100),
}
for name, (logits, label) in CASES.items():
    given = torch.tensor([[logits]], device="cuda"), torch.tensor([[label]], device="cuda")
    print(f"{name}: expected an error, got", float(fast_cross_entropy_loss(*given)))
