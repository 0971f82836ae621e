"""Procedures of `impl` (files, devices, whole runs, default settings) as a subject runs them: names and paths in, arrays out."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.subjects.procedures import (
    adapters,
    data,
    devices,
    footprint,
    fresh,
    pretraining,
    whole_model,
)
from blackswan.impl import dispatch
from blackswan.impl.checkpoint import load_checkpoint, load_decoder
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.device import resolve_device
from blackswan.impl.tokens import load_tokenizer
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]


def _checkpoint(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    folder = Path(scalars["path"])
    dtype = next(iter(load_checkpoint(folder).tensors.values())).dtype
    decoder = load_decoder(folder, dtype=dtype, device=device)
    return {f"parameters/{name}": value.detach().cpu().float().numpy() for name, value in decoder.named_parameters()}


def _tokenizer(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    del device
    return {"vocab": np.asarray(load_tokenizer(Path(scalars["path"]), 16).vocab)}


def _device(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    del device
    return {"index": np.asarray(resolve_device(str(scalars["name"])).index or 0)}


Procedure = Callable[[Scalars, torch.device], dict[str, Array]]

PROCEDURES: dict[str, Procedure] = {
    "load_checkpoint": _checkpoint,
    "load_tokenizer": _tokenizer,
    "load_corpus": data.load,
    "resolve_device": _device,
    "read_samples": data.read,
    "batch_samples": data.batch,
    **adapters.PROCEDURES,
    **devices.PROCEDURES,
    **footprint.PROCEDURES,
    "fresh_classifier": fresh.fresh_classifier,
    "read_token_batches": pretraining.read_token_batches,
    "pretrain_run": pretraining.pretrain_run,
    "validate_tokens": pretraining.validate_tokens,
    "optimiser_state": pretraining.optimiser_state,
    "step_on_bad_weights": pretraining.step_on_bad_weights,
    "save_pretrain_checkpoint": pretraining.save_pretrain_checkpoint,
    "initial_decoder": pretraining.initial_decoder,
    "default_architecture": pretraining.default_architecture,
    **whole_model.PROCEDURES,
}

RECORDED: dict[str, Callable[[Scalars, torch.device], list[dispatch.Call]]] = {"whole_classifier": whole_model.record}
"""Procedures whose calls can be recorded."""

why_not = footprint.why_not


_CONFIGURED = (
    "num_classes",
    "lora_rank",
    "lora_alpha",
    "learning_rate",
    "epochs",
    "batch_size",
    "accumulation_steps",
    "gradient_clip_norm",
    "quantize_nf4",
    "warmup_fraction",
    "weight_decay",
    "pooling",
)


def default_configurations(model_params: float) -> list[dict[str, Any]]:
    """The settings that `impl` gives a user who asked for none, in the vocabulary of the hyperparameter rules."""
    return [
        {name: getattr(config, name) for name in _CONFIGURED} for config in (ClassifyConfig(), ClassifyConfig.qlora_default(model_params))
    ]
