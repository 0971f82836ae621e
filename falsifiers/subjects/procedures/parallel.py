"""Data-parallel training: shards, steps on several ranks, and what becomes of a fault on one of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.subjects.patching import planted
from blackswan.falsifiers.subjects.procedures.workers import WORKERS, Run
from blackswan.impl import agreement
from blackswan.impl import group as groups
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.group import Group
from blackswan.impl.trainer import Batch, MicroResult, Trainer
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]


def shard_batch(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    """What each of `size` ranks takes of `indices`: `rank0`, `rank1`, …"""
    del device
    return {
        f"rank{rank}": np.asarray(groups.shard(list(scalars["indices"]), rank, scalars["size"]), np.int64)
        for rank in range(scalars["size"])
    }


def train_in_parallel(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    """`train_steps` by `engine` on `workers` ranks: its outputs by rank, `rank0/losses`, …; `errors` [workers], each rank's type and text.

    `chunk` is the number of elements that the ranks sum or hash at a time, the subject's own without it. `fault` may damage one rank at one
    step: see FAULTS. `before/…` and `after/…` are then the state around the step that failed.
    """
    run = Run(f"{__name__}:train", scalars["workers"], scalars, str(device), planted())
    return _joined(run)


def _joined(run: Run) -> dict[str, Array]:
    outcomes = WORKERS.run(run)
    found = {f"rank{rank}/{name}": value for rank, outcome in enumerate(outcomes) for name, value in outcome.arrays.items()}
    return found | {"errors": np.asarray(["" if each.error is None else f"{each.error}: {each.message}" for each in outcomes])}


def train(group: Group, device: torch.device, scalars: Scalars) -> dict[str, Array]:
    """One rank's part of `train_in_parallel`."""
    from blackswan.falsifiers.subjects.implementation import Implementation, to_numpy, trained  # imports this package

    # This process is gone after the run: nothing is to be put back.
    groups._CHUNK = scalars.get("chunk", groups._CHUNK)
    agreement._CHUNK = scalars.get("chunk", agreement._CHUNK)
    path = "fused" if scalars["engine"] == "fused" else None
    trainer, batches = Implementation(str(device), path).prepare(scalars["inputs"], scalars["scalars"], scalars["dtype"], group)
    results = []
    for step, batch in enumerate(batches):
        before = trainer.state()
        part = _own(batch, group)
        try:
            results.append(trainer.train_batch(_damaged(trainer, part, group, step, scalars.get("fault", {}))))
        except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
            states = {
                f"{when}/{name}": to_numpy(v)
                for when, state in (("before", before), ("after", trainer.state()))
                for name, v in state.items()
            }
            return states | {"stopped": np.asarray(f"{type(error).__name__}: {error}"), "step": np.asarray(step)}
    return {name: to_numpy(value) for name, value in trained(trainer, results).items()}


def _own(batch: Batch, group: Group) -> Batch:
    rows = torch.tensor(groups.shard(range(len(batch.labels)), group.rank, group.size), dtype=torch.int64, device=batch.labels.device)
    return Batch(batch.input_ids[rows], batch.mask[rows], batch.labels[rows])


def _damaged(trainer: Trainer, batch: Batch, group: Group, step: int, fault: Scalars) -> Batch:
    """The batch, after the fault has struck where it is this rank's and this step's."""
    if fault.get("rank") == group.rank and fault["step"] == step:
        return FAULTS[fault["kind"]](trainer, batch, fault)
    return batch


def _bad_gradient(trainer: Trainer, batch: Batch, fault: Scalars) -> Batch:
    """One element of one parameter's gradient is the `value`, as autograd makes it, or as the hand-written layers give it."""
    parameters = list(trainer.optimiser.parameters.values())
    chosen = fault["tensor"] % len(parameters)

    def spoil(gradient: torch.Tensor, at: int = 0) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[at] = fault["value"]
        return spoilt

    if not isinstance(trainer, FusedTrainer):
        parameters[chosen].register_hook(spoil)
        return batch
    first, micro_batch = sum(parameter.numel() for parameter in parameters[:chosen]), trainer._micro_batch

    def spoilt(index: int, part: Batch) -> MicroResult:
        result = micro_batch(index, part)
        return replace(result, gradient=spoil(result.gradient, first))

    trainer._micro_batch = spoilt  # type: ignore[method-assign]
    return batch


def _bad_label(trainer: Trainer, batch: Batch, fault: Scalars) -> Batch:
    """A label out of range."""
    del fault
    return Batch(batch.input_ids, batch.mask, torch.full_like(batch.labels, trainer.classifier.adaptation.classes))


def _drift(trainer: Trainer, batch: Batch, fault: Scalars) -> Batch:
    """One element of one parameter is 2⁻¹⁰ away: a unit in the last place may vanish in the rounding of the step."""
    parameters = list(trainer.optimiser.parameters.values())
    elements = parameters[fault["tensor"] % len(parameters)].data.view(-1)
    elements[fault["element"] % len(elements)] += 2.0**-10
    return batch


FAULTS = {"gradient": _bad_gradient, "label": _bad_label, "drift": _drift}
