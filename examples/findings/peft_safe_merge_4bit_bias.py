"""`merge(safe_merge=True)` of a 4-bit layer with a LoRA bias, all values finite.

Where: tuners/lora/bnb.py:406 asks for the truth of a tensor.
"""

import bitsandbytes
from peft import LoraConfig
from peft.tuners.lora.bnb import Linear4bit

base = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4").to("cpu")
layer = Linear4bit(base, "default", config=LoraConfig(r=4, lora_alpha=16, lora_bias=True), r=4, lora_alpha=16)
try:
    layer.merge(safe_merge=True)
    print("expected a merge, got one")
except RuntimeError as error:
    print("expected a merge, got", error)
