"""Whole classifiers as users of transformers, PEFT and bitsandbytes build them: a decoder, LoRA, NF4 where asked, pooling and a head.

The decoder is the family's model of transformers, `get_peft_model` adds the factors, and with NF4 each projection is a `Linear4bit`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model, Qwen3Config, Qwen3Model
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from blackswan.contracts import load_operations
from blackswan.contracts.conventions import Declaration, shared_out
from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.falsifiers.subjects.doors.models import ModelOutputs, Rounded, Whole
from blackswan.falsifiers.subjects.libraries.float64 import true_float64
from blackswan.falsifiers.subjects.protocol import Lacks, Subject, TracedCall, WholeSubject

FAMILIES = {"llama": (LlamaConfig, LlamaModel), "qwen2": (Qwen2Config, Qwen2Model), "qwen3": (Qwen3Config, Qwen3Model)}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {"q_v": ["q_proj", "v_proj"], "all": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
NF4_BLOCK = 64
OF_ITS_OWN = {"loss_dtype": "storage"}
"""`ForSequenceClassificationLoss` computes its mean in the dtype of the logits."""


class Classifiers:
    """The door `models`, see the protocol Model, with the attention of transformers of that name."""

    def __init__(self, attention: str, device: torch.device) -> None:
        self._attention, self._device = attention, device

    def outputs(self, whole: Whole, dtype: str, rounded: Rounded | None = None) -> ModelOutputs:
        """A forward and a backward pass. Lacks under a rounding."""
        if rounded is not None:
            raise Lacks("transformers has no operations whose results could be rounded one by one")
        scalars, parameters = whole.scalars, whole.parameters()
        around: AbstractContextManager[None] = nullcontext()
        if dtype == "float64":
            parameters = _through_nf4(parameters) if scalars["nf4"] else parameters
            scalars, around = {**scalars, "nf4": False}, true_float64()
        with around:
            classifier = Classifier(scalars, parameters, self._attention, DTYPES[dtype], self._device)
            given = (torch.tensor(whole.inputs[name], device=self._device) for name in ("input_ids", "mask", "labels"))
            return classifier.answer(*given)

    def calls(self, whole: Whole, dtype: str, block: str) -> list[TracedCall]:
        """None: the calls inside are not recorded."""
        del whole, dtype, block
        return []


class ModelSubject(WholeSubject):
    """A subject that is a whole model and has no operations of its own; `declared` holds for each operation that has such a convention."""

    attention: str

    def __init__(self, device: str = "cpu", declared: Declaration | None = None) -> None:
        every = shared_out(load_operations(), declared or {})
        every["weighted_cross_entropy"] = {**OF_ITS_OWN, **every["weighted_cross_entropy"]}
        super().__init__(f"transformers, {self.attention}", device, every)

    def using(self, backend: str) -> Subject:
        """Itself for torch; without a door for any other, which is a program of this project's own."""
        if backend == "torch":
            return self
        other = copy(self)
        other._backend = backend
        return other

    _backend = "torch"

    def door(self, name: str) -> Classifiers:
        """The door `models`."""
        if name != "models":
            raise Lacks(f"{self.name} has no {name}")
        if self._backend != "torch":
            raise Lacks(f"{self.name} has no backend {self._backend}, which is a program of this project's own")
        return Classifiers(self.attention, torch.device(self.device))


class Classifier(nn.Module):
    """A decoder with LoRA and a head with bias. `parameters` are arrays by Hugging Face name."""

    def __init__(
        self, scalars: Mapping[str, Any], parameters: Mapping[str, Any], attention: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.pooling = str(scalars["pooling"])
        decoder = _decoder(scalars, attention, dtype)
        decoder.load_state_dict({name: _tensor(parameters[f"model.{name}"], dtype) for name in decoder.state_dict()}, assign=True)
        if scalars["nf4"]:
            _quantise(decoder, dtype, device)
        self.body = _adapted(decoder.to(device), scalars)
        self.score = nn.Linear(scalars["hidden"], scalars["classes"], device=device)
        self.trained = {f"model.{plain_name(name)}": value for name, value in self.body.named_parameters() if value.requires_grad}
        self.trained |= {f"score.{name}": value for name, value in self.score.named_parameters()}
        with torch.no_grad():
            for name, value in self.trained.items():
                value.data = _tensor(parameters[name], torch.float64 if dtype == torch.float64 else torch.float32).to(device)

    def answer(self, input_ids: Tensor, mask: Tensor, labels: Tensor) -> ModelOutputs:
        """Hidden states, logits, loss and gradients."""
        states: dict[str, Tensor] = {}
        decoder = self.body.get_base_model()
        watched = {"model.embed_tokens": decoder.embed_tokens, "model.norm": decoder.norm}
        watched |= {f"model.layers.{index}": layer for index, layer in enumerate(decoder.layers)}
        hooks = [module.register_forward_hook(_keeping(states, path)) for path, module in watched.items()]
        try:
            hidden = self.body(input_ids=input_ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
            logits = self._head(hidden, mask)
            settings = SimpleNamespace(num_labels=logits.shape[-1], problem_type="single_label_classification")
            loss = ForSequenceClassificationLoss(labels, logits, settings)
            loss.backward()  # type: ignore[no-untyped-call]  # torch
        finally:
            for hook in hooks:
                hook.remove()
        slopes = {name: value.grad if value.grad is not None else torch.zeros_like(value) for name, value in self.trained.items()}
        arrays = ({name: to_numpy(value) for name, value in given.items()} for given in (states, slopes))
        return ModelOutputs(next(arrays), to_numpy(logits), to_numpy(loss), next(arrays))

    def _head(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The pooled state through the head, in the dtype of the states: its float32 parameters are cast as autocast does."""
        weight, bias = (value.to(hidden.dtype) for value in (self.score.weight, self.score.bias))
        return nn.functional.linear(pooled(hidden, mask, self.pooling), weight, bias)


def pooled(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """The mean over a sample's real tokens, or the first or last of them: [batch, hidden]."""
    if pooling == "mean":
        share = mask[..., None].to(torch.float32)
        return ((hidden.to(torch.float32) * share).sum(1) / share.sum(1)).to(hidden.dtype)
    places = mask.long().argmax(1) if pooling == "first" else mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), places]


def configuration(scalars: Mapping[str, Any], attention: str, **further: Any) -> Any:
    """The configuration of a family's model with those sizes."""
    return FAMILIES[scalars["family"]][0](
        vocab_size=scalars["vocab"],
        hidden_size=scalars["hidden"],
        intermediate_size=scalars["intermediate"],
        num_hidden_layers=scalars["layers"],
        num_attention_heads=scalars["heads"],
        num_key_value_heads=scalars["kv_heads"],
        head_dim=scalars["head_dim"],
        rms_norm_eps=scalars["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": scalars["theta"]},
        attn_implementation=attention,
        **further,
    )


def _decoder(scalars: Mapping[str, Any], attention: str, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(), torch.device("cpu"):  # the initial values are replaced
        return FAMILIES[scalars["family"]][1](configuration(scalars, attention)).to(dtype).eval()


def _quantise(decoder: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Puts a `Linear4bit` in the place of each projection."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    for path, layer in [(path, layer) for path, layer in decoder.named_modules() if isinstance(layer, nn.Linear)]:
        made: Any = Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, dtype, False, "nf4")  # type: ignore[no-untyped-call]
        made.weight = Params4bit(layer.weight, requires_grad=False, compress_statistics=False, blocksize=NF4_BLOCK, quant_type="nf4")
        made.bias = layer.bias
        decoder.set_submodule(path, made.to(device))


def _through_nf4(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, those of projections through bitsandbytes' codes and back, in float32: it computes no NF4 in float64."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    found = dict(parameters)
    for name in (name for name in parameters if name.endswith("_proj.weight")):
        weight = _tensor(parameters[name], torch.float32)
        found[name] = dequantize_4bit(*quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")).numpy()
    return found


def _adapted(decoder: Any, scalars: Mapping[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = TARGETS[scalars["targets"]]
    config = LoraConfig(r=scalars["rank"], lora_alpha=scalars["alpha"], target_modules=targets, lora_dropout=0.0, bias="none")
    return get_peft_model(decoder, config)


def plain_name(name: str) -> str:
    """PEFT's name of a factor or of a head as Hugging Face calls it."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.", ".").replace(".default.", ".")


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    """A copy, in that dtype; NumPy does not count bfloat16 among the floats, and torch does not read it."""
    if value.dtype == ml_dtypes.bfloat16:
        return torch.tensor(value.view(np.int16)).view(torch.bfloat16).to(dtype)
    return torch.tensor(value, dtype=dtype)


def _keeping(states: dict[str, Tensor], path: str) -> Any:
    def keep(module: nn.Module, given: Any, result: Any) -> None:
        del module, given
        states[path] = (result[0] if isinstance(result, tuple) else result).detach()

    return keep
