"""Where a subject computes, and trainers that are on a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from blackswan.reference.table import Array


@dataclass(frozen=True)
class Workload:
    """A classifier on tied random weights with alpha twice the rank, and a batch [batch, seq] of its training; no label is the last class.

    `micro` samples are computed at a time (0: all), `accumulation` such batches make a step; `engine` is torch, by automatic
    differentiation, or fused, by hand-written layers.
    """

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    classes: int
    rank: int
    targets: str
    nf4: bool
    dtype: str
    batch: int
    seq: int
    seed: int = 0
    micro: int = 0
    accumulation: int = 1
    engine: str = "torch"
    theta: float = 1e4


@dataclass(frozen=True)
class Chosen:
    """The kind of a device by its torch name, its index, and how many warnings there were."""

    kind: str
    index: int
    warnings: int


@dataclass(frozen=True)
class Plant:
    """A value that is not finite: the last number of the parameter `name`, or (`where` is output or gradient) the first number that the
    `nth` of the `calls` that a forward pass makes of the operation `name` gives out, or passes back to its first input with a gradient."""

    where: str
    name: str
    value: float
    nth: int = 0
    calls: int = 1


class PlacedTrainer(Protocol):
    """A session: a trainer whose tensors are on the device, with one batch."""

    def content(self) -> dict[str, bytes]:
        """What each parameter and buffer and the optimiser's moments (`optimiser.exp_avg`, `optimiser.exp_avg_sq`) hold, by name."""

    def reported(self) -> dict[str, bytes]:
        """The trained parameters as the trainer's state reports them, which checkpoints are made of."""

    def gradients(self) -> list[str]:
        """The parameters that have a gradient."""

    def move(self, name: str) -> None:
        """Puts that tensor of `content` on another device."""

    def require_resident(self) -> None:
        """The subject's own proof that all is on the device; raises where a tensor is not."""

    def plant(self, plant: Plant) -> None:
        """Spoils the parameter, or every forward pass from here on."""

    def step(self) -> None:
        """A training step."""

    def origin(self, part: int) -> str | None:
        """Where a value that is not finite comes from, in words; parameters are searched `part` numbers at a time."""


class Devices(Protocol):
    """Where the subject computes."""

    def resolve(self, name: str) -> str:
        """The device of a name in the grammar cpu | cuda | cuda:N | auto."""

    def choose(self, name: str, present: Mapping[str, int]) -> Chosen:
        """The device that a name gives on a host with so many devices of each kind."""

    def trainer(self, work: Workload, weights: Mapping[str, Array]) -> PlacedTrainer:
        """A trainer that starts from those float32 weights."""
