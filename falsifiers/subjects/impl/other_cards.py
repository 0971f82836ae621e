"""Trainers on one of several cards, which are feigned: what they do for another one, and what they keep."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from blackswan.falsifiers.subjects.conversion import adaptation_of, config_of
from blackswan.falsifiers.subjects.doors.devices import OnCards, Workload
from blackswan.falsifiers.subjects.impl.feigned import Cards, feigned
from blackswan.falsifiers.subjects.impl.late import few_tokens
from blackswan.impl.classifier import Classifier, trainable_shapes
from blackswan.impl.fused import products
from blackswan.impl.fused.memory import estimate_fused
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.trainer import Batch, Trainer
from blackswan.reference.table import Array

OTHERS = 9
"""So many models with other rotary frequencies are trained while graphs of the first one are kept: more than a cache may have room for."""


def on_cards(work: Workload, weights: Mapping[str, Array], lengths: Sequence[int], cards: tuple[int, int, int]) -> OnCards:
    """As the door `Devices.on_cards`."""
    used, current, third = cards
    owners: dict[StorageWeakRef, torch.device] = {}
    here, other = Cards(used, current, owners), Cards(third, current, owners)
    with few_tokens(), mock.patch.multiple(products, CALLS=1, ROUNDS=1):
        with feigned(here):
            trainer = _trainer(FusedTrainer, work, weights, here.used)
            _steps(trainer, work, lengths)
            _trainer(Trainer, work, weights, here.used).train_batch(_batch(work, lengths[0]))
            for times in range(2, 2 + OTHERS):
                others = replace(work, theta=times * work.theta)
                _trainer(FusedTrainer, others, weights, here.used).train_batch(_batch(work, lengths[0]))
            gc.collect()  # their graphs
        with feigned(other):
            _trainer(FusedTrainer, work, weights, other.used).train_batch(_batch(work, lengths[0]))
        estimate_fused(config_of(work.scalars), adaptation_of(work.scalars), work.batch, work.seq, getattr(torch, work.dtype))
        with feigned(here):
            _steps(trainer, work, lengths)
            pools, kept = len({graph.pool() for graph in here.graphs}), {graph.kept() for graph in here.graphs}
    elsewhere = [f"{what} for {device}" for each in (here, other) for what, device in each.done if device != str(each.used)]
    done, gone = frozenset(what for what, _ in here.done), tuple(sorted({*here.gone, *other.gone}))
    races = tuple(sorted({*here.accesses.races, *other.accesses.races}))
    return OnCards(done, tuple(elsewhere), pools, len(kept), gone, frozenset(here.modes | other.modes), races)


def _trainer(kind: type[Trainer], work: Workload, weights: Mapping[str, Array], place: torch.device) -> Trainer:
    tensors = {name: torch.tensor(value) for name, value in weights.items()}
    config, adaptation = config_of(work.scalars), adaptation_of(work.scalars)
    trained = {name: tensors.pop(name) for name in trainable_shapes(config, adaptation)}
    made = Classifier(config, adaptation, tensors, trained, dtype=getattr(torch, work.dtype), device=place)
    settings: dict[str, Any] = {"total_steps": None, "micro_batch": work.micro, "learning_rate": 1e-3}
    return kind(made, **settings | ({"longest": work.seq} if kind is FusedTrainer else {}))


def _batch(work: Workload, length: int) -> Batch:
    ids = torch.ones(work.micro, length, dtype=torch.int64)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros(work.micro, dtype=torch.int64))


def _steps(trainer: Trainer, work: Workload, lengths: Sequence[int]) -> None:
    """Whole steps, and one after accumulated batches, whose gradient has graphs of its own."""
    for length in lengths:
        trainer.train_batch(_batch(work, length))
    for length in lengths:
        trainer.accumulate(_batch(work, length))
    trainer.apply()
