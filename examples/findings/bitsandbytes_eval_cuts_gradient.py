"""The gradient of a 4-bit layer's input in training, before and after one answer in evaluation on a CPU with bfloat16 products.

Where: autograd/_functions.py:422 calls gemv_4bit, which has no backward pass, and goes on with it.
Needs: AVX512-BF16.
Explains transformers:TRAINER, transformers:TRAINER_ONE_BATCH: TRN-BASE-FROZEN.
"""

import bitsandbytes
import torch

layer = bitsandbytes.nn.Linear4bit(64, 32, bias=False, quant_type="nf4").to("cpu")
before, after = (torch.ones(1, 64, requires_grad=True) for _ in range(2))
layer.train()(before).sum().backward()
with torch.no_grad():
    layer.eval()(torch.ones(1, 64))
layer.train()(after).sum().backward()
print("gradient of the input: expected", tuple(before.grad.shape), "got", after.grad)
