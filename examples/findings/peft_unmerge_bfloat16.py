"""Unmerges a layer of one weight in bfloat16: 1 − 0.99609375 · 1.0078125, rounded once, against PEFT's.

Where: tuners/lora/layer.py:1070 rounds the update to bfloat16 before line 1036 subtracts it.
"""

import torch
from peft.tuners.lora import Linear, LoraConfig

layer = Linear(torch.nn.Linear(1, 1), "default", config=LoraConfig(r=1, lora_alpha=1), r=1, lora_alpha=1).bfloat16()
weight, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
weight.data.fill_(1.0)
a.data.fill_(1.0078125)
b.data.fill_(0.99609375)
expected = (weight.double() - b.double() @ a.double()).bfloat16().item()
layer.merged_adapters.append("default")
layer.unmerge()
print(f"expected {expected:g}, got {weight.item():g}")
