"""Proof that a model and its optimiser are where a run says they are."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from blackswan.impl.optimiser import AdamW


class NotResident(RuntimeError):  # noqa: N818  a state of the run, named for what was found
    """A tensor of the model or the optimiser is not on the device."""


def require_residency(model: nn.Module, optimiser: AdamW | None, device: torch.device) -> None:
    """Every parameter, buffer, gradient and tensor of the optimiser is on `device`, and on CUDA the process holds memory there.

    Raises NotResident, which names the first tensor that is elsewhere. `cuda` without an index is the current device.
    """
    wanted = _indexed(device)
    tensors = dict(_tensors(model, optimiser))
    astray = [name for name, tensor in tensors.items() if tensor.device != wanted]
    if astray:
        raise NotResident(
            f"{astray[0]} is on {tensors[astray[0]].device}, not on {wanted} ({len(astray)} of {len(tensors)} tensors are elsewhere)"
        )
    if wanted.type == "cuda" and not torch.cuda.memory_allocated(wanted):
        raise NotResident(f"{len(tensors)} tensors say that they are on {wanted}, but this process holds no memory there")


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def _tensors(model: nn.Module, optimiser: AdamW | None) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad
    yield from model.named_buffers()
    if optimiser is not None:
        yield from ((f"optimiser.{name}", value) for name, value in vars(optimiser).items() if isinstance(value, Tensor))
        yield from ((f"optimiser.parameters[{name!r}]", value) for name, value in optimiser.parameters.items())
