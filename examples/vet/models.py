"""Models as somebody has them, for `blackswan vet-model models.py:NAME`: a right one, two with a bug in a layer, and one with other names.

In place of `small` stands what your own code does: `AutoModelForCausalLM.from_pretrained(…)`.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def small() -> Qwen3ForCausalLM:
    """A Qwen3 of three layers with random weights, in bfloat16."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 32}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15)
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def scaled() -> Qwen3ForCausalLM:
    """Its scores in layer 2 are divided by head_dim and not by its root."""
    model = small()
    model.model.layers[2].self_attn.scaling = 1 / 32
    return model


def unnormed() -> Qwen3ForCausalLM:
    """The keys of layer 1 are not normalised."""
    model = small()
    model.model.layers[1].self_attn.k_norm.forward = lambda keys: keys
    return model


class Wrapped(torch.nn.Module):
    """The same under names of one's own, which answers with logits alone."""

    def __init__(self) -> None:
        super().__init__()
        inner = small()
        self.config, self.inner, self.out = inner.config, inner.model, inner.lm_head

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [batch, seq, vocab]."""
        del labels
        return self.out(self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
