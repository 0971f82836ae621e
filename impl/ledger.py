"""Reservations of device memory, shared by the processes of one host.

A JSON file under a lock holds who has reserved how much of which device. A reservation counts whole, whether or not its holder has
allocated yet; memory of programs that reserve nothing shows in what the device reports as free. The entry of a process that is gone is
dropped by whoever looks next. Linux only: a process is told from a later one of the same id by its start time in /proc.
"""

import copyreg
import fcntl
import json
import os
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import torch

from blackswan.impl.folder import naming

FOLDER_VARIABLE = "BLACKSWAN_LEDGER"
"""Names the folder of the ledger. Without it, a folder of the user's own among the temporary ones: name one for all users of a host,
which is not sticky, as /tmp is: there nobody may put a file in the place of another user's."""
FILE, LOCK = "ledger.json", "ledger.lock"


class InsufficientMemory(RuntimeError):  # noqa: N818  a state of the host, not a defect of the program
    """More device memory is needed than there is. `needed`, `available`, `free`, `total` and `reserved` (by others) are bytes."""

    def __init__(self, device: str, needed: int, memory: "DeviceMemory", reserved: int, holders: str) -> None:
        self.needed, self.free, self.total, self.reserved = needed, memory.free, memory.total, reserved
        self.available = max(0, min(memory.free, memory.total - reserved))
        super().__init__(
            f"{device}: {size(needed)} needed, {size(self.available)} available: {size(memory.free)} of {size(memory.total)} are free, "
            f"{size(reserved)} are reserved by others{holders}; take a smaller batch or sequence, NF4, or wait for the others"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """As a pool of processes carries what a worker raises to who asked: the message and the numbers, without making them anew."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]  # typeshed lacks it


@dataclass(frozen=True)
class DeviceMemory:
    """What a device has: bytes free now, in all, and held by this process; `key` is the same in every process of the host."""

    key: str
    free: int
    total: int
    own: int = 0


@dataclass(frozen=True)
class Entry:
    """One reservation in the ledger: who holds it, since when the process runs, and how much of which device."""

    id: str
    pid: int
    started: str
    device: str
    bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """As the device itself reports it. The key is its UUID: `cuda:0` is another card under another CUDA_VISIBLE_DEVICES."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(f"cuda-{torch.cuda.get_device_properties(device).uuid}", free, total, torch.cuda.memory_reserved(device))


def ledger_folder() -> Path:
    """Where the ledger of this host is."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"blackswan-{os.getuid()}"


class Ledger:
    """The reservations in a folder. `memory` says what a device has."""

    def __init__(self, folder: Path | None = None, memory: Callable[[torch.device], DeviceMemory] = device_memory) -> None:
        self.folder, self._memory = (folder or ledger_folder()).absolute(), memory  # a program may leave its folder before it releases

    def acquire(self, device: torch.device, count: int) -> "Reservation":
        """Reserves `count` bytes for this process. Raises InsufficientMemory, and has then changed nothing."""
        _require_count(count)
        with self._locked():
            entries = self._living()
            memory = self._require(device, count, entries)
            entry = Entry(uuid.uuid4().hex, os.getpid(), process_start(os.getpid()) or "", memory.key, count)
            self._write([*entries, entry])
        return Reservation(self, device, entry)

    def update(self, entry: Entry, device: torch.device, count: int) -> Entry:
        """The reservation with another size. Raises InsufficientMemory where it cannot grow so far, and has then changed nothing."""
        _require_count(count)
        with self._locked():
            others = [other for other in self._living() if other.id != entry.id]
            changed = replace(entry, bytes=count)
            if count > entry.bytes:
                memory = self._memory(device)
                # What the holder has already allocated of its reservation is no longer free, and is its own.
                self._require(device, count, others, replace(memory, free=memory.free + min(memory.own, entry.bytes)))
            self._write([*others, changed])
        return changed

    def release(self, entry: Entry) -> None:
        """Takes the reservation out; one that is no longer there is no error."""
        with self._locked():
            self._write([other for other in self._living() if other.id != entry.id])

    def entries(self) -> list[Entry]:
        """The reservations of living processes."""
        with self._locked():
            return self._living()

    def _require(self, device: torch.device, count: int, others: list[Entry], memory: DeviceMemory | None = None) -> DeviceMemory:
        memory = memory or self._memory(device)
        held = [entry for entry in others if entry.device == memory.key]
        reserved = sum(entry.bytes for entry in held)
        if count > min(memory.free, memory.total - reserved):
            holders = ", ".join(f"process {entry.pid}: {size(entry.bytes)}" for entry in held)
            raise InsufficientMemory(str(device), count, memory, reserved, f" ({holders})" if held else "")
        return memory

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / LOCK
        created = not path.exists()
        with path.open("a") as lock:
            if created:
                self._share(lock)
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it with the process
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open too

    def _share(self, file: IO[str]) -> None:
        """Whoever may use the folder may use the file."""
        if os.fstat(file.fileno()).st_uid == os.getuid():
            os.fchmod(file.fileno(), self.folder.stat().st_mode & 0o666)

    def _living(self) -> list[Entry]:
        return [entry for entry in self._read() if process_start(entry.pid) == entry.started]

    def _read(self) -> list[Entry]:
        path = self.folder / FILE
        try:
            return [_entry(value) for value in json.loads(path.read_bytes())]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            warnings.warn(f"{path}: not a ledger ({error}); its reservations are lost, a new one is begun", stacklevel=2)
            return []

    def _write(self, entries: list[Entry]) -> None:
        partial = self.folder / f".{FILE}.{os.getpid()}"
        with naming(self.folder / FILE), partial.open("w") as file:
            self._share(file)
            json.dump([asdict(entry) for entry in entries], file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / FILE)  # a process that is killed leaves the old file or the new one


class Reservation:
    """Memory that this process has reserved; a context manager that releases it."""

    def __init__(self, ledger: Ledger, device: torch.device, entry: Entry) -> None:
        self._ledger, self._device, self._entry = ledger, device, entry

    @property
    def bytes(self) -> int:
        """How much is reserved."""
        return self._entry.bytes

    def update(self, count: int) -> None:
        """Another size. Raises InsufficientMemory where it cannot grow so far; the reservation is then as it was."""
        self._entry = self._ledger.update(self._entry, self._device, count)

    def release(self) -> None:
        """Gives the memory back to the others."""
        self._ledger.release(self._entry)

    def __enter__(self) -> "Reservation":
        """The reservation."""
        return self

    def __exit__(self, *_: object) -> None:
        """Releases it."""
        self.release()


def reserve(device: torch.device, count: int, ledger: Ledger | None = None) -> AbstractContextManager[Reservation | None]:
    """Reserves `count` bytes of a CUDA device for the block; nothing elsewhere. Raises InsufficientMemory before anything is allocated."""
    return nullcontext() if device.type != "cuda" else (ledger or Ledger()).acquire(device, count)


def process_start(pid: int) -> str | None:
    """What tells a living process from every other one of the same id on this host: boot and start time. None where there is none."""
    try:
        # The name, in parentheses, may hold any bytes: the fields are counted from its end (proc(5)).
        values = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        _require_gone(pid)
        return None
    state, start = values[0], values[19]
    return None if state in "ZX" else f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{start}"


def _require_gone(pid: int) -> None:
    """Raises a PermissionError where /proc hides a living process, as it does those of other users where it is mounted with hidepid."""
    try:
        os.kill(pid, 0)
    except PermissionError as error:
        raise PermissionError(error.errno, f"{error.strerror}, though it lives", f"/proc/{pid}") from None
    except (ProcessLookupError, OverflowError):
        return


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def _require_count(count: int) -> None:
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"{count} bytes cannot be reserved: expected an integer, 0 or more")


def _entry(value: object) -> Entry:
    if not isinstance(value, dict) or {field.name: field.type for field in fields(Entry)} != {
        name: type(item) for name, item in value.items()
    }:
        raise ValueError(f"{str(value)[:80]!r} is not a reservation")
    return Entry(**value)
