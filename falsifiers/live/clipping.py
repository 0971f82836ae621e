"""Clipping in a live run: each call of clip_grad_norm_, and the norm of the gradients that reach the optimiser."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.live.recorded import Ledger, case_of, host, sample
from blackswan.falsifiers.numeric.comparison import value_within
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.reference.table import Array

CLAIM, BOUND = "OPT-CLIP", "OPT-CLIP-BOUND"
ELEMENTS = 256
U = UNIT_ROUNDOFF["float32"]


@dataclass(frozen=True)
class Gradients:
    """A sample of gradients, and the L2 norm over all of them, in float64."""

    sampled: Array
    norm: float
    count: int

    @classmethod
    def of(cls, gradients: list[Tensor]) -> "Gradients":
        """Those of a list that is not empty."""
        each = max(1, ELEMENTS // len(gradients))
        with torch.no_grad():
            sampled = torch.cat([sample(gradient.detach().reshape(-1), each).to(gradients[0]) for gradient in gradients])
        return cls(host(sampled.float()), norm_of(gradients), sum(gradient.numel() for gradient in gradients))


def norm_of(gradients: list[Tensor]) -> float:
    """Their L2 norm, its sums in float64."""
    with torch.no_grad():
        norms = [torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64) for gradient in gradients]
        return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))


def slack(count: int, unit: float = U) -> float:
    """The relative rounding of a norm of so many numbers: errors of random sign add up to the root of their number (Higham 2002, §2.6)."""
    return (4 + 2 * math.sqrt(count)) * unit


@dataclass
class Call:
    """A call of clip_grad_norm_: the gradients before and after, the bound, and the norm that it returned."""

    before: Gradients
    after: Gradients
    bound: float
    returned: float
    narrow: bool


class ClipWatch:
    """Records calls of torch.nn.utils.clip_grad_norm_, which is replaced until the watch is closed."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.on, self.calls = ledger, False, list[Call]()
        self._plain = torch.nn.utils.clip_grad_norm_

        def watched(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            gradients = [each.grad for each in given if each.grad is not None]
            if not self.on or not gradients or norm_type != 2.0:
                return self._plain(given, max_norm, norm_type, *args, **kwargs)
            with ledger.timed():
                before = Gradients.of(gradients)
            norm = self._plain(given, max_norm, norm_type, *args, **kwargs)
            narrow = any(gradient.dtype != torch.float32 for gradient in gradients)
            with ledger.timed():
                self.calls.append(Call(before, Gradients.of(gradients), float(max_norm), float(norm), narrow))
            return norm

        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = watched

    def close(self) -> None:
        """Puts the function back."""
        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = self._plain

    def begin(self, on: bool) -> None:
        """Forgets the last step; `on` says whether the next one is recorded."""
        self.on, self.calls = on, []

    def judge(self, gradients: list[Tensor], max_norm: float | None) -> None:
        """Holds the calls to OPT-CLIP, and the gradients that reach the optimiser to the bound."""
        if not self.calls:
            self.ledger.skip(CLAIM, "no call of torch.nn.utils.clip_grad_norm_ was seen")
        for call in self.calls:
            _judge_call(self.ledger, call)
        bounds = [max_norm] if max_norm is not None else [call.bound for call in self.calls[-1:]]
        if not bounds:
            self.ledger.skip(BOUND, "no bound is known: give max_norm to the guard")
        for bound in bounds:
            _judge_bound(self.ledger, gradients, bound, called=bool(self.calls))


def _judge_call(ledger: Ledger, call: Call) -> None:
    """The returned norm, and what a sample of gradients and the norm of all others became. NaN is OPT-CLIP's too."""
    if call.narrow:
        ledger.skip(CLAIM, "gradients that are not float32 are held to the bound only")
        return
    wide = slack(call.before.count)
    norm = value_within("norm", call.returned, call.before.norm * (1 - wide), call.before.norm * (1 + wide))
    if not ledger.note(CLAIM, "clip_grad_norm_", norm, "the norm that it returns is not that of all gradients before clipping"):
        return
    # One element stands for all that are not sampled, and is scaled as the whole: so the case has the norm that was returned.
    squares = float(np.square(call.before.sampled, dtype=np.float64).sum())
    rest = math.sqrt(max(0.0, call.returned**2 - squares))
    scaled = rest * (call.after.norm / call.before.norm) if call.before.norm else 0.0
    before, after = np.append(call.before.sampled, np.float32(rest)), np.append(call.after.sampled, np.float32(scaled))
    case = case_of(
        "clip_by_global_norm", "float32", {"gradients": before[None]}, {"max_norm": call.bound}, {"tensors": 1, "count": len(before)}
    )
    answer = {"gradients": after[None].astype(np.float32), "norm": np.asarray(call.returned, np.float32)}
    ledger.hold(CLAIM, case, answer, "clip_grad_norm_", f"gradients are not scaled by min(1, {call.bound:g} / norm)")


def _judge_bound(ledger: Ledger, gradients: list[Tensor], bound: float, called: bool) -> None:
    """The norm after clipping. In a dtype of their own the tensors' norms, their norm, the quotient and the products are each rounded."""
    count, norm = sum(gradient.numel() for gradient in gradients), norm_of(gradients)
    unit = max(float(torch.finfo(gradient.dtype).eps) / 2 for gradient in gradients)
    most = bound * (1 + slack(count) + 4 * unit)
    why = f"gradients reach the optimiser with a norm above {bound:g}: " + (
        "something was added after clipping" if called else "nothing clipped them"
    )
    ledger.note(BOUND, "the gradients at the optimiser's step", value_within("norm after clipping", norm, 0.0, most), why)
