"""transformers' norms, rotary positions, attention, activation, losses and schedules, as its Qwen2, Qwen3 and Llama models call them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import ForCausalLMLoss, ForSequenceClassificationLoss
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding, apply_rotary_pos_emb, eager_attention_forward
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from blackswan.falsifiers.subjects.libraries.classifiers import ModelSubject
from blackswan.falsifiers.subjects.libraries.trainer import TrainingRuns
from blackswan.falsifiers.subjects.protocol import Lacks, WholeSubject


def norm(kind: type[torch.nn.Module]) -> Callable[[Tensor, Tensor, float], Tensor]:
    """The norm of one of the models."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.func.functional_call(kind(x.shape[-1], eps), {"weight": weight}, (x,))  # type: ignore[no-any-return]

    return rms_norm


def attention(function: Callable[..., Any]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`sdpa_attention_forward` or `eager_attention_forward`. A query that sees no key is given zero: neither defines it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril() & mask[:, None, None, :]
        added = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min)
        layer = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], is_causal=True, training=False)
        heads = (one.transpose(1, 2) for one in (q, k, v))
        found, _ = function(layer, *heads, added, scaling=q.shape[-1] ** -0.5, dropout=0.0)
        return torch.where(seen.any(-1).transpose(1, 2)[..., None], found, 0)

    return attend


def weighted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`ForSequenceClassificationLoss` of one label a sample; it has no class weights."""
    settings = SimpleNamespace(num_labels=logits.shape[-1], problem_type="single_label_classification")
    return ForSequenceClassificationLoss(labels, logits, settings)


def bce_with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """`ForSequenceClassificationLoss` of several labels a sample."""
    settings = SimpleNamespace(num_labels=logits.shape[-1], problem_type="multi_label_classification")
    return ForSequenceClassificationLoss(targets, logits, settings)


def lm_cross_entropy(logits: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """`ForCausalLMLoss`, the labels behind padding ignored."""
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return ForCausalLMLoss(logits.contiguous(), torch.where(mask & before, input_ids, -100), logits.shape[-1])


def rotary(apply: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """`rope` by a function of x [batch, seq, heads, width] and the cosines and sines of `Qwen2RotaryEmbedding` [batch, seq, width]."""

    def rope(
        x: Tensor,
        positions: Tensor,
        theta: float,
        factor: float = 1.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_positions: int = 8192,
    ) -> Tensor:
        width = x.shape[-1]
        scaling = {"factor": factor, "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor}
        scaling["original_max_position_embeddings"] = original_positions
        kind: dict[str, Any] = {"rope_type": "default"} if factor == 1.0 else {"rope_type": "llama3", **scaling}
        config = Qwen2Config(hidden_size=width, num_attention_heads=1, rope_parameters={**kind, "rope_theta": theta})
        return apply(x, *Qwen2RotaryEmbedding(config).to(x.device)(x, positions))

    return rope


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The activation and product of `Qwen2MLP`."""
    return ACT2FN["silu"](gate) * up  # type: ignore[no-any-return]


def learning_rate_schedule(peak: float, warmup_fraction: float, kind: str, total_steps: int) -> Tensor:
    """`get_constant_schedule_with_warmup`, `get_linear_…` and `get_cosine_…`, the warm-up as `TrainingArguments` rounds it."""
    import math

    parameter = torch.nn.Parameter(torch.zeros(()))
    optimiser = torch.optim.SGD([parameter], lr=peak)
    warmup = math.ceil(total_steps * warmup_fraction)
    made = {
        "constant": lambda: get_constant_schedule_with_warmup(optimiser, warmup),
        "linear": lambda: get_linear_schedule_with_warmup(optimiser, warmup, total_steps),  # type: ignore[no-untyped-call]
        "cosine": lambda: get_cosine_schedule_with_warmup(optimiser, warmup, total_steps),
    }[kind]()
    rates = []
    for _ in range(total_steps):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        made.step()
    return torch.tensor(rates, dtype=torch.float64)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": norm(Qwen2RMSNorm),
    "qk_norm": norm(Qwen3RMSNorm),
    "rope": rotary(lambda x, cos, sin: apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0]),
    "attention": attention(sdpa_attention_forward),
    "swiglu": swiglu,
    "weighted_cross_entropy": weighted_cross_entropy,
    "bce_with_logits": bce_with_logits,
    "lm_cross_entropy": lm_cross_entropy,
    "learning_rate_schedule": learning_rate_schedule,
}
EAGER = {"rms_norm": norm(LlamaRMSNorm), "attention": attention(eager_attention_forward)}
"""Llama's norm, and attention without a fused kernel."""


class MODEL(ModelSubject):
    """Whole classifiers with LoRA of PEFT and NF4 of bitsandbytes, attention by torch's fused function."""

    attention = "sdpa"


class MODEL_EAGER(ModelSubject):  # noqa: N801  # the name of a form, as `EAGER`
    """The same with attention written out."""

    attention = "eager"


DECAY = {"decay": "weights"}


class TRAINER(WholeSubject):
    """Runs of the Trainer, which decays no biases."""

    accumulate = True

    def __init__(self, device: str = "cpu") -> None:
        super().__init__("transformers, Trainer", device, {"train_steps": DECAY, "multi_label_steps": DECAY})

    def door(self, name: str) -> TrainingRuns:
        """The door `trainer`."""
        if name != "trainer":
            raise Lacks(f"{self.name} has no {name}")
        return TrainingRuns(self.accumulate, torch.device(self.device))


class TRAINER_ONE_BATCH(TRAINER):  # noqa: N801  # as above
    """The same, where the samples of a step are one micro-batch."""

    accumulate = False
