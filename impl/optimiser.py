"""AdamW over the trainable parameters as one flat vector, in the fixed order of the parameters.

Its step is the operation `adamw_step` rather than torch.optim.AdamW, so that it is recorded, replaced and attacked like every other
operation; and one vector takes a handful of kernels where a list of small tensors takes hundreds.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from blackswan.impl.dispatch import call

GROUPS = ("trainable", "exp_avg", "exp_avg_sq")


class AdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019), betas 0.9 and 0.999, eps 1e-8; moments in the parameters' float32 or float64."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], weight_decay: float) -> None:
        self.parameters = dict(parameters)
        require_not_negative("weight_decay", weight_decay)
        self.weight_decay = weight_decay
        self.steps = 0
        self._sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.exp_avg = torch.zeros_like(self.flat())
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self._rows, self._elements = _row_indices(self._sizes, self.exp_avg.device)

    def flat(self) -> Tensor:
        """A copy of the parameters as one vector."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters.values()])

    def flat_gradient(self) -> Tensor:
        """A copy of the gradients as one vector. Raises a RuntimeError that names a parameter without one: it would never move."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"{name} has no gradient: the loss does not depend on it")
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters.values() if parameter.grad is not None])

    def zero_gradients(self) -> None:
        """Forgets the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector under the parameters' names and shapes. Raises a ValueError for a vector of another length."""
        if vector.shape != (sum(self._sizes),):
            raise ValueError(f"a flat vector of shape {list(vector.shape)} for {sum(self._sizes)} trainable parameters")
        parts = torch.split(vector, self._sizes)
        return {name: part.view(parameter.shape) for (name, parameter), part in zip(self.parameters.items(), parts, strict=True)}

    @torch.no_grad()
    def clip(self, gradient: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
        """A flat gradient clipped by its global norm, and the norm before. Raises a FloatingPointError where that is not finite."""
        rows = torch.cat([gradient, gradient.new_zeros(1)])[self._rows]
        clipped, norm = call("clip", "clip_by_global_norm", gradients=rows, max_norm=max_norm)
        return clipped.flatten()[self._elements], norm

    @torch.no_grad()
    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """One step with a flat gradient; every parameter and both moments move, or none."""
        self.split(gradient)
        parameter, self.exp_avg, self.exp_avg_sq = call(
            "adamw",
            "adamw_step",
            parameter=self.flat(),
            gradient=gradient,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            step=self.steps + 1,
            learning_rate=learning_rate,
            weight_decay=self.weight_decay,
        )
        self.steps += 1
        for name, value in self.split(parameter).items():
            self.parameters[name].copy_(value)

    def state(self) -> dict[str, Tensor]:
        """Copies of the parameters and both moments by name, `trainable/…`, `exp_avg/…`, `exp_avg_sq/…`, and `step` [] (int64)."""
        vectors = zip(GROUPS, (self.flat(), self.exp_avg.clone(), self.exp_avg_sq.clone()), strict=True)
        parts = {f"{group}/{name}": part.clone() for group, vector in vectors for name, part in self.split(vector).items()}
        return parts | {"step": torch.tensor(self.steps, device="cpu")}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts back what `state` gave. Raises a ValueError that names the first tensor that does not fit; nothing has changed then."""
        self._require_state(state)
        device = self.exp_avg.device
        groups = [{name: state[f"{group}/{name}"].to(device) for name in self.parameters} for group in GROUPS]
        for name, parameter in self.parameters.items():
            parameter.copy_(groups[0][name])
        self.exp_avg, self.exp_avg_sq = (torch.cat([part.flatten() for part in group.values()]) for group in groups[1:])
        self.steps = int(state["step"])
        self.zero_gradients()

    def _require_state(self, state: Mapping[str, Tensor]) -> None:
        expected = {f"{group}/{name}": parameter for group in GROUPS for name, parameter in self.parameters.items()}
        wrong = sorted(state.keys() ^ (expected.keys() | {"step"}))
        if wrong:
            raise ValueError(
                f"optimiser state: {wrong[0]!r} is {'unexpected' if wrong[0] in state else 'missing'} ({len(wrong)} such names)"
            )
        for name, parameter in expected.items():
            given = state[name]
            if given.shape != parameter.shape or given.dtype != parameter.dtype:
                raise ValueError(
                    f"optimiser state: {name} is {given.dtype} {list(given.shape)}, expected {parameter.dtype} {list(parameter.shape)}"
                )
        step = state["step"]
        if step.shape != () or step.is_floating_point() or int(step) < 0:
            raise ValueError(f"optimiser state: step is {step.tolist()}: expected a count of steps")


def _row_indices(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where a matrix of one row a tensor reads the flat vector and the zero after its end; and where the vector reads the matrix."""
    column = torch.arange(max(sizes), device="cpu")
    length, total = torch.tensor(sizes, device="cpu"), sum(sizes)
    start = length.cumsum(0) - length
    real = column < length[:, None]
    rows = torch.where(real, start[:, None] + column, total)
    return rows.to(device), real.flatten().nonzero().flatten().to(device)


def require_not_negative(name: str, value: float) -> None:
    """Raises a ValueError for a learning rate or a weight decay that is not a finite number, 0 or above."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}: expected a finite number, 0 or above")


def require_a_rate(rates: Sequence[float]) -> None:
    """Raises a ValueError where no step of a run would move anything: a warm-up begins at 0, and a short run may end there."""
    if not any(rates):
        steps = "one step" if len(rates) == 1 else f"{len(rates)} steps"
        raise ValueError(
            f"the run has {steps}, in the warm-up's rate of 0: it would learn nothing; expected more steps (epochs, samples, a smaller "
            "effective batch), or warmup_fraction 0"
        )
