"""The loss of every micro-batch and the gradient that reaches its logits: together they are the mean over the step's samples.

A micro-batch's gradient is c · g, where g is that of its own mean loss and c the weight that the loop gave it. That g is right is asked of
each micro-batch by the claim on the loss's gradient, and that c is its share of the samples by OPT-AVERAGE; both are of recorded values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from blackswan import reference
from blackswan.contracts.model import Claim
from blackswan.falsifiers.live.recorded import DTYPES, Ledger, Recorded, case_of, claims, host, sample
from blackswan.falsifiers.numeric.answers import NOT_FINITE
from blackswan.falsifiers.numeric.attack import SIGNAL_SHARE, Attack, rounded_gradients
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, rejected, value_within
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF
from blackswan.reference.table import Array

SHARES = "OPT-AVERAGE"
ROWS = 32
MOST = 2**20
"""Numbers of logits of an effective batch up to which its loss is computed anew; the gradient is checked on a sample of rows always."""
ROUNDINGS = 4
"""Divisions by the size of a micro-batch and by their number, and the products with their results, each rounded."""


@dataclass(frozen=True)
class Kind:
    """A loss that the reference has: its operation, the name of what is to be predicted there, and the claims on it."""

    operation: str
    target: str
    loss: str
    gradient: str


CROSS_ENTROPY = Kind("weighted_cross_entropy", "labels", "LOSS-CE", "LOSS-CE-GRADIENT")
BINARY = Kind("bce_with_logits", "targets", "LOSS-BCE", "LOSS-BCE-GRADIENT")


@dataclass
class MicroBatch:
    """One call of a loss: its rows that count, of which `at` are sampled, and what came back to it. `logits` are None where too large."""

    kind: Kind
    dtype: str
    rows: int
    sampled: Array
    target: Array
    value: Tensor
    full: tuple[Array, Array] | None
    arrived: Tensor | None = None
    gradient: Array | None = None


class LossWatch:
    """Records calls of cross_entropy and binary_cross_entropy_with_logits of torch.nn.functional, and the gradients that reach them.

    The functions are replaced in their module until the watch is closed; a call while `on` is false costs one more Python call.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.on, self.batches = ledger, False, list[MicroBatch]()
        self._plain = {name: getattr(functional, name) for name in ("cross_entropy", "binary_cross_entropy_with_logits")}
        functional.cross_entropy = self._watched("cross_entropy", CROSS_ENTROPY)
        functional.binary_cross_entropy_with_logits = self._watched("binary_cross_entropy_with_logits", BINARY)

    def close(self) -> None:
        """Puts the functions back."""
        for name, plain in self._plain.items():
            setattr(functional, name, plain)

    def begin(self, on: bool) -> None:
        """Forgets the last step; `on` says whether the next one is recorded."""
        self.on, self.batches = on, []

    def _watched(self, name: str, kind: Kind) -> Callable[..., Tensor]:
        plain = self._plain[name]

        def watched(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002  # torch's name
            loss: Tensor = plain(input, target, *args, **kwargs)
            if self.on and loss.requires_grad:
                settings = dict(
                    zip(("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"), args, strict=False)
                )
                with self.ledger.timed():
                    self.record(kind, input, target, loss, {**settings, **kwargs})
            return loss

        return watched

    def record(self, kind: Kind, logits: Tensor, target: Tensor, loss: Tensor, settings: dict[str, Any]) -> None:
        """Enters a micro-batch, or why it cannot be checked. `loss` and `logits` must be part of the graph."""
        if (why := _unsupported(kind, logits, target, loss, settings)) is not None:
            self.ledger.skip(kind.loss, why)
            return
        with torch.no_grad():
            counts = target != settings.get("ignore_index", -100) if kind is CROSS_ENTROPY else torch.ones(len(target), dtype=torch.bool)
            rows = torch.nonzero(counts.cpu()).flatten().to(logits.device)
            at = sample(rows, ROWS) if len(rows) else rows
            small = (sum(batch.rows for batch in self.batches) + len(rows)) * logits.shape[1] <= MOST
            full = (host(logits[rows]), host(target[rows])) if small else None
            batch = MicroBatch(kind, DTYPES[logits.dtype], len(rows), host(logits[at]), host(target[at]), loss.detach(), full)
        if not len(rows):
            return
        self.batches.append(batch)
        logits.register_hook(partial(_arrive, batch, at))  # type: ignore[no-untyped-call]  # torch's own
        loss.register_hook(lambda gradient: setattr(batch, "arrived", gradient.detach()))  # type: ignore[no-untyped-call]

    def judge(self) -> None:
        """Holds what was recorded of the step to the claims."""
        batches = [batch for batch in self.batches if batch.gradient is not None and batch.arrived is not None]
        if not batches:
            why = "no loss was seen: call torch.nn.functional.cross_entropy by that name, or hand yours to guard.loss(loss, logits, labels)"
            self.ledger.skip("LOSS-CE, LOSS-BCE and OPT-AVERAGE", why)
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self.ledger.skip(SHARES, "the micro-batches of other processes are not seen")
            return
        if len({(batch.kind, batch.dtype) for batch in batches}) > 1:
            self.ledger.skip(SHARES, "a step has losses of several kinds or dtypes, and their weights are the loop's own")
            return
        total = sum(batch.rows for batch in batches)
        _judge_shares(self.ledger, batches, total)
        _judge_loss(self.ledger, batches, total)


def _arrive(batch: MicroBatch, at: Tensor, gradient: Tensor) -> None:
    rows = host(gradient.detach()[at]).astype(np.float64)
    batch.gradient = rows if batch.gradient is None else batch.gradient + rows


def _unsupported(kind: Kind, logits: Tensor, target: Tensor, loss: Tensor, settings: dict[str, Any]) -> str | None:
    """Why a call cannot be held to the reference; None where it can."""
    if settings.get("weight") is not None or settings.get("pos_weight") is not None:
        return "a loss with weights is not compared"
    if settings.get("label_smoothing"):
        return "a loss with label smoothing is not compared"
    if logits.dim() != 2 or not len(logits) or (kind is CROSS_ENTROPY and target.dim() != 1) or logits.device.type == "meta":
        return (
            f"logits of shape {list(logits.shape)} with targets of shape {list(target.shape)} are not compared, expected one row a sample"
        )
    if kind is CROSS_ENTROPY and (target.is_floating_point() or logits.shape[1] < 2):
        return "a loss on probabilities, or of one class, is not compared"
    if logits.dtype not in DTYPES or DTYPES[logits.dtype] not in claims()[kind.loss].domain.dtype:
        return f"the claim says nothing of logits in {logits.dtype}"
    if torch.is_autocast_enabled(logits.device.type) and torch.get_autocast_dtype(logits.device.type) == torch.float16:
        return "in float16 the loss is scaled, by a factor that changes"
    return "a loss that is not reduced to one number is not compared" if loss.dim() else None


def _case(batch: MicroBatch, logits: Array, target: Array, cotangent: float) -> Case:
    sizes = {"batch": len(logits), "classes": logits.shape[1]}
    loss = {"loss": np.asarray(cotangent)}
    return case_of(batch.kind.operation, batch.dtype, {"logits": logits, batch.kind.target: target}, {}, sizes, loss)


def _judge_shares(ledger: Ledger, batches: list[MicroBatch], total: int) -> None:
    """The gradient of each micro-batch is that of its mean loss times its share of the samples; the share furthest off is entered."""
    count, found = len(batches), list[tuple[Comparison, str]]()
    for number, batch in enumerate(batches, 1):
        where = f"micro-batch {number} of {count}"
        weight = _weight(ledger, batch, f"the gradient of the logits of {where}")
        if weight is None:
            continue
        share, slack = weight
        wanted = batch.rows / total
        comparison = value_within(f"weight of {where}", share, wanted * (1 - slack), wanted * (1 + slack))
        why = f"each of its {batch.rows} samples, of {total} in the step, counts {share / wanted:.4g} times what the mean over all gives it"
        found.append((comparison, why))
    culprit = f"the accumulation of {count} micro-batches" if count > 1 else "the loss that is differentiated"
    if not found:
        ledger.note(SHARES, culprit, rejected("weight"))
        return
    comparison, why = max(found, key=lambda each: each[0].headroom)
    wrong = sum(not each.held for each, _ in found)
    ledger.note(SHARES, culprit, comparison, f"{why}; so for {wrong} of the {count} micro-batches" if count > 1 else why)


def _weight(ledger: Ledger, batch: MicroBatch, culprit: str) -> tuple[float, float] | None:
    """What the mean loss of a micro-batch was multiplied by, read off its gradient, and the relative error of that.

    None where the gradient is not the loss's, which is entered, or is lost in noise.
    """
    assert batch.gradient is not None
    case, answer = _case(batch, batch.sampled, batch.target, 1.0), {"logits": batch.gradient.astype(STORAGE[batch.dtype])}
    why = "it is not a multiple of the gradient of the mean loss"
    if not (np.isfinite(case.inputs["logits"]).all() and np.isfinite(batch.gradient).all()):
        ledger.hold(batch.kind.gradient, case, answer, culprit)  # which says where
        return None
    unit = reference.differentiate(case.operation, case.inputs, {}, case.cotangents, ["logits"])["logits"]
    size = float((unit * unit).sum())
    weight = float((batch.gradient * unit).sum()) / size if size else 0.0  # of the mean over the sampled rows
    case = _case(batch, batch.sampled, batch.target, weight or 1.0)
    if not size or (weight and not ledger.hold(batch.kind.gradient, case, answer, culprit, why)):
        return None
    slack = _slack(ledger, claims()[batch.kind.gradient], case, (weight or 1.0) * unit)
    return None if slack > SIGNAL_SHARE else (weight * batch.rows / len(batch.sampled), slack)


def _slack(ledger: Ledger, claim: Claim, case: Case, expected: Array) -> float:
    """The relative error that honest rounding leaves in the share that is read off a gradient."""
    declared = {case.operation: ledger.conventions.get(case.operation, {})}
    attack = Attack(claim, Recorded({}), case.dtype, assumed=declared)
    floor = attack.floor(case, rounded_gradients(case, ["logits"]), {"logits": expected})["logits"]
    return ROUNDINGS * UNIT_ROUNDOFF[case.dtype] + floor.times(attack.factors()).rms / Errors.of(expected).rms


def _judge_loss(ledger: Ledger, batches: list[MicroBatch], total: int) -> None:
    """The sum of what is differentiated, Σ c · loss, is the mean over the effective batch."""
    first, held = batches[0], [batch.full for batch in batches if batch.full is not None]
    culprit = f"the loss of the step, over {len(batches)} micro-batches of {total} samples"
    found = sum(float(batch.arrived or 0.0) * float(batch.value) for batch in batches)
    if len(held) < len(batches):
        if not np.isfinite(found):
            ledger.note("TRN-NON-FINITE", culprit, broken("loss", NOT_FINITE, "a finite number", found))
        why = f"the loss of {total} rows of {first.sampled.shape[1]} classes is not computed anew; its gradient is checked"
        ledger.skip(first.kind.loss, why)
        return
    logits, target = (np.concatenate(parts) for parts in zip(*held, strict=True))
    answer = {"loss": np.asarray(found).astype(STORAGE[DTYPES[first.value.dtype]])}
    ledger.hold(first.kind.loss, _case(first, logits, target, 1.0), answer, culprit)
