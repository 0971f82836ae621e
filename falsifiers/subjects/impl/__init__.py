"""The doors of `impl`: each module answers what one subject matter's claims ask, by calling `impl` as its users do."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blackswan.falsifiers.subjects.doors import Lacks

if TYPE_CHECKING:
    import torch

DOORS = {
    "classifiers": "Classifiers",
    "corpora": "Corpora",
    "devices": "Devices",
    "files": "Files",
    "memory": "Memory",
    "models": "Models",
    "pretrainer": "Pretrainer",
    "trainer": "Trainer",
}
"""Name of a door, which is its module's too → its class, made with the device and the path of the computation."""


def open_door(name: str, device: "torch.device", path: str | None) -> Any:
    """The door of that name. Lacks where there is none."""
    if name not in DOORS:
        raise Lacks(f"impl has no {name}")
    return getattr(import_module(f"{__name__}.{name}"), DOORS[name])(device, path)
