"""The loss of a batch whose classes weigh 1 and 9: expected is the sum of w · loss over the number of samples.

Where: the mean is over the class weights; `--declare reduction=weights` says so.
"""

import torch
from torch.nn.functional import cross_entropy

weights = torch.tensor([1.0, 9.0])
alone = cross_entropy(torch.zeros(1, 2), torch.tensor([1]), weights)
both = cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]), weights)
print(f"one sample of weight 9: expected {9 * 0.693147:.4g}, got {alone:.4g}")
print(f"with one of weight 1: expected {5 * 0.693147:.4g}, got {both:.4g}")
