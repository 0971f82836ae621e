"""What a subject takes of a device, and fresh classifiers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.reference.table import Array


@dataclass(frozen=True)
class Card:
    """Bytes of a GPU: in all, free, and allocated by this process of what is not free."""

    total: int
    free: int
    own: int = 0


class Ledger(Protocol):
    """A session: the reservations of device memory on a host, kept in a folder."""

    def acquire(self, card: int, count: int) -> int:
        """Reserves bytes of that card for this process; the number of the reservation."""

    def update(self, reservation: int, count: int) -> None:
        """Another number of bytes."""

    def release(self, reservation: int) -> None:
        """Gives them back."""

    def reserved(self) -> list[int]:
        """The bytes that living processes have reserved of each card."""

    def run(self, card: int, count: int, block: Callable[[], object]) -> None:
        """Calls `block`, which needs so many bytes of the card, as a run is started."""

    def restart(self) -> None:
        """As after a restart of the host: all entries are those of earlier processes that had the same ids."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of each part of a training step, of all at the peak, and of what stays after a step."""

    parts: dict[str, int]
    total: int
    resident: int


@dataclass(frozen=True)
class Usage:
    """Bytes at the peak of loading and training and after it, without libraries' workspaces, and frozen tensors that require a gradient
    or have one."""

    peak: int
    resident: int
    thawed: int


@dataclass(frozen=True)
class Growth:
    """The steps made, and after them and not before: bytes live; bytes and segments that the allocator holds, given out or not."""

    made: int
    live: int
    reserved: int
    segments: int


@dataclass(frozen=True)
class Quantised:
    """Bytes that the host's allocator gave out at the peak of loading, those that stay, and the absmax of each projection in NF4."""

    peak: int
    resident: int
    absmax: dict[str, Array]


class Memory(Protocol):
    """Memory of devices. Lacks where the bytes of a kind of device are not known."""

    def ledger(self, folder: Path, cards: Sequence[Card]) -> Ledger:
        """The ledger in a folder, on a host with those cards."""

    def require_kernels(self) -> None:
        """Lacks where the kernels by which a GPU's memory is estimated are not installed."""

    def estimate(self, work: Workload, kind: str | None = None) -> Estimate:
        """What a step takes on a device of that kind, which need not be here; None is the subject's own."""

    def measure(self, work: Workload, steps: int = 3) -> Usage:
        """What the device's allocator gives out over loading and steps: the first may capture a graph, the next have all state."""

    def saved(self, work: Workload) -> int:
        """Bytes that automatic differentiation saves in a forward pass, without the model's own."""

    def grown(self, work: Workload, lengths: Sequence[int], warm_up: int, steps: int) -> Growth:
        """What steps leave behind after others that warm up, on batches of those lengths in turn."""

    def load_nf4(self, folder: Path) -> Quantised:
        """A checkpoint loaded into a classifier with NF4."""


@dataclass(frozen=True)
class FreshClassifier:
    """Trainable tensors by name, the logits of some texts, and those of the same decoder and head without an update."""

    trainable: dict[str, Array]
    logits: Array
    plain: Array


class Classifiers(Protocol):
    """Classifiers as a run starts from them."""

    def fresh(self, model: Path | Mapping[str, Any], settings: Mapping[str, Any], texts: Sequence[str]) -> FreshClassifier:
        """On a checkpoint, or on random weights of an architecture, with a run's settings."""
