"""Parameters in a live step: AdamW's move of a sample of elements, frozen tensors bit for bit, gradients of LoRA's factors."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from blackswan.falsifiers.live.recorded import Ledger, case_of, host, sample
from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.reference.table import Array

ADAMW, FROZEN, FLOW = "OPT-ADAMW", "TRN-BASE-FROZEN", "LORA-GRADIENT-FLOW"
ELEMENTS = 256
MOMENTS = ("exp_avg", "exp_avg_sq")
LORA = re.compile(r"lora_[AB]\b")
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Moved:
    """A sample of the elements that one group of an optimiser moves, which share the scalars: before the step, `inputs`."""

    parameters: list[tuple[str, Tensor]]
    scalars: dict[str, Any]
    inputs: dict[str, Array]


class AdamWatch:
    """Records the elements before a step, and holds them after it to OPT-ADAMW."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], ledger: Ledger) -> None:
        self.optimizer, self.names, self.ledger = optimizer, names, ledger

    def before(self) -> list[Moved]:
        """What is to be moved, by group and number of steps made; empty where the optimiser's formula is not known."""
        if not isinstance(self.optimizer, torch.optim.AdamW):
            self.ledger.skip(ADAMW, f"the optimiser is {type(self.optimizer).__name__}, no torch.optim.AdamW")
            return []
        found = []
        for group in self.optimizer.param_groups:
            by_step: dict[int, list[tuple[str, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None or not self._known(group, parameter):
                    continue
                step = int(self.optimizer.state.get(parameter, {}).get("step", 0)) + 1
                by_step.setdefault(step, []).append((self.names.get(parameter, "a parameter of the optimiser"), parameter))
            found += [Moved(entries, _scalars(group, step), self._elements(entries, True)) for step, entries in by_step.items()]
        return found

    def _known(self, group: Mapping[str, Any], parameter: Tensor) -> bool:
        if group.get("amsgrad") or group.get("maximize"):
            self.ledger.skip(ADAMW, "amsgrad and maximize are not compared")
        elif parameter.dtype != torch.float32:
            self.ledger.skip(ADAMW, f"the claim speaks of parameters in float32, and some are {parameter.dtype}")
        else:
            return True
        return False

    def _elements(self, entries: list[tuple[str, Tensor]], gradient: bool) -> dict[str, Array]:
        each, state = _each(entries), self.optimizer.state
        columns: dict[str, list[Tensor]] = {"parameter": [parameter for _, parameter in entries]}
        if gradient:
            columns["gradient"] = [parameter.grad for _, parameter in entries if parameter.grad is not None]
        for moment in MOMENTS:
            columns[moment] = [state.get(parameter, {}).get(moment, torch.zeros_like(parameter)) for _, parameter in entries]
        return {name: _gathered(tensors, each) for name, tensors in columns.items()}

    def judge(self, moved: list[Moved]) -> None:
        """Holds the elements after the step to the claim."""
        for one in moved:
            after = self._elements(one.parameters, False)
            case = case_of("adamw_step", "float32", one.inputs, one.scalars, {"count": len(one.inputs["parameter"])})
            failed = len(self.ledger.failures)
            where = f"{type(self.optimizer).__name__}.step"
            self.ledger.hold(ADAMW, case, after, where, "parameters or moments after the step are not those of AdamW's formula")
            for index in range(failed, len(self.ledger.failures)):
                self.ledger.name(index, f"{where} at {self._element(one.parameters, self.ledger.failures[index].comparison)}")

    def _element(self, entries: list[tuple[str, Tensor]], comparison: Comparison) -> str:
        """The parameter that the worst element belongs to."""
        left, each = comparison.index[0] if comparison.index else 0, _each(entries)
        for name, parameter in entries:
            count = len(sample(parameter.detach().reshape(-1), each))
            if left < count:
                return name
            left -= count
        return "a parameter"


def _each(entries: list[tuple[str, Tensor]]) -> int:
    return max(1, ELEMENTS // len(entries))


def _gathered(tensors: Iterable[Tensor], each: int) -> Array:
    with torch.no_grad():
        parts = [sample(tensor.detach().reshape(-1), each).float() for tensor in tensors]
        return host(torch.cat([part.to(parts[0].device) for part in parts]))


def _scalars(group: Mapping[str, Any], step: int) -> dict[str, Any]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    rates = {"learning_rate": float(group["lr"]), "eps": float(group["eps"]), "weight_decay": float(group["weight_decay"])}
    return {"step": step, **rates, "beta1": beta1, "beta2": beta2}


class FrozenWatch:
    """Sums of the bits of every tensor that training must not move, taken when it is made.

    These are the parameters that require no gradient then, the base layers of adapters in any case, and those of the patterns `frozen`.
    """

    def __init__(self, model: torch.nn.Module, frozen: Iterable[str], ledger: Ledger) -> None:
        patterns, self.ledger = [*frozen, "*.base_layer.*"], ledger
        named = list(model.named_parameters())
        for pattern in patterns[:-1]:
            if not any(fnmatchcase(name, pattern) for name, _ in named):
                raise ValueError(f"frozen: no parameter is named like {pattern!r}; the first is {named[0][0]!r}")
        self.tensors = {
            name: value for name, value in named if not value.requires_grad or any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not self.tensors:
            ledger.skip(FROZEN, "nothing is frozen: every parameter requires a gradient")
        self.sums = _bits(self.tensors)

    def judge(self) -> None:
        """A failure for the first tensor whose bits have changed."""
        now = _bits(self.tensors)
        changed = [name for name in self.tensors if now[name] != self.sums[name]]
        if changed:
            comparison = broken(
                "sum of the bits", f"{len(changed)} of {len(now)} frozen tensors have changed", self.sums[changed[0]], now[changed[0]]
            )
            self.ledger.note(FROZEN, changed[0], comparison, "a weight that is to stay was moved")
            self.sums = now
        elif now:
            self.ledger.note(FROZEN, "the frozen tensors", Comparison("bits", True, 0.0, "exact"))


def _bits(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    with torch.no_grad():
        sums = [value.detach().contiguous().view(WHOLE[value.element_size()]).sum(dtype=torch.int64) for value in tensors.values()]
    return dict(zip(tensors, (torch.stack([each.cpu() for each in sums]).tolist() if sums else []), strict=True))


def judge_flow(model: torch.nn.Module, ledger: Ledger) -> None:
    """Both factors of every adapter receive a gradient; A only once its B is not zero."""
    factors = {name: value for name, value in model.named_parameters() if LORA.search(name)}
    if not factors:
        ledger.skip(FLOW, "the model has no parameters lora_A and lora_B")
        return
    with torch.no_grad():
        gradients = {name: 0.0 if value.grad is None else float(value.grad.abs().max()) for name, value in factors.items()}
        zero = {name for name, value in factors.items() if "lora_B" in name and not value.any()}
    bad = [(name, why) for name in factors if (why := _without(name, factors[name], gradients[name], zero)) is not None]
    if bad:
        name, why = bad[0]
        ledger.note(
            FLOW, name, broken("gradient", f"{why}, and so of {len(bad)} of {len(factors)} factors"), "the adapter does not learn there"
        )
    else:
        ledger.note(FLOW, "the adapters", Comparison("gradient", True, 0.0, "flow"))


def _without(name: str, value: Tensor, largest: float, zero: set[str]) -> str | None:
    """What is wrong with a factor's gradient; None where nothing is. With B = 0 that of A is exactly zero (Hu et al. 2021, §4.1)."""
    expected = name.replace("lora_A", "lora_B") not in zero or "lora_B" in name
    if not value.requires_grad:
        return "does not require a gradient"
    if expected and not largest:
        return "is missing" if value.grad is None else "is zero in every element"
    return f"is {largest:.3g} where B is zero, and A's must be zero" if not expected and largest else None
