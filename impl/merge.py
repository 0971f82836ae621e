"""Adapters merged into their base: a plain Hugging Face checkpoint, with the head beside it.

The folder holds a language model (config.json, model.safetensors, the tokenizer's files) that any tool reads, the head in
head.safetensors and the settings that it needs in blackswan.json. The head is not among the decoder's tensors: the Hugging Face classes
for sequence classification have no head bias and would load a half of it; `impl.adapter.prepare_sequence_classifier` gives them all of it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from blackswan.impl.adapter import (
    BESIDE,
    HEAD,
    HEAD_BIAS,
    HEAD_WEIGHT,
    Adapter,
    read_beside,
    read_tensors,
    require_named,
    write_beside,
)
from blackswan.impl.architecture import to_huggingface
from blackswan.impl.checkpoint import CONFIG, TOKENIZER, WEIGHTS, Checkpoint, belonging, copy_tokenizer, load_checkpoint, said_beside
from blackswan.impl.checksums import Checked, checksum, require
from blackswan.impl.classifier import Adaptation, trainable_shapes
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import EMBEDDING, projection_shapes
from blackswan.impl.folder import whole_folder
from blackswan.impl.nf4 import Nf4Weight
from blackswan.impl.operations.lora import lora_merge
from blackswan.impl.tensors import laid_out


def merge_adapter(checkpoint: Checkpoint, adapter: Adapter, *, quantized_as: torch.dtype | None = None) -> dict[str, Tensor]:
    """The decoder's tensors with W + (alpha/r) · B A where the adapter has an update, computed in float32, or in float64 where the
    weight or a factor is, and rounded once to W's dtype.

    Where the adapter was trained on NF4 weights, every projection is what it was in training, the dequantised one, and the updates are
    added to that (QLoRA §3); `quantized_as` is the dtype that training had the weights in when it quantised them, the stored one without
    it. Raises a ValueError where the adapter's tensors are not those of its adaptation, and for a result that is not finite.
    """
    adaptation = adapter.adaptation
    require_named(trainable_shapes(checkpoint.config, adaptation), adapter.trainable, "adapter")
    projections = tuple(f".{name}.weight" for name in projection_shapes(checkpoint.config))
    merged: dict[str, Tensor] = {}
    for name, stored in checkpoint.tensors.items():
        merged[name] = stored
        if name.endswith(projections):
            path = name.removesuffix(".weight")
            weight = _dequantized(path, stored, quantized_as or stored.dtype, adaptation.double_quantize) if adaptation.nf4 else stored
            merged[name] = _updated(path, weight, adapter).to(stored.dtype)
        if not bool(torch.isfinite(merged[name]).all()):
            what = f"NaN or infinity where {stored.dtype} holds the merged weight"
            raise ValueError(f"{name}: {what}; the base is damaged, or its dtype too narrow")
    return merged


def _dequantized(path: str, stored: Tensor, quantized_as: torch.dtype, double_quantize: bool) -> Tensor:
    """The weight after NF4, at least in float32, which holds it exactly."""
    quantized = Nf4Weight(path, stored.to(quantized_as))
    if double_quantize:
        quantized.double_quantize()
    return quantized.dequantized(torch.promote_types(stored.dtype, torch.float32))


def _updated(path: str, weight: Tensor, adapter: Adapter) -> Tensor:
    """W + (alpha/r) · B A in W's dtype, or W itself where the adapter has no update."""
    lora_a, lora_b = (adapter.trainable.get(f"{path}.lora_{factor}.weight") for factor in "AB")
    if lora_a is None or lora_b is None:
        return weight
    dtype = torch.promote_types(lora_a.dtype, lora_b.dtype)
    return lora_merge(weight, lora_a.to(weight.device, dtype), lora_b.to(weight.device, dtype), adapter.adaptation.alpha)


def save_merged(
    folder: Path, checkpoint: Checkpoint, adapter: Adapter, *, source: Path | None = None, quantized_as: torch.dtype | None = None
) -> None:
    """Writes the merged checkpoint of an adapter and its base; NF4 as the adapter was trained.

    `source` is the base's folder or .apr file: what else its config.json says (special tokens among it) and its tokenizer come along.
    The folder appears whole or not at all. Raises a FileExistsError where it exists.
    """
    adaptation = adapter.adaptation
    tensors = merge_adapter(checkpoint, adapter, quantized_as=quantized_as)
    head = laid_out({name: adapter.trainable[name] for name in (HEAD_WEIGHT, HEAD_BIAS)})
    with whole_folder(folder) as partial:
        stored = laid_out(tensors)
        save_file(stored, partial / WEIGHTS, metadata={"format": "pt"})
        save_file(head, partial / HEAD, metadata={"format": "pt"})
        settings = _config(checkpoint.config, source) | {"dtype": str(tensors[EMBEDDING].dtype).removeprefix("torch.")}
        (partial / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        unquantized = Adaptation(adaptation.classes, adaptation.rank, adaptation.alpha, adaptation.targets, adaptation.pooling)
        kept = {name: checksum(tensor) for name, tensor in stored.items()}
        write_beside(partial / BESIDE, checkpoint.config, unquantized, adapter.extra, head, kept)
        if source is not None:
            copy_tokenizer(belonging(source, TOKENIZER), partial / TOKENIZER)


def load_merged(folder: Path) -> tuple[Checkpoint, Adapter]:
    """A merged checkpoint and its head, the latter as an adapter without updates: a `Classifier` is made from the two.

    Raises as `load_checkpoint` does, and for a head or settings that are missing, damaged or of another architecture.
    """
    checkpoint = load_checkpoint(folder)
    head = read_tensors(folder / HEAD)
    own = read_beside(folder / BESIDE, checkpoint.config)
    adaptation = Adaptation(own["classes"], rank=1, alpha=1.0, targets="", pooling=own["pooling"], nf4=own["nf4"])
    require_named(trainable_shapes(checkpoint.config, adaptation), head, str(folder / HEAD))
    require(head, own["checksums"]["tensors"], str(folder / HEAD))
    base = Checked(checkpoint.tensors, own["checksums"]["base"], folder, "the head")
    own_head = {name: head[name] for name in (HEAD_WEIGHT, HEAD_BIAS)}
    return Checkpoint(checkpoint.config, base), Adapter(adaptation, own_head, folder, own["extra"], own["checksums"]["base"])


def _config(config: DecoderConfig, source: Path | None) -> dict[str, Any]:
    """A language model's config.json: what the source's says beside the architecture, or without a source the architecture alone."""
    return to_huggingface(config) | ({} if source is None else said_beside(source))
