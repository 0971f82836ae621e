"""A merged 4-bit layer must answer as before; x is zero, so that only the biases count. The LoRA bias is 1 and alpha / rank is 4.

Where: tuners/lora/bnb.py:405 adds the LoRA bias without the scaling.
"""

import bitsandbytes
import torch
from peft import LoraConfig
from peft.tuners.lora.bnb import Linear4bit

base = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4").to("cpu")
base.bias.data.zero_()
layer = Linear4bit(base, "default", config=LoraConfig(r=4, lora_alpha=16, lora_bias=True), r=4, lora_alpha=16)
layer.lora_B["default"].bias.data.fill_(1.0)
before = layer(torch.zeros(1, 64))[0, 0].item()
layer.merge()
print(f"after the merge: expected {before:g}, got {layer(torch.zeros(1, 64))[0, 0].item():g}")
