"""AdamW over every parameter of a decoder, tensor by tensor: a model that is trained whole is too large for vectors of all of it twice.

Weight decay reaches matrices (embedding and head among them), not the weights of norms and not biases, as is usual for language models
(Brown et al. 2020, appendix B, and the public training programs after it): decay would pull a norm's gain to 0, not to 1.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from blackswan.impl.decoder import Decoder, parameter_shapes
from blackswan.impl.dispatch import call
from blackswan.impl.optimiser import require_not_negative

GROUPS = ("trainable", "exp_avg", "exp_avg_sq")
MOMENTS = ("exp_avg/", "exp_avg_sq/")


class DecoderAdamW:
    """Betas 0.9 and 0.999, eps 1e-8; moments in the parameters' dtype. A tied head is the embedding: one parameter, moved once.

    It makes every parameter trainable, in memory of its own: what the decoder was made of stays as it is. Raises a ValueError for a decoder
    that cannot be trained whole: NF4 weights, or parameters in half precision, in which a step of AdamW is less than a rounding.
    """

    def __init__(self, decoder: Decoder, weight_decay: float) -> None:
        require_not_negative("weight_decay", weight_decay)
        self.parameters = dict(decoder.named_parameters())
        frozen = sorted(parameter_shapes(decoder.config).keys() - self.parameters.keys())
        if frozen:
            raise ValueError(f"{frozen[0]} is no parameter (NF4?): pre-training moves every weight, load the decoder without NF4")
        for name, parameter in self.parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{name} is {parameter.dtype}: a step of AdamW is lost in its rounding; load the decoder in float32")
        for parameter in self.parameters.values():
            parameter.data = parameter.data.clone()
        decoder.requires_grad_(True)
        self.weight_decay = weight_decay
        self.steps = 0
        self.exp_avg = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in self.parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(moment) for name, moment in self.exp_avg.items()}

    @property
    def device(self) -> torch.device:
        """Where the parameters and moments are."""
        return next(iter(self.parameters.values())).device

    def decay_of(self, name: str) -> float:
        """The weight decay of a parameter: that of the run for a matrix, none for a vector."""
        return self.weight_decay if self.parameters[name].ndim > 1 else 0.0

    def zero_gradients(self) -> None:
        """Forgets the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float) -> tuple[dict[str, Tensor], Tensor]:
        """The gradients by name, clipped by their global norm, and the norm before.

        Raises a RuntimeError that names a parameter without a gradient, and a FloatingPointError that names the first one whose gradient
        is not finite.
        """
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"{name} has no gradient: the loss does not depend on it")
            gradients[name] = parameter.grad
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
        try:
            clipped, norm = call("clip", "clip_by_global_norm", gradients=flat[None], max_norm=max_norm)
        except FloatingPointError as error:
            raise FloatingPointError(_non_finite(gradients) or str(error)) from None
        parts = torch.split(clipped[0], [gradient.numel() for gradient in gradients.values()])
        return {name: part.view_as(self.parameters[name]) for name, part in zip(gradients, parts, strict=True)}, norm

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """One step; the gradients are those of every parameter."""
        for name, parameter in self.parameters.items():
            moved = call(
                f"adamw.{name}",
                "adamw_step",
                parameter=parameter.detach().flatten(),
                gradient=gradients[name].flatten(),
                exp_avg=self.exp_avg[name].flatten(),
                exp_avg_sq=self.exp_avg_sq[name].flatten(),
                step=self.steps + 1,
                learning_rate=learning_rate,
                weight_decay=self.decay_of(name),
            )
            for held, value in zip((parameter, self.exp_avg[name], self.exp_avg_sq[name]), moved, strict=True):
                held.copy_(value.view_as(held))
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """The parameters and both moments, `trainable/…`, `exp_avg/…`, `exp_avg_sq/…`; the tensors themselves, not copies."""
        values = ({name: parameter.detach() for name, parameter in self.parameters.items()}, self.exp_avg, self.exp_avg_sq)
        return {f"{group}/{name}": value for group, held in zip(GROUPS, values, strict=True) for name, value in held.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Puts back what `state` gave. Raises a ValueError that names the first tensor that does not fit; nothing has changed then."""
        held = self.state()
        wrong = sorted(tensors.keys() ^ held.keys())
        if wrong:
            raise ValueError(f"{wrong[0]!r} is {'unexpected' if wrong[0] in tensors else 'missing'} ({len(wrong)} such tensors)")
        for name, value in held.items():
            given = tensors[name]
            if given.shape != value.shape or given.dtype != value.dtype:
                raise ValueError(f"{name} is {given.dtype} {list(given.shape)}, expected {value.dtype} {list(value.shape)}")
        for name, value in held.items():
            value.copy_(tensors[name])
        self.steps = steps
        self.zero_gradients()


def state_hash(state: Mapping[str, Tensor], steps: int, of: tuple[str, ...] = MOMENTS) -> str:
    """SHA-256 of an optimiser's state: the number of steps as 8 bytes, then each moment (`exp_avg/…`, `exp_avg_sq/…`) in the order of the
    names: the name, a zero byte, the values; all little-endian. Two states have one hash where steps and moments are equal bit for bit.

    `of` are the beginnings of the names of other tensors that take the moments' place.
    """
    digest = hashlib.sha256(steps.to_bytes(8, "little"))
    for name in sorted(name for name in state if name.startswith(of)):
        values = state[name].cpu().contiguous().numpy()
        digest.update(name.encode() + b"\0")
        digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()


def _non_finite(gradients: Mapping[str, Tensor]) -> str | None:
    for name, gradient in gradients.items():
        bad = int((~torch.isfinite(gradient)).sum())
        if bad:
            return f"the gradient of {name} is not finite in {bad} of {gradient.numel()} elements"
    return None
