"""Checksums of tensors, so that an adapter is read with the bytes that were saved, on the base that it was trained on."""

import hashlib
from collections.abc import Mapping

from torch import Tensor, uint8

from blackswan.impl.tensors import LazyTensors, Shapes, Tensors, shapes_of

Checksums = Mapping[str, str]
DIGITS = 16


def checksum(tensor: Tensor) -> str:
    """The first hexadecimal digits of SHA-256 over dtype, shape and bytes."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(uint8).numpy()
    state = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    state.update(content.data)
    return state.hexdigest()[:DIGITS]


def require(tensors: Tensors, expected: Checksums, what: str) -> None:
    """ValueError that begins with `what` and names the first tensor that differs, or that has no checksum."""
    for name, tensor in tensors.items():
        if expected.get(name) != checksum(tensor):
            raise ValueError(f"{what}: tensor {name!r} is not what was saved: the file is damaged or was edited; restore it from a copy")


class Checked(LazyTensors):
    """Tensors whose checksums are taken as they are read, and held to those that are expected; `found` has those read so far.

    A ValueError names the tensor that is another one than expected; `adapter` is whose expectation it is.
    """

    def __init__(self, tensors: Tensors, expected: Checksums | None = None, source: object = "", adapter: object = "") -> None:
        self._tensors, self._expected, self._source, self._adapter = tensors, expected or {}, source, adapter
        self.found: dict[str, str] = {}

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor; reads none."""
        return shapes_of(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, once its checksum is taken and compared."""
        tensor = self._tensors[name]
        self.found[name] = checksum(tensor)
        if self._expected.get(name, self.found[name]) != self.found[name]:
            raise ValueError(
                f"{self._source}: tensor {name!r} is not the one that {self._adapter} was trained on; use the adapter's own base"
            )
        return tensor
