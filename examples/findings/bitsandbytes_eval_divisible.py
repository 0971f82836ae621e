"""A 4-bit layer of 16 outputs answers in training; in evaluation, on a CPU with bfloat16 products, it does not.

Where: functional.py:1696 asserts that outputs come by 32; nn/modules.py:620 asks for no such thing.
Needs: AVX512-BF16.
Explains transformers:TRAINER, transformers:TRAINER_ONE_BATCH: TRN-BASE-FROZEN, TRN-NF4-APPLIED.
"""

import bitsandbytes
import torch

layer = bitsandbytes.nn.Linear4bit(64, 16, quant_type="nf4").to("cpu")
print("training: expected (1, 16), got", tuple(layer(torch.zeros(1, 64)).shape))
try:
    print("evaluation: expected (1, 16), got", tuple(layer.eval()(torch.zeros(1, 64)).shape))
except AssertionError as error:
    print("evaluation: expected (1, 16), got AssertionError:", error)
