"""Procedures of `impl` (files, devices, whole runs, default settings) as a subject runs them: names and paths in, arrays out."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from blackswan.falsifiers.subjects.procedures import (
    parallel,
    parallel_runs,
    split_runs,
    training,
)
from blackswan.impl.config import ClassifyConfig
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]


Procedure = Callable[[Scalars, torch.device], dict[str, Array]]

PROCEDURES: dict[str, Procedure] = {
    "shard_batch": parallel.shard_batch,
    "train_in_parallel": parallel.train_in_parallel,
    "fault_in_parallel": parallel.train_in_parallel,
    "run_in_parallel": parallel_runs.run_in_parallel,
    "run_on_corpus": split_runs.run_on_corpus,
    "fit_run": training.fit_run,
    "fit_run_killed": training.fit_run_killed,
    "fit_continued": training.fit_continued,
    "pipeline_steps": training.pipeline_steps,
}


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
