"""transformers' decoders in true float64, an oracle for the reference that shares no line with it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from blackswan.falsifiers.subjects.libraries.float64 import true_float64


def build(scalars: Mapping[str, Any], parameters: Mapping[str, np.ndarray]) -> nn.Module:
    """The family's model in float64 with these parameters, by Hugging Face name; use it inside `true_float64`."""
    names = {"vocab": "vocab_size", "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers"}
    names |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "eps": "rms_norm_eps"}
    config = transformers.AutoConfig.for_model(
        scalars["family"],
        **{theirs: scalars[ours] for ours, theirs in names.items()},
        rope_parameters={"rope_type": "default", "rope_theta": scalars["theta"]},
        tie_word_embeddings=scalars["tied"],
        attn_implementation="eager",
    )
    with true_float64():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    state = {name: torch.tensor(value) for name, value in parameters.items()}
    if scalars["tied"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    assert {value.dtype for value in [*model.parameters(), *model.buffers()]} == {torch.float64}
    return model.eval()


class LoraLinear(nn.Module):
    """y = base(x) + (alpha/rank) · x Aᵀ Bᵀ, the layer that PEFT puts in a projection's place."""

    def __init__(self, base: nn.Linear, lora_a: Tensor, lora_b: Tensor, alpha: float) -> None:
        super().__init__()
        self.base, self.lora_a, self.lora_b = base, nn.Parameter(lora_a), nn.Parameter(lora_b)
        self.scale = alpha / lora_a.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)


def adapt(model: nn.Module, trainable: Mapping[str, np.ndarray], alpha: float) -> dict[str, nn.Parameter]:
    """Freezes the model and adds the LoRA factors; returns all trainable parameters by name, the head's among them."""
    model.requires_grad_(False)
    parameters: dict[str, nn.Parameter] = {}
    for name, value in trainable.items():
        if name.endswith(".lora_A.weight"):
            path = name.removesuffix(".lora_A.weight")
            factors = (torch.tensor(trainable[f"{path}.lora_{factor}.weight"]) for factor in "AB")
            parent, _, leaf = path.rpartition(".")
            layer = LoraLinear(model.get_submodule(path), *factors, alpha)
            setattr(model.get_submodule(parent), leaf, layer)
            parameters |= {f"{path}.lora_A.weight": layer.lora_a, f"{path}.lora_B.weight": layer.lora_b}
        elif name.startswith("score."):
            parameters[name] = nn.Parameter(torch.tensor(value))
    return parameters


def hidden_states(model: nn.Module, input_ids: np.ndarray, mask: np.ndarray) -> Tensor:
    """The states after the final norm [batch, seq, hidden]; positions count a sample's real tokens."""
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    output = model.model(
        input_ids=torch.tensor(input_ids), attention_mask=torch.tensor(mask), position_ids=torch.tensor(positions), use_cache=False
    )
    return output.last_hidden_state


def classify(model: nn.Module, head: Mapping[str, Tensor], input_ids: np.ndarray, mask: np.ndarray, pooling: str) -> Tensor:
    """Logits [batch, classes]: each sample's hidden states, cut to its real tokens, pooled, then the head."""
    hidden = hidden_states(model, input_ids, mask)
    vectors = []
    for sample, real in zip(hidden, torch.tensor(mask), strict=True):
        tokens = sample[real]
        vectors.append({"mean": tokens.mean(dim=0), "first": tokens[0], "last": tokens[-1]}[pooling])
    return nn.functional.linear(torch.stack(vectors), head["score.weight"], head["score.bias"])
