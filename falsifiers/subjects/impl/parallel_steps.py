"""Steps of `impl` by workers on shares of given batches, what becomes of a fault on one of them, and what workers agree on."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.subjects.doors.training import Fault, Steps
from blackswan.falsifiers.subjects.impl.watching import state_of
from blackswan.impl import agreement
from blackswan.impl import group as groups
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.group import Group
from blackswan.impl.trainer import Batch, MicroResult, Trainer
from blackswan.reference.table import Array


def train(group: Group, device: torch.device, training: Case, backend: str, chunk: int | None, fault: Fault | None) -> Steps:
    """One rank's part, in a process that is gone afterwards: nothing is put back."""
    from blackswan.falsifiers.subjects.implementation import Implementation, to_numpy, trained  # imports this package

    if chunk is not None:
        groups._CHUNK = agreement._CHUNK = chunk
    subject = Implementation(str(device), "fused" if backend == "fused" else None)
    trainer, batches = subject.prepare(training.inputs, training.scalars, training.dtype, group)
    results, nothing = [], "" if fault is not None else _of_no_sample(trainer, batches[0])
    for step, batch in enumerate(batches):
        before, own = state_of(trainer), _own(batch, group)
        if fault is not None and (fault.rank, fault.step) == (group.rank, step):
            own = FAULTS[fault.kind](trainer, own, fault)
        try:
            results.append(trainer.train_batch(own))
        except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
            return Steps({}, f"{type(error).__name__}: {error}", step, before, state_of(trainer))
    return Steps({name: to_numpy(value) for name, value in trained(trainer, results).items()}, nothing=nothing)


def _of_no_sample(trainer: Trainer, batch: Batch) -> str:
    """What a step raises for which no worker has a sample."""
    try:
        trainer.train_batch(Batch(batch.input_ids[:0], batch.mask[:0], batch.labels[:0]))
    except ValueError as error:
        return str(error)
    return ""


def agree(
    group: Group, device: torch.device, held: Sequence[Sequence[Array]], texts: Sequence[Sequence[str]], reasons: Sequence[str], chunk: int
) -> tuple[list[str], list[Array], list[list[str]]]:
    """One rank's messages about each group of tensors, about texts, about a last rank that fails for each of the reasons, two last ones, a
    last one whose disk is full, a last one without a word, and about a gradient of large numbers; and the sum of each of the first group's
    tensors, and of all ranks the first one and its negative; and the texts of all ranks as it has them. The first texts are those that it
    is told about."""
    groups._CHUNK = agreement._CHUNK = chunk
    said = list[str]()

    def tell(ask: Callable[[], object]) -> None:
        try:
            ask()
        except OSError as error:
            said.append(f"{type(error).__name__} {error.errno}: {error}")
        except (ArithmeticError, RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")

    def fail(*errors: Exception) -> None:
        with agreement.together(group):
            if (place := group.rank - group.size + len(errors)) >= 0:
                raise errors[place]

    for kind in held:
        own = {f"tensor {number}": torch.from_numpy(each[group.rank]).to(device) for number, each in enumerate(kind)}
        tell(partial(agreement.require_equal, group, own))
    tell(partial(agreement.require_same, group, "text", texts[0][group.rank]))
    for reason in reasons:
        tell(partial(fail, ValueError(reason)))
    tell(partial(fail, ValueError("the first"), FloatingPointError("the second")))
    tell(partial(fail, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    tell(partial(fail, AssertionError()))
    tell(partial(agreement.require_finite, torch.full((3,), 3e38, device=device)))
    sums = [np.array(group.sum(torch.from_numpy(each[group.rank]).to(device)).cpu()) for each in held[0]]
    first = torch.from_numpy(held[0][0][group.rank]).to(device)
    gathered = [group.gather(each) for each in (first, -first)]
    sums += [np.array(each.cpu()) for each in gathered]
    return said, sums, [group.gather_text(each[group.rank]) for each in texts]


def _own(batch: Batch, group: Group) -> Batch:
    rows = torch.tensor(groups.shard(range(len(batch.labels)), group.rank, group.size), dtype=torch.int64, device=batch.labels.device)
    return Batch(batch.input_ids[rows], batch.mask[rows], batch.labels[rows])


def _bad_gradient(trainer: Trainer, batch: Batch, fault: Fault) -> Batch:
    """One element of one parameter's gradient is the value, as autograd makes it, or as the hand-written layers give it."""
    parameters = list(trainer.optimiser.parameters.values())
    chosen = fault.tensor % len(parameters)

    def spoil(gradient: torch.Tensor, at: int = 0) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[at] = fault.value
        return spoilt

    if not isinstance(trainer, FusedTrainer):
        parameters[chosen].register_hook(spoil)  # type: ignore[no-untyped-call]  # torch
        return batch
    first, micro_batch = sum(parameter.numel() for parameter in parameters[:chosen]), trainer._micro_batch

    def spoilt(index: int, part: Batch) -> MicroResult:
        result = micro_batch(index, part)
        return replace(result, gradient=spoil(result.gradient, first))

    trainer._micro_batch = spoilt  # type: ignore[method-assign]
    return batch


def _bad_label(trainer: Trainer, batch: Batch, fault: Fault) -> Batch:
    """A label out of range."""
    del fault
    return Batch(batch.input_ids, batch.mask, torch.full_like(batch.labels, trainer.classifier.adaptation.classes))


def _drift(trainer: Trainer, batch: Batch, fault: Fault) -> Batch:
    """One element of one parameter is 2⁻¹⁰ away: a unit in the last place may vanish in the rounding of the step."""
    parameters = list(trainer.optimiser.parameters.values())
    elements = parameters[fault.tensor % len(parameters)].data.view(-1)
    elements[fault.element % len(elements)] += 2.0**-10
    return batch


def _waiting(trainer: Trainer, batch: Batch, fault: Fault) -> Batch:
    """The samples wait for a step already."""
    del fault
    trainer.accumulate(batch)
    return batch


FAULTS = {"gradient": _bad_gradient, "label": _bad_label, "drift": _drift, "waiting": _waiting}
