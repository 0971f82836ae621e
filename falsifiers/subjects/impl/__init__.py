"""The doors of `impl`: each module answers what one subject matter's claims ask, by calling `impl` as its users do."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blackswan.falsifiers.subjects.protocol import Lacks

if TYPE_CHECKING:
    import torch

DOORS = {
    "classifiers": "Classifiers",
    "commands": "Commands",
    "corpora": "Corpora",
    "devices": "Devices",
    "files": "Files",
    "kernels": "Kernels",
    "memory": "Memory",
    "models": "Models",
    "ownership": "Ownership",
    "pretrainer": "Pretrainer",
    "reservations": "Reservations",
    "trainer": "Trainer",
}
"""Name of a door, which is its module's too → its class."""
WITH_BACKENDS = ("models",)
"""Doors whose class is made with the backend of the computation as well as with the device."""


class Door:
    """A door that answers by tensors on a device."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device


def open_door(name: str, device: "torch.device", backend: str | None) -> Any:
    """The door of that name. Lacks where there is none; a ValueError where a claim names a backend, and the door has no choice of them."""
    if name not in DOORS:
        raise Lacks(f"impl has no {name}")
    made = getattr(import_module(f"{__name__}.{name}"), DOORS[name])
    if name in WITH_BACKENDS:
        return made(device, backend)
    if backend is not None:
        raise ValueError(f"the claim names the backend {backend!r}, but impl's {name} have no choice of backends: leave `backend` out")
    return made(device)
