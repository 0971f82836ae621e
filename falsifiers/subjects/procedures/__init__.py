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
    parallel,
    parallel_runs,
    split_runs,
    training,
)
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
    "shard_batch": parallel.shard_batch,
    "train_in_parallel": parallel.train_in_parallel,
    "fault_in_parallel": parallel.train_in_parallel,
    "run_in_parallel": parallel_runs.run_in_parallel,
    **adapters.PROCEDURES,
    **devices.PROCEDURES,
    **footprint.PROCEDURES,
    "fresh_classifier": fresh.fresh_classifier,
    "run_on_corpus": split_runs.run_on_corpus,
    "fit_run": training.fit_run,
    "fit_run_killed": training.fit_run_killed,
    "fit_continued": training.fit_continued,
    "pipeline_steps": training.pipeline_steps,
}


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
