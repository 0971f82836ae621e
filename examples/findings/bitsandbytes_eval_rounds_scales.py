"""The scale of the first block of a 4-bit layer, before and after one answer in evaluation on a CPU with bfloat16 products.

Where: functional.py:1721 rounds the scales to bfloat16 and keeps no others; 1781 restores what is left.
Needs: AVX512-BF16.
Explains transformers:TRAINER, transformers:TRAINER_ONE_BATCH: TRN-BASE-FROZEN.
"""

import bitsandbytes
import torch

torch.manual_seed(0)
layer = bitsandbytes.nn.Linear4bit(64, 32, bias=False, compress_statistics=False, quant_type="nf4").to("cpu")
before = layer.state_dict()["weight.absmax"].flatten()[0].item()
with torch.no_grad():
    layer.eval()(torch.zeros(1, 64))
print("scale: expected", before, "got", layer.state_dict()["weight.absmax"].flatten()[0].item())
