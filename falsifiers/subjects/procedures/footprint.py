"""What training takes of a device, over many steps and at most, as a subject runs it: sizes in, bytes out."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.subjects.procedures.allocator import allocated
from blackswan.falsifiers.subjects.procedures.devices import DTYPES, adaptation_of, classifier_on, config_of, trainer_by
from blackswan.impl import kernels, memory
from blackswan.impl.classifier import Classifier, base_shapes, initial_trainable
from blackswan.impl.fused.memory import estimate_fused
from blackswan.impl.tensors import LazyTensors, Shapes
from blackswan.impl.trainer import Batch, Trainer
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]
Outputs = dict[str, Array]
STEPS = 3
"""The first captures the graph of the hand-written layers or makes autograd's buffers, and the next have the state of all before."""


class RandomTensors(LazyTensors):
    """A model's tensors drawn on the device, one at a time."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor."""
        return self._shapes

    def __getitem__(self, name: str) -> Tensor:
        """Norms and biases one, all else N(0, 0.02²)."""
        tensor = torch.ones(self._shapes[name], dtype=self._dtype, device=self._device)
        return tensor if tensor.ndim == 1 else tensor.normal_(std=0.02)


def why_not(operation: str, place: torch.device) -> str | None:
    """Why the procedure cannot run there; None where it can."""
    if operation == "bound_memory" and (missing := kernels.missing()):
        return f"the estimate for a GPU counts what the kernels allocate there: {missing}"
    if operation == "repeat_steps" and place.type not in ("cpu", "cuda"):
        return f"nothing counts the bytes of {place.type}"
    return None


def repeat(scalars: Scalars, place: torch.device) -> Outputs:
    """Optimiser steps by `engine` after others that warm up: bytes that are live after them and were not before, and held in reserve."""
    grown = (_grown_on_cuda if place.type == "cuda" else _grown_on_cpu)(scalars, place)
    return {name: np.asarray(count) for name, count in grown.items()}


def _grown_on_cuda(scalars: Scalars, place: torch.device) -> dict[str, int]:
    """Live bytes, and bytes and segments that the allocator holds, given out or not."""
    trainer, batches = _small_trainer(scalars, place), _batches(scalars, place)
    _train(trainer, batches, scalars["warm_up"])
    before = _held(place)
    _train(trainer, batches, scalars["steps"])
    after = _held(place)
    return {name: after[name] - before[name] for name in before} | {"made": trainer.optimiser.steps}


def _held(place: torch.device) -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize(place)
    segments = torch.cuda.memory_stats(place)["segment.all.current"]
    return {"live": torch.cuda.memory_allocated(place), "reserved": torch.cuda.memory_reserved(place), "segments": segments}


def _grown_on_cpu(scalars: Scalars, place: torch.device) -> dict[str, int]:
    """Live bytes. That a tensor goes which was there before is not counted: so runs with and without the steps, from their beginning.

    The first of them makes what a process keeps, and does not count.
    """
    live, made = [], []
    for steps in (len(scalars["lengths"]), scalars["warm_up"], scalars["warm_up"] + scalars["steps"]):
        with allocated(place) as taken:
            trainer = _small_trainer(scalars, place)
            _train(trainer, _batches(scalars, place), steps)
            gc.collect()
        live.append(taken["kept"])
        made.append(trainer.optimiser.steps)
        del trainer
    return {"live": live[-1] - live[-2], "reserved": 0, "segments": 0, "made": made[-1]}


def _train(trainer: Trainer, batches: Sequence[Batch], steps: int) -> None:
    for step in range(steps):
        trainer.train_batch(batches[step % len(batches)])


def _small_trainer(scalars: Scalars, place: torch.device) -> Trainer:
    return trainer_by(scalars["engine"], classifier_on(scalars, place), scalars["micro"], scalars["seq"])


def _batches(scalars: Scalars, place: torch.device) -> list[Batch]:
    """One for each of `lengths`, the number of real tokens of every sample."""
    generator = torch.Generator().manual_seed(scalars["seed"])
    found = []
    for length in scalars["lengths"]:
        ids = torch.randint(0, scalars["vocab"], (scalars["batch"], scalars["seq"]), generator=generator)
        mask = torch.arange(scalars["seq"]).expand_as(ids) < length
        labels = torch.randint(0, scalars["classes"], (scalars["batch"],), generator=generator)
        found.append(Batch(ids.to(place), mask.to(place), labels.to(place)))
    return found


def bound(scalars: Scalars, place: torch.device) -> Outputs:
    """Over loading and training steps by `engine`: `peak`, the most bytes at one time, and `resident`, those that stay after the steps.

    Measured where `measured_on` names a kind of device, then with `thawed`: how many frozen tensors require a gradient or have one after
    the steps. Otherwise estimated for CUDA. Neither counts libraries' workspaces as resident.
    """
    found = _measured(scalars, place) if scalars["measured_on"] else _estimated(scalars)
    return {name: np.asarray(count) for name, count in found.items()}


def _estimated(scalars: Scalars) -> dict[str, int]:
    estimate = estimate_fused if scalars["engine"] == "fused" else memory.estimate
    found = estimate(config_of(scalars), adaptation_of(scalars), scalars["batch"], scalars["seq"], DTYPES[scalars["dtype"]])
    return {"peak": found.total, "resident": found.resident}


def _measured(scalars: Scalars, place: torch.device) -> dict[str, int]:
    before = _requested(place)
    with allocated(place) as taken:
        trainer = _drawn_trainer(scalars, place)
        _train(trainer, _batches({**scalars, "lengths": [scalars["seq"]]}, place), STEPS)
        resident = _requested(place) - before
    stays = resident if place.type == "cuda" else taken["kept"]
    return {"peak": taken["peak"], "resident": stays, "thawed": _thawed(trainer.classifier)}


def _drawn_trainer(scalars: Scalars, place: torch.device) -> Trainer:
    """Of a classifier whose base weights are drawn on the device."""
    config, adaptation, dtype = config_of(scalars), adaptation_of(scalars), DTYPES[scalars["dtype"]]
    base = RandomTensors(base_shapes(config), dtype, place)
    made = Classifier(config, adaptation, base, initial_trainable(config, adaptation, 0), dtype=dtype, device=place)
    return trainer_by(scalars["engine"], made, scalars["batch"], scalars["seq"])


def _requested(place: torch.device) -> int:
    """Bytes of what is live on a GPU, without what the allocator rounds up and without cuBLAS's workspaces; 0 elsewhere.

    The workspaces go: a captured graph must not run after this.
    """
    gc.collect()
    if place.type != "cuda":
        return 0
    torch.cuda.synchronize(place)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_stats(place)["requested_bytes.all.current"])


def _thawed(classifier: Classifier) -> int:
    trained = classifier.trainable_parameters()
    frozen = (value for name, value in (*classifier.named_parameters(), *classifier.named_buffers()) if name not in trained)
    return sum(value.requires_grad or value.grad is not None for value in frozen)


PROCEDURES = {"repeat_steps": repeat, "bound_memory": bound}
