"""Whole runs of several workers, one of which may be killed."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.subjects.patching import planted
from blackswan.falsifiers.subjects.procedures.workers import WORKERS, Run
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.fit import fit
from blackswan.impl.group import Group
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.samples import Samples
from blackswan.impl.tokens import Tokens
from blackswan.impl.trainer import Batch
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]


def run_in_parallel(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    """A run of `workers` workers in the folder `output`, from its state where `resume` says so.

    `train` and `validation` are {rows, targets, num_classes}, `settings` and `architecture` those of impl.config. `kill` is {rank, step,
    moment}, where the moment is "batch", with the first samples fetched, "before the sum" or "after the sum" of the gradients, or "state",
    with the new state written beside the old one.

    By rank: `errors`, what ended it; `rank0/consumed` [samples, 2], the step (from 0) and the number of each sample that it fetched to
    train on, in order, before it was killed too; `rank0/…` what it holds at the end.
    """
    outcomes = WORKERS.run(Run(f"{__name__}:run", scalars["workers"], scalars, str(device), planted()))
    found = {f"rank{rank}/{name}": value for rank, outcome in enumerate(outcomes) for name, value in outcome.arrays.items()}
    for rank in range(len(outcomes)):
        path = _log(scalars, rank)
        lines = path.read_text().splitlines() if path.exists() else []
        found[f"rank{rank}/consumed"] = np.asarray([line.split() for line in lines], np.int64).reshape(-1, 2)
        path.unlink(missing_ok=True)
    return found | {"errors": np.asarray(["" if each.error is None else f"{each.error}: {each.message}" for each in outcomes])}


def run(group: Group, device: torch.device, scalars: Scalars) -> dict[str, Array]:
    """One rank's part, in a process that ends with it."""
    from blackswan.falsifiers.subjects.implementation import to_numpy  # imports this package

    os.fsync = lambda _: None  # type: ignore[assignment]  # a killed process loses nothing that it has written; a power failure is another matter
    config, architecture = ClassifyConfig(**scalars["settings"]), DecoderConfig(**scalars["architecture"])
    pipeline = ClassifyPipeline.from_random(architecture, config, device=device, group=group)
    train, validation = Samples(**scalars["train"]), Samples(**scalars["validation"])
    kill = scalars.get("kill", {})
    strike = _strike(pipeline, kill["step"]) if kill.get("rank") == group.rank else None
    _note_batches(pipeline, train, _log(scalars, group.rank), strike if kill.get("moment") == "batch" else None)
    if strike is not None:
        _arm(group, kill["moment"], strike)
    fit(pipeline, train, validation, Path(scalars["output"]), resume=scalars["resume"], save_every=scalars["save_every"])
    return {name: to_numpy(value) for name, value in pipeline.trainer.state().items()}


def _log(scalars: Scalars, rank: int) -> Path:
    return Path(f"{scalars['output']}.rank{rank}")


def _strike(pipeline: ClassifyPipeline, step: int) -> Callable[[], None]:
    """Kills this process if that many steps are made."""

    def strike() -> None:
        if pipeline.trainer.optimiser.steps == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return strike


def _note_batches(pipeline: ClassifyPipeline, train: Samples, log: Path, then: Callable[[], None] | None) -> None:
    """Every batch of the training samples is noted in the file when it is fetched."""
    fetch = Samples.batch

    def noted(samples: Samples, indices: Sequence[int], tokens: Tokens, device: torch.device | str = "cpu") -> Batch:
        if samples is train:
            with log.open("a") as file:
                file.writelines(f"{pipeline.trainer.optimiser.steps} {index}\n" for index in indices)
            if then is not None:
                then()
        return fetch(samples, indices, tokens, device)

    Samples.batch = noted  # type: ignore[method-assign,assignment]  # this process ends with the run


def _arm(group: Any, moment: str, strike: Callable[[], None]) -> None:
    add, replace = group.sum, Path.replace

    def struck_sum(tensor: torch.Tensor) -> torch.Tensor:
        if moment == "before the sum":
            strike()
        total: torch.Tensor = add(tensor)
        if moment == "after the sum":
            strike()
        return total

    def struck_replace(path: Path, target: Path) -> Path:
        if moment == "state":
            strike()
        return replace(path, target)

    group.sum = struck_sum
    Path.replace = struck_replace  # type: ignore[assignment]  # this process ends with the run
