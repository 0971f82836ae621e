"""Devices, as `impl` finds them by their names."""

import torch

from blackswan.impl import device as devices


class Devices:
    """See `doors.Devices`."""

    def __init__(self, device: torch.device, path: str | None) -> None:
        del path
        self._device = device

    def resolve(self, name: str) -> str:
        """The device of a name."""
        return str(devices.resolve_device(name))
