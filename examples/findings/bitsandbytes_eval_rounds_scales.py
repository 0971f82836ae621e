"""The scale of the first block of a 4-bit layer, before and after one answer in evaluation on a CPU with bfloat16 products."""

import bitsandbytes
import torch

torch.manual_seed(0)
layer = bitsandbytes.nn.Linear4bit(64, 32, bias=False, compress_statistics=False, quant_type="nf4").to("cpu")
before = layer.state_dict()["weight.absmax"].flatten()[0].item()
with torch.no_grad():
    layer.eval()(torch.zeros(1, 64))
print("scale: expected", before, "got", layer.state_dict()["weight.absmax"].flatten()[0].item())
