"""Wrong ledgers of device memory: one step of `impl` replaced each."""

import fcntl
import json
import multiprocessing
import os
import random
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


@wrong_step("impl.ledger:Ledger._locked")
@contextmanager
def ledger_without_lock(locked: Step, self: Any) -> Iterator[None]:
    """Read and written without the lock."""
    with locked(self):
        pass
    yield


def _asking(changes: Callable[[Any, Any, Any], Mapping[str, Any]]) -> Step:
    """`Ledger._require` on other entries, memory or bytes: `changes` sees the entries, the memory and the bytes."""

    def wrong(require: Step, self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        asked = {"count": count, "others": others, "memory": memory or self._memory(device)}
        return require(self, device, *{**asked, **changes(others, asked["memory"], count)}.values())

    return wrong


wrong_steps(
    "impl.ledger:Ledger._require",
    by=_asking,
    ledger_capacity_hard_coded=(
        "24 GB whatever the card has.",
        lambda _, memory, __: {"memory": replace(memory, free=24 * 2**30, total=24 * 2**30)},
        "S23",
    ),
    ledger_counts_own_only=(
        "Reservations of other processes are not counted.",
        lambda others, *_: {"others": [entry for entry in others if entry.pid == os.getpid()]},
    ),
    ledger_ignores_free=(
        "Memory that programs without a reservation take is not counted.",
        lambda _, memory, __: {"memory": replace(memory, free=memory.total)},
    ),
    ledger_refuses_what_just_fits=("A reservation of all that is left is refused.", lambda _, __, count: {"count": count + 1}),
    ledger_mixes_devices=(
        "A reservation on one card counts against every card.",
        lambda others, memory, _: {"others": [replace(entry, device=memory.key) for entry in others]},
    ),
)


def _growing(update: Step, self: Any, entry: Any, device: Any, count: int, own: int) -> Any:
    """`Ledger.update` where that many bytes of the reservation count as allocated."""
    memory = self._memory(device)
    seen = replace(memory, free=memory.free - min(memory.own, entry.bytes) + own)
    with patch.object(self, "_memory", lambda _: seen):
        return update(self, entry, device, count)


@wrong_step("impl.ledger:Ledger.update")
def ledger_shrinks_where_it_could_grow(update: Step, self: Any, entry: Any, device: Any, count: int) -> Any:
    """A reservation becomes smaller only where so much is free."""
    return update(self, replace(entry, bytes=min(entry.bytes, count - 1)), device, count)


@wrong_step("impl.ledger:Ledger.update")
def ledger_counts_all_allocated_as_free(update: Step, self: Any, entry: Any, device: Any, count: int) -> Any:
    """All that the process holds, also beyond the reservation, counts as free to it when it grows."""
    return _growing(update, self, entry, device, count, self._memory(device).own)


@wrong_step("impl.ledger:Ledger.update")
def ledger_counts_allocated_twice(update: Step, self: Any, entry: Any, device: Any, count: int) -> Any:
    """Bytes that were allocated of a reservation are not free to it when it grows."""
    return _growing(update, self, entry, device, count, 0)


wrong_step(
    "impl.ledger:Ledger._share", name="ledger_of_one_user", doc="The ledger's files belong to their maker alone where the umask says so."
)(lambda *_: None)
wrong_step("impl.ledger:Ledger._living", name="ledger_keeps_the_dead", doc="Entries of ended processes stay.")(lambda _, self: self._read())


@wrong_step("impl.ledger:Ledger._living")
def ledger_by_process_id_only(_: Step, self: Any) -> Any:
    """A later process of the same id inherits the entry."""
    from blackswan.impl.ledger import process_start

    return [entry for entry in self._read() if process_start(entry.pid) is not None]


@wrong_step("impl.ledger:Reservation.update")
def ledger_reservation_keeps_its_first_size(_: Step, self: Any, count: int) -> None:
    """A reservation that has grown or shrunk goes on from the size that it began with."""
    self._ledger.update(self._entry, self._device, count)


wrong_step("impl.ledger:_require_count", name="ledger_of_negative_bytes", doc="Fewer bytes than none can be reserved.")(lambda *_: None)
wrong_step("impl.ledger:Ledger.update", name="ledger_update_forgotten", doc="A new size is not written.")(
    lambda _, _self, entry, _device, count: replace(entry, bytes=count)
)


@wrong_step("impl.ledger:Ledger.update")
def ledger_update_unchecked(_: Step, self: Any, entry: Any, _device: Any, count: int) -> Any:
    """A reservation grows whatever is left."""
    grown = replace(entry, bytes=count)
    with self._locked():
        self._write([*(other for other in self._living() if other.id != entry.id), grown])
    return grown


@wrong_step("impl.ledger:Ledger.release")
def ledger_release_forgotten(*_: Any) -> None:
    """A released reservation stays."""


@wrong_step("impl.ledger:Ledger.release")
def ledger_releases_all_of_a_process(_: Step, self: Any, entry: Any) -> None:
    """One release takes out all of the process."""
    with self._locked():
        self._write([other for other in self._living() if other.pid != entry.pid])


@wrong_step("impl.ledger:reserve")
@contextmanager
def memory_refused_after_allocation(reserve: Step, *given: Any) -> Iterator[None]:
    """The block runs, then the memory is asked for."""
    yield
    with reserve(*given):
        pass


@wrong_step("impl.ledger:Ledger.acquire")
def ledger_numbers_holders_by_their_seed(acquire: Step, *given: Any) -> Any:
    """Reservations are known by random numbers of the process, which are another holder's where both programs were given one seed."""
    with patch("uuid.uuid4", lambda: uuid.UUID(int=random.getrandbits(128))):
        return acquire(*given)


@wrong_step("impl.ledger:Ledger.acquire")
def memory_refused_without_numbers(acquire: Step, *given: Any) -> Any:
    """The refusal says no bytes."""
    try:
        return acquire(*given)
    except RuntimeError as error:
        error.args = ("out of memory",)
        raise


wrong_step("impl.ledger:size", name="small_sizes_by_another_unit", doc="A refusal says GiB and calls them MiB where they are few.")(
    lambda size, count: size(count) if count >= 2**28 else f"{count / 2**30:.1f} MiB"
)


@wrong_step("impl.ledger:InsufficientMemory.__init__")
def memory_of_others_called_available(init: Step, self: Any, device: str, needed: int, memory: Any, reserved: int, holders: str) -> None:
    """The refusal says what is free to be available, also where others have reserved it."""
    init(self, device, needed, memory, reserved, holders)
    said = f"{memory.free / 2**30:.2f} GiB available"
    self.args = (re.sub(r"[\d.]+ GiB available", said, str(self)),)


@wrong_step("impl.ledger:InsufficientMemory.__init__")
def memory_of_other_cards_named(init: Step, self: Any, device: str, needed: int, memory: Any, reserved: int, holders: str) -> None:
    """The refusal names who holds memory of another card too."""
    init(self, device, needed, memory, reserved, holders.replace(")", f", process {os.getpid()}: 1.00 GiB)"))


@wrong_step("impl.ledger:InsufficientMemory.__init__")
def memory_of_a_process_named_once(init: Step, self: Any, device: str, needed: int, memory: Any, reserved: int, holders: str) -> None:
    """Of several reservations of one process the refusal names the last one alone."""
    last = dict(each.split(": ") for each in holders[2:-1].split(", ")) if holders else {}
    init(self, device, needed, memory, reserved, f" ({', '.join(': '.join(each) for each in last.items())})")


wrong_step(
    "impl.ledger:InsufficientMemory.__reduce__",
    name="memory_refused_in_one_process",
    doc="A refusal that a worker sends to another process cannot be made there again.",
)(lambda _, self: RuntimeError.__reduce__(self))


@wrong_step("impl.ledger:Reservation.__exit__")
def ledger_of_failed_blocks_stays(leave: Step, self: Any, kind: Any = None, *given: Any) -> None:
    """A block that fails keeps its reservation."""
    if kind is None:
        leave(self, kind, *given)


@wrong_step("impl.ledger:Reservation.__exit__")
def ledger_of_ended_blocks_stays_in_silence(leave: Step, self: Any, *given: Any) -> None:
    """What a block had reserved stays where the ledger cannot be written at its end, and nobody is told."""
    with suppress(OSError):
        leave(self, *given)


wrong_step(
    "impl.ledger:_require_gone", name="ledger_takes_the_hidden_for_gone", doc="A holder that /proc hides is taken for one that is gone."
)(lambda *_: None)


@wrong_step("impl.ledger:Ledger._write")
def ledger_written_in_place(_: Step, self: Any, entries: Any) -> None:
    """The file is written over, so that a killed process leaves a part of it."""
    path = self.folder / "ledger.json"
    with path.open("w") as file:
        self._share(file)
        json.dump([vars(entry) for entry in entries], file)


@wrong_step("impl.ledger:Ledger._write")
def ledger_written_among_temporary_files(write: Step, self: Any, entries: Any) -> None:
    """The partial file is one among temporary files, which may be on another disk than the ledger's."""
    with tempfile.TemporaryFile():
        write(self, entries)


wrong_steps(
    "impl.ledger:FOLDER_VARIABLE", ledger_folder_of_nobody=("The variable that names the folder is passed over.", lambda _: "LEDGER")
)


@wrong_step("impl.ledger:Ledger._read")
def ledger_damaged_for_ever(_: Step, self: Any) -> Any:
    """A ledger that is damaged stops every run."""
    import json

    from blackswan.impl.ledger import FILE, _entry

    path = self.folder / FILE
    return [_entry(value) for value in json.loads(path.read_bytes())] if path.is_file() else []


@wrong_step("impl.ledger:reserve")
def memory_of_the_first_card_alone(reserve: Step, device: Any, *given: Any) -> Any:
    """Nothing is reserved of another card than the first."""
    return nullcontext() if device.index else reserve(device, *given)


wrong_step(
    "impl.ledger:ledger_folder", name="ledger_folder_of_everybody", doc="Without a name all users have one folder, which the first makes."
)(lambda right: folder.with_name("blackswan") if (folder := right()).name == f"blackswan-{os.getuid()}" else folder)


wrong_step(
    "impl.ledger:ledger_folder",
    name="ledger_folder_of_a_session",
    doc="The folder is that of a session, so that a program which the system starts does not see what others have reserved.",
)(lambda right: Path(os.environ.get("XDG_RUNTIME_DIR", right().parent)) / right().name if right().is_absolute() else right())


def _made(**options: Any) -> Step:
    """A folder that is not there is made with other options."""

    @contextmanager
    def wrong(locked: Step, self: Any) -> Iterator[None]:
        self.folder.mkdir(**{"mode": 0o700, "parents": True, "exist_ok": True, **options})
        with locked(self):
            yield

    return wrong


wrong_steps(
    "impl.ledger:Ledger._locked",
    by=lambda options: _made(**options),
    ledger_folder_beside_others_only=("Of a folder that is not there the one above has to be.", {"parents": False}),
    ledger_folder_for_all_eyes=("A folder that is made is everybody's to read.", {"mode": 0o777}),
)


@wrong_step("impl.ledger:Ledger._locked")
@contextmanager
def ledger_folder_made_once(locked: Step, self: Any) -> Iterator[None]:
    """A folder that is cleaned away after a ledger was first used is not made again, so that nobody can give back what he holds."""
    with patch.object(Path, "mkdir") if vars(self).get("made") else nullcontext():
        self.made = True
        with locked(self):
            yield


@wrong_step("impl.ledger:Ledger._read")
def ledger_of_no_list_for_ever(read: Step, self: Any) -> Any:
    """A ledger that is JSON and no list stops every run."""
    path = self.folder / "ledger.json"
    if path.is_file() and path.read_bytes() in (b"null", b"5"):
        raise TypeError("not iterable")
    return read(self)


@wrong_step("impl.ledger:Ledger._read")
def ledger_kept_by_its_time(read: Step, self: Any) -> Any:
    """The file is read again where its size or its time is another, which it need not be when it has changed."""
    path = self.folder / "ledger.json"
    state = (found.st_size, found.st_mtime_ns) if path.is_file() and (found := path.stat()) else None
    if state is None or vars(self).get("seen") != state:
        self.seen, self.kept = state, read(self)
    return list(self.kept)


@wrong_step("impl.ledger:_entry")
def ledger_of_any_types(entry: Step, value: Any) -> Any:
    """A reservation whose values have other types is taken as it stands."""
    from blackswan.impl.ledger import Entry

    return Entry(**value) if isinstance(value, dict) and value.keys() == Entry.__dataclass_fields__.keys() else entry(value)


wrong_steps(
    "impl.ledger:device_memory",
    ledger_told_of_tensors_alone=(
        "What the allocator holds and no tensor has does not count as the process's own.",
        lambda right, device: replace(right(device), own=torch.cuda.memory_allocated(device)),
    ),
    ledger_names_cards_by_their_place=(
        "A card is known by its number in the process.",
        lambda right, device: replace(right(device), key=str(device)),
    ),
    ledger_told_of_the_first_card=("Every card has the memory of the first.", lambda right, _: right(torch.device("cuda", 0))),
)


def _or_gone(right: Step, pid: int) -> Any:
    try:
        return right(pid)
    except OSError:
        return None


def _or_gone_without_a_boot(right: Step, pid: int) -> Any:
    try:
        return right(pid)
    except FileNotFoundError:
        return None


wrong_steps(
    "impl.ledger:process_start",
    ledger_without_the_boot=(
        "A process before the host's restart is taken for one of the same id that began as long after it.",
        lambda right, pid: (found := right(pid)) and found.rpartition("/")[2],
    ),
    ledger_of_any_boot=(
        "A process is told by its start time alone, which a process of the same id may have had before the host's restart.",
        lambda right, pid: (found := right(pid)) and f"/{found.rpartition('/')[2]}",
    ),
    ledger_of_this_version_alone=(
        "A process is told by its start time and boot in another order: what an earlier version reserved is taken for that of the dead.",
        lambda right, pid: (found := right(pid)) and "/".join(reversed(found.split("/"))),
    ),
    ledger_fails_beside_the_dying=(
        "A process that ends as it is looked at stops every other one.",
        lambda right, pid: right(pid) if Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text() else None,
    ),
    ledger_takes_the_unseen_for_gone=(
        "A holder that cannot be looked at, for want of rights or of open files, is taken for one that is gone.",
        _or_gone,
    ),
    ledger_takes_all_for_gone_without_a_boot=(
        "On a system that does not say its boot every holder is taken for one that is gone.",
        _or_gone_without_a_boot,
    ),
    ledger_reads_names_in_letters=(
        "A process whose name is cut inside a letter stops every other one.",
        lambda right, pid: right(pid) and Path(f"/proc/{pid}/comm").read_bytes().decode() and right(pid),
    ),
)


@wrong_step("impl.ledger:Ledger.release")
def ledger_releases_what_it_finds_alone(release: Step, self: Any, entry: Any) -> None:
    """A reservation that a damaged ledger has lost cannot be given back."""
    if entry.id not in {other.id for other in self.entries()}:
        raise ValueError(f"{entry.id} is not in the ledger")
    release(self, entry)


@wrong_step("impl.ledger:Ledger.update")
def ledger_updates_what_it_finds_alone(update: Step, self: Any, entry: Any, device: Any, count: int) -> Any:
    """A reservation that a damaged ledger has lost is not entered again with its new size."""
    there = entry.id in {other.id for other in self.entries()}
    changed = update(self, entry, device, count)
    if not there:
        self.release(changed)
    return changed


@wrong_step("impl.ledger:Ledger.release")
def ledger_lock_goes_with_the_last(release: Callable[..., Any], self: Any, entry: Any) -> None:
    """Whoever gives the last reservation back removes the lock's file, which others may wait for."""
    from blackswan.impl.ledger import LOCK

    release(self, entry)
    if not self.entries():
        (self.folder / LOCK).unlink(missing_ok=True)


wrong_step("impl.ledger:fcntl.flock", name="ledger_locked_by_its_process", doc="Threads of one process do not wait for each other.")(
    lambda _, file, how: fcntl.lockf(file, how)
)


@wrong_step("impl.ledger:fcntl.flock")
def ledger_stays_locked_by_a_child(lock: Step, file: Any, how: int) -> None:
    """The lock goes with the last process that has its file open, as a child has that was forked meanwhile."""
    if how != fcntl.LOCK_UN:
        lock(file, how)


@wrong_step("impl.ledger:fcntl.flock")
def ledger_waits_with_patience(lock: Step, file: Any, how: int) -> Any:
    """Who has waited for the lock for a while goes on without it."""
    for _ in range(2000):
        try:
            return lock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
    return None


@wrong_step("impl.ledger:Ledger._write")
def ledger_begins_no_file_twice(write: Step, self: Any, entries: Any) -> None:
    """A partial file that a failed write has left behind stops every later write by a process of the same id."""
    if list(self.folder.glob(f".ledger.json*{os.getpid()}*")):
        raise FileExistsError(f"{self.folder}: another write has begun there")
    write(self, entries)


@wrong_step("impl.ledger:Ledger._read")
def ledger_unreadable_is_empty(read: Step, self: Any) -> Any:
    """A ledger that cannot be read is taken for one without reservations, and written over."""
    try:
        return read(self)
    except OSError:
        return []


@wrong_step("impl.ledger:Ledger.acquire")
def ledger_of_the_parent(acquire: Step, self: Any, *given: Any) -> Any:
    """A forked process reserves under the id of its parent, which lives on when it is killed."""
    with patch("os.getpid", os.getppid) if multiprocessing.parent_process() else nullcontext():
        return acquire(self, *given)


@wrong_step("impl.ledger:Ledger.acquire")
def ledger_looks_before_it_waits(acquire: Step, self: Any, device: Any, count: int) -> Any:
    """What a card has free is looked at before the ledger is waited for, while others take it or give it back."""
    seen = self._memory(device)
    with patch.object(self, "_memory", lambda _: seen):
        return acquire(self, device, count)


@wrong_step("impl.ledger:_require_count")
def ledger_of_parts_of_bytes(_: Step, count: Any) -> None:
    """A number of bytes with a fraction, as an estimate times a factor has one, is written, and read by nobody."""
    if count < 0:
        raise ValueError(f"{count} bytes cannot be reserved: expected 0 or more")


@wrong_step("impl.ledger:Ledger.__init__")
def ledger_of_the_current_folder(init: Step, self: Any, folder: Any = None, *given: Any) -> None:
    """A ledger by a relative name is another one once the program has left its folder."""
    init(self, folder, *given)
    self.folder = Path(os.path.relpath(self.folder)) if folder is None and os.environ.get("BLACKSWAN_LEDGER") else self.folder
