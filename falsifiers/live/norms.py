"""RMSNorm in a live model: a sample of rows of each module, held to OP-RMSNORM by the epsilon that the model is configured with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.live.recorded import DTYPES, Ledger, case_of, claims, host, sample
from blackswan.falsifiers.numeric.comparison import compare_exactly
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF

CLAIM = "OP-RMSNORM"
KNOWN = ("RMSNorm", "LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "LigerRMSNorm", "Phi3RMSNorm", "T5LayerNorm")
"""Classes of norms that compute x / sqrt(mean(x²) + ε) · w. Others, such as Gemma's with 1 + w, are stated as not checked."""
ROWS = 4
EPSILONS = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True)
class Norm:
    """A norm module of the model and the epsilon that it should have, where the model's configuration says."""

    path: str
    module: torch.nn.Module
    configured: float | None


def norms_of(model: torch.nn.Module, ledger: Ledger) -> list[Norm]:
    """The norms that can be checked; the classes of the others are noted."""
    configured = getattr(getattr(model, "config", None), "rms_norm_eps", None)
    found = []
    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, torch.nn.RMSNorm) or (name in KNOWN and not getattr(module, "offset", 0)):
            found.append(Norm(path, module, configured))
        elif name.endswith("Norm") or isinstance(module, torch.nn.LayerNorm):
            ledger.skip(CLAIM, f"norms of the class {name} ({path} is one) are not known to be RMSNorm")
    if not found:
        ledger.skip(CLAIM, "the model has no RMSNorm that is known")
    return found


class NormWatch:
    """Records a sample of what goes into the norms and comes out, once a module, until it is closed."""

    def __init__(self, norms: list[Norm], ledger: Ledger) -> None:
        self.norms, self.ledger, self.seen = norms, ledger, dict[str, tuple[Tensor, Tensor]]()
        self._handles = [norm.module.register_forward_hook(self._recorder(norm.path), with_kwargs=True) for norm in norms]

    def _recorder(self, path: str) -> Any:
        def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if path in self.seen or not module.training or not isinstance(out, Tensor):
                return
            with self.ledger.timed(), torch.no_grad():
                rows = (sample(each.detach().reshape(-1, each.shape[-1]), ROWS) for each in (x, out))
                self.seen[path] = tuple(each.clone() for each in rows)  # type: ignore[assignment]  # two of them

        return record

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def judge(self) -> None:
        """Holds every module's rows to the claim."""
        for norm in self.norms:
            if norm.path in self.seen:
                _judged(norm, *self.seen[norm.path], self.ledger)
        silent = [norm.path for norm in self.norms if norm.path not in self.seen]
        if silent:
            self.ledger.skip(
                CLAIM, f"{len(silent)} of {len(self.norms)} norms, as {silent[0]}, were not called in training mode at some checked step"
            )


def _judged(norm: Norm, x: Tensor, out: Tensor, ledger: Ledger) -> None:
    own, weight = _epsilon(norm.module, x.dtype), getattr(norm.module, "weight", None)
    eps, culprit = own if norm.configured is None else norm.configured, f"{norm.path} ({type(norm.module).__name__})"
    if own != eps:
        ledger.note(
            CLAIM, culprit, compare_exactly("eps", np.asarray(eps), np.asarray(own)), "its epsilon is not that of config.rms_norm_eps"
        )
        return
    weight = torch.ones_like(x[0]) if weight is None else weight.detach()
    coarsest = max((DTYPES.get(each.dtype, str(each.dtype)) for each in (x, out, weight)), key=lambda name: UNIT_ROUNDOFF.get(name, 1.0))
    inputs = {"x": host(x), "weight": host(weight)}
    case = case_of("rms_norm", coarsest, inputs, {"eps": eps}, {"rows": x.shape[0], "hidden": x.shape[1]})
    known = coarsest in claims()[CLAIM].domain.dtype
    ledger.hold(CLAIM, case, {"y": host(out, coarsest if known else None)}, culprit, f"it is not x / sqrt(mean(x²) + {eps:g}) · weight")


def _epsilon(module: torch.nn.Module, dtype: torch.dtype) -> float:
    values: Iterator[Any] = (getattr(module, name) for name in EPSILONS if hasattr(module, name))
    found = next(values, None)
    return float(torch.finfo(dtype).eps if found is None else found)
