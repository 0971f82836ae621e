"""The workers of a data-parallel run: how they find each other, what each takes of a batch, and sums over all of them.

The ranks of a group call the same methods in the same order.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from blackswan.impl.device import parse_device, resolve_device

TIMEOUT_SECONDS = 600.0
"""How long a rank waits for the others, by default: longer than loading or validating takes, so that only a stuck worker meets it."""

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_CHUNK = 1 << 22
S = TypeVar("S", bound="Sequence[Any] | npt.NDArray[Any]")


class WorkerLost(ConnectionError):  # noqa: N818  a state of the run, not a defect of the program
    """Another worker died or does not answer: the run stops and can be resumed from its last state."""


class Group(Protocol):
    """Ranks 0 … size − 1 that work on the same steps."""

    @property
    def rank(self) -> int:
        """This worker's number; rank 0 writes the files."""

    @property
    def size(self) -> int:
        """The number of workers."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Tensors of one shape and dtype on all ranks → [size, *shape], in the order of the ranks, on each."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, added in their order: the same bits on each rank and in each run."""

    def gather_text(self, text: str) -> list[str]:
        """The text of each rank, in their order."""


class Alone:
    """The group of one worker. It does nothing."""

    rank, size = 0, 1

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensor as the only row."""
        return tensor[None]

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def gather_text(self, text: str) -> list[str]:
        """The text as the only one."""
        return [text]


ALONE: Group = Alone()


class DistributedGroup:
    """The default process group of torch.distributed. Tensors come back on the device that they came from.

    Raises WorkerLost where another worker is gone or silent for longer than the group's timeout.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self._device = dist.get_rank(), dist.get_world_size(), device

    def gather(self, tensor: Tensor) -> Tensor:
        """As in Group."""
        given = tensor.detach().to(self._device).flatten()
        rows = given.new_empty((self.size, len(given)))
        with self._reported("gather"):
            dist.all_gather(list(rows.unbind()), given)
        return rows.view(self.size, *tensor.shape).to(tensor.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """As in Group. An all-reduce leaves the order of the terms to the backend, so the parts are gathered and added here."""
        parts = [_added(self.gather(part)) for part in torch.split(tensor.detach().flatten(), _CHUNK)]
        return torch.cat(parts).view(tensor.shape)

    def gather_text(self, text: str) -> list[str]:
        """As in Group."""
        own = torch.tensor(list(text.encode(errors="backslashreplace")), dtype=torch.uint8, device="cpu")
        lengths = self.gather(torch.tensor(len(own), device="cpu")).tolist()
        padded = torch.cat([own, own.new_zeros(max(lengths) - len(own))])
        return [bytes(row[:length].tolist()).decode() for row, length in zip(self.gather(padded), lengths, strict=True)]

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises for a peer that closed its connection, and for a timeout
            raise WorkerLost(f"rank {self.rank} of {self.size} lost another worker during a {what} ({_cause(error)})") from error


def _added(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _cause(error: Exception) -> str:
    """The first sentence of what torch says, without the place in its own source."""
    return re.sub(r"^\[/\S+\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]


def shard(indices: S, rank: int, size: int) -> S:
    """What the rank takes of a batch: consecutive, complete and disjoint over the ranks; lengths differ by at most one.

    Raises a ValueError for a rank that the group does not have.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} workers: expected a rank from 0 to {size - 1}")
    return indices[len(indices) * rank // size : len(indices) * (rank + 1) // size]  # type: ignore[return-value]  # a slice is of its kind


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this worker again after one of the group had died: the run has to go on from its last state."""
    return environment.get(_ATTEMPT, "0") != "0"


@contextmanager
def joined(
    device: str = "cpu", *, timeout: float = TIMEOUT_SECONDS, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[Group, torch.device]]:
    """The group that torchrun's environment describes, and this worker's device: `ALONE` where there is no such environment.

    `cuda` and `auto` give each worker the GPU of its LOCAL_RANK and NCCL, `cpu` gives gloo. `timeout` in seconds. Leaves the group at the
    end. Raises a ValueError for an environment that is incomplete or makes no sense and for one GPU named to several workers,
    DeviceUnavailable for a GPU that is not there, WorkerLost where the others do not come.
    """
    rank, size, local_rank = _places(environment)
    own = _own_device(device, local_rank, size)
    if size == 1:
        yield ALONE, own
        return
    address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    meeting = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    with connected(rank, size, own, meeting, timeout=timeout, attempt=environment.get(_ATTEMPT, "0")) as group:
        yield group, own


@contextmanager
def connected(
    rank: int, size: int, device: torch.device, meeting: str, *, timeout: float = TIMEOUT_SECONDS, attempt: str = "0"
) -> Iterator[Group]:
    """Joins a process group, with NCCL for a CUDA device and gloo otherwise, and leaves it at the end.

    They meet at `tcp://host:port` or `file://path`, a file that does not exist yet. Workers of one `attempt` find each other: torchrun
    keeps the store over restarts, and with it the addresses of workers that are dead.
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    patience = timedelta(seconds=timeout)
    try:
        store, _, _ = next(rendezvous(meeting, rank, size, timeout=patience))
        store.set_timeout(patience)
        own = PrefixStore(f"attempt {attempt}", store)
        backend, device_id = ("nccl", device) if cuda else ("gloo", None)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=patience, device_id=device_id)
    except (RuntimeError, OSError) as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        raise WorkerLost(f"rank {rank} of {size} found no group at {meeting}: {_cause(error)}") from error
    try:
        yield DistributedGroup(device)
    finally:
        dist.destroy_process_group()


def _places(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK; 0, 1, 0 where none of them is set."""
    given = [name for name in _ENVIRONMENT[:3] if name in environment]
    if not given:
        return 0, 1, 0
    missing = [name for name in _ENVIRONMENT if name not in environment]
    if missing:
        raise ValueError(f"the environment has {', '.join(given)}, but not {', '.join(missing)}: start the workers with torchrun")
    rank, size, local_rank = (_count(name, environment[name]) for name in _ENVIRONMENT[:3])
    if rank >= size or local_rank > rank:
        raise ValueError(f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}: expected LOCAL_RANK ≤ RANK < WORLD_SIZE")
    return rank, size, local_rank


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"the environment has {name}={text!r}: expected a whole number; start the workers with torchrun")
    return int(text)


def _own_device(name: str, local_rank: int, size: int) -> torch.device:
    kind, index = parse_device(name)
    if size == 1 or kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return resolve_device(name)
    if kind not in ("auto", "cuda", "hip"):
        raise ValueError(f"device {name!r}: several workers exchange gradients on cpu or cuda only; use one of these, or one worker")
    if index is not None:
        raise ValueError(f"device {name!r} names one GPU for {size} workers: use cuda, which gives each worker the GPU of its LOCAL_RANK")
    return resolve_device(f"cuda:{local_rank}")
