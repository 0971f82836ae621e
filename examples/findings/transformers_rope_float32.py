"""The cosine of rotary position 30000 in float32, in transformers' Qwen2 and by angles in float64.

Where: modeling_qwen2.py:84 rounds the frequencies to float32, and line 89 multiplies them by the position.
Explains transformers: KERNEL-ROPE, KERNEL-ROPE-GRADIENT, OP-ROPE, OP-ROPE-GRADIENT, OP-ROPE-LLAMA3, OP-ROPE-LLAMA3-GRADIENT.
Explains liger on cuda, unsloth:ONE_LENGTH on cuda: KERNEL-ROPE, OP-ROPE, OP-ROPE-LLAMA3.
Explains unsloth:ONE_LENGTH on cuda: OP-ROPE-GRADIENT.
"""

import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

config = Qwen2Config(hidden_size=128, num_attention_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
cosine, _ = Qwen2RotaryEmbedding(config)(torch.zeros(()), torch.tensor([[30000]]))
exact = torch.cos(30000 * 1e6 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128))
worst = (cosine[0, 0, :64] - exact).abs().argmax()
print(f"cosine: expected {exact[worst]:.7f}, got {cosine[0, 0, worst]:.7f}")
