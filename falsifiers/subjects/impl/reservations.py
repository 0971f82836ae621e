"""Memory of devices as `impl` reserves it: the ledger of a host, and what the command `train` reserves there."""

import errno
import fcntl
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.subjects.doors.devices import Card
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.impl.feigned import Alike
from blackswan.falsifiers.subjects.patching import opening
from blackswan.falsifiers.subjects.protocol import Session
from blackswan.impl import __main__ as command
from blackswan.impl import ledger
from blackswan.impl.commands import train as train_command
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.samples import Samples

LONGEST, MOMENT = 5.0, 0.1
"""Seconds that another one is given to ask for the ledger's lock, and to get in."""
HOUR = 3600.0
"""Seconds by which the clock goes ahead, at once, where another one sleeps between two attempts to get in."""


class _Reserved(BaseException):
    """Ends a command when it has said how much memory it reserves."""


class Reservations(Door):
    """Memory that processes of a host reserve of its devices."""

    def cards(self, cards: Sequence[Card], in_use: Sequence[int]) -> list[tuple[str, Card]]:
        """The memory that the ledger is told of each of a host's cards, by the names that it gives them. torch's allocator holds the bytes
        `own` of a card, and has given `in_use` of them out to tensors.
        """

        def of(numbers: Sequence[Any]) -> Callable[[torch.device], Any]:
            return lambda device: numbers[device.index]

        host: dict[str, Any] = {
            "mem_get_info": of([(card.free, card.total) for card in cards]),
            "memory_reserved": of([card.own for card in cards]),
            "memory_allocated": of(in_use),
            "get_device_properties": of([SimpleNamespace(uuid=f"uuid of {card.total}", name="a card", index=0) for card in cards]),
        }
        with mock.patch.multiple("torch.cuda", **host):
            told = [ledger.device_memory(torch.device("cuda", index)) for index in range(len(cards))]
        return [(each.key, Card(each.total, each.free, each.own)) for each in told]

    def ledger(self, folder: Path, cards: Sequence[Card]) -> "Ledger":
        """The ledger in a folder, on a host with those cards: it asks them, and not torch, what they have."""
        return Ledger(folder, cards)

    def ledger_folder(self, named: str) -> Path:
        """The folder of the ledger where the environment names one, of a program whose own folders it names elsewhere."""
        own = {name: f"/a session's {name}" for name in ("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "USER", "LOGNAME")}
        with mock.patch.dict(os.environ, {**own, "BLACKSWAN_LEDGER": named}):
            return ledger.Ledger().folder

    def reserved_by(
        self, lengths: Sequence[int], validated: Sequence[int], settings: Mapping[str, Any], kind: str = "cuda", cut: int = 0
    ) -> int:
        """The bytes that the command `train` reserves of a card, which need not be here. `lengths` and `validated` are the tokens of each
        sample to train and to validate on; `cut` tokens were cut off each text."""
        whole = (Samples.of([[0] * length for length in part], [0] * len(part), 2) for part in (lengths, validated))
        train, validation = (replace(part, text_lengths=part.lengths() + cut) for part in whole)
        given = CHECKPOINT, ClassifyConfig(**settings), train, validation if validated else None
        with mock.patch("torch.cuda.is_available", return_value=False):
            return train_command._memory(*given, torch.device(kind))

    def held_in_a_run(self) -> list[str]:
        """The order in which the command `train` reserves memory, loads a model, ends a run and gives the memory back."""
        noted, load, fit = list[str](), ClassifyPipeline.from_pretrained, ClassifyPipeline.fit

        @contextmanager
        def reserve(*_: Any) -> Iterator[None]:
            noted.append("reserved")
            yield
            noted.append("given back")

        def after(call: Callable[..., Any], what: str, *given: Any, **named: Any) -> Any:
            found = call(*given, **named)
            noted.append(what)
            return found

        def run(pipeline: ClassifyPipeline, *given: Any, **named: Any) -> Any:
            return after(fit, "run", pipeline, *given, **named)

        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            (corpus := Path(folder) / "corpus.jsonl").write_text('{"input": "ls", "label": 1}\n{"input": "rm", "label": 0}\n')
            files = [f"--model={CHECKPOINT}", f"--corpus={corpus}", f"--output={folder}/run", f"--device={self._device}"]
            with (
                mock.patch.object(ledger, "reserve", reserve),
                mock.patch.object(ClassifyPipeline, "from_pretrained", partial(after, load, "loaded")),
                mock.patch.object(ClassifyPipeline, "fit", run),
            ):
                command.main(["train", *files, "--epochs=1", "--validation-fraction=0", "--max-seq-len=8", "--warmup-fraction=0"])
        return noted

    def reserved_by_one_of(self, workers: int, accumulation: int) -> int:
        """Bytes that `train` reserves on a CUDA device, which need not be here, as one of so many workers: for micro-batches of four
        long texts."""
        group, noted = Alike(workers), list[int]()

        @contextmanager
        def joined(_: str) -> Iterator[tuple[Any, torch.device]]:
            yield group, torch.device("cuda")

        def reserve(_: torch.device, count: int) -> NoReturn:
            noted.append(count)
            raise _Reserved

        with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()), suppress(_Reserved):
            lines = (json.dumps({"input": 256 * "ls ", "label": place % 2}) for place in range(16))
            (corpus := Path(folder) / "corpus.jsonl").write_text("\n".join(lines))
            files = [f"--model={CHECKPOINT}", f"--corpus={corpus}", f"--output={folder}/run", "--validation-fraction=0"]
            with (
                mock.patch("torch.cuda.is_available", return_value=False),
                mock.patch("blackswan.impl.group.joined", joined),
                mock.patch.object(ledger, "reserve", reserve),
            ):
                command.main(["train", *files, "--batch-size=4", f"--accumulation-steps={accumulation}", "--device=cuda"])
        return noted[0]


class Ledger(Session):
    """The reservations of device memory on a host, kept in a folder. InsufficientMemory where one does not fit."""

    def __init__(self, folder: Path, cards: Sequence[Card]) -> None:
        self._held: list[ledger.Reservation] = []
        self._keys = [f"card {index}" for index in range(len(cards))]
        self._book = ledger.Ledger(folder, lambda at: ledger.DeviceMemory(self._keys[at.index], **vars(cards[at.index])))

    def acquire(self, card: int, count: int) -> int:
        """Reserves bytes of that card for this process; the number of the reservation. Python's random numbers are those of every holder,
        as programs are that are given one seed."""
        before = random.getstate()
        random.seed(0)
        try:
            self._held.append(self._book.acquire(torch.device("cuda", card), count))
        finally:
            random.setstate(before)
        return len(self._held) - 1

    def update(self, reservation: int, count: int) -> None:
        """Changes the number of bytes."""
        self._held[reservation].update(count)

    def release(self, reservation: int) -> None:
        """Gives them back."""
        self._held[reservation].release()

    def sizes(self, reservations: Sequence[int]) -> list[int]:
        """The bytes of those reservations, as they say themselves."""
        return [self._held[each].bytes for each in reservations]

    def reserved(self) -> list[int]:
        """The bytes that living processes have reserved of each card."""
        entries = self._book.entries()
        return [sum(entry.bytes for entry in entries if entry.device == key) for key in self._keys]

    def entered_beside(self, reservation: int) -> list[str]:
        """The names of those that get into the ledger beside somebody: a process, and a thread of this one.

        Somebody waits for the ledger until another process has given that reservation back, and is then inside. Each of the two has a tenth
        of a second to get in, from when it asks for the lock by flock or lockf, and five seconds to ask. By the clock of one that sleeps
        meanwhile, each time for however little, it is an hour: it may give up then.
        """
        real, context, beside, who = io.open, multiprocessing.get_context("fork"), list[str](), threading.local()
        rest, slept = time.sleep, list[float]()
        waits, released = context.Event(), context.Event()
        starts, asks, enters = ({name: context.Event() for name in ("process", "thread")} for _ in range(3))

        def lock(real: Callable[..., None], *arguments: Any) -> None:
            name = getattr(who, "name", "")
            if name in asks:
                asks[name].set()
            elif name == "owner" and not released.is_set():
                waits.set()
                released.wait(LONGEST)
            real(*arguments)

        def sleep(seconds: float) -> None:
            if getattr(who, "name", "") in asks:
                slept.append(max(seconds, HOUR))
            else:
                rest(seconds)

        def later(clock: Callable[[], float]) -> float:
            return clock() + sum(slept)

        def inside(file: Any, *given: Any, **named: Any) -> Any:
            if isinstance(file, int) or Path(file) != self._book.folder / ledger.FILE or not hasattr(who, "name"):
                return real(file, *given, **named)
            if who.name in enters:
                enters[who.name].set()
            elif who.name == "owner":
                for name in starts:
                    starts[name].set()
                    asks[name].wait(LONGEST)
                    beside.extend([name] if enters[name].wait(MOMENT) else [])
            return real(file, *given, **named)

        def give_back() -> None:
            who.name = "holder"
            waits.wait(LONGEST)
            self.release(reservation)
            released.set()

        def enter(name: str) -> None:
            who.name = name
            starts[name].wait(4 * LONGEST)
            with suppress(TimeoutError):
                self._book.entries()

        who.name, thread = "owner", threading.Thread(target=enter, args=["thread"], daemon=True)
        process, holder = (context.Process(target=each, args=given, daemon=True) for each, given in ((enter, ["process"]), (give_back, [])))
        locks: dict[str, Any] = {each: partial(lock, getattr(fcntl, each)) for each in ("flock", "lockf")}
        clocks: dict[str, Any] = {each: partial(later, getattr(time, each)) for each in ("monotonic", "perf_counter", "time")}
        with mock.patch.multiple(fcntl, **locks), mock.patch.multiple(time, sleep=sleep, **clocks), opening(inside):
            for other in (process, holder, thread):
                other.start()
            self.reserved()
            for other in (process, holder, thread):
                other.join(LONGEST)
        return beside

    def after_waiting(self, meanwhile: Callable[[], object], card: int, count: int, reservation: int | None = None) -> int:
        """Reserves bytes, or changes the number of a reservation's; `meanwhile` happens while it waits for the ledger."""

        def lock(real: Callable[..., None], *arguments: Any) -> None:
            meanwhile()
            real(*arguments)

        locks: dict[str, Any] = {each: partial(lock, getattr(fcntl, each)) for each in ("flock", "lockf")}
        with mock.patch.multiple(fcntl, **locks):
            if reservation is None:
                return self.acquire(card, count)
            self.update(reservation, count)
            return reservation

    def shut_by_a_child(self) -> bool:
        """Whether nobody gets into the ledger once this process has left it, because a child lives on that was forked meanwhile, as another
        thread may fork one."""
        context, children = multiprocessing.get_context("fork"), list[Any]()

        def lock(real: Callable[..., None], *arguments: Any) -> None:
            real(*arguments)
            if not children:
                children.append(context.Process(target=time.sleep, args=[2 * LONGEST], daemon=True))
                children[0].start()

        locks: dict[str, Any] = {each: partial(lock, getattr(fcntl, each)) for each in ("flock", "lockf")}
        with mock.patch.multiple(fcntl, **locks):
            self._book.entries()
        other = threading.Thread(target=self._book.entries, daemon=True)
        other.start()
        other.join(LONGEST)
        shut = other.is_alive()
        for child in children:
            child.kill()
            child.join()
        other.join()
        return shut

    def run(self, card: int, count: int, block: Callable[[], object]) -> None:
        """Calls `block`, which needs so many bytes of the card, as a run is started."""
        with ledger.reserve(torch.device("cuda", card), count, self._book):
            block()

    def run_by_a_worker(self, card: int, count: int) -> None:
        """Runs nothing for which so many bytes are needed; what that raises comes here as from a worker of a pool of processes."""
        try:
            self.run(card, count, lambda: None)
        except Exception as error:
            raise pickle.loads(pickle.dumps(error)) from None  # noqa: S301  # written by this program

    def restart(self, *, of_the_host: bool) -> None:
        """Makes all entries those of earlier processes of the same ids: before the host was started again, at the same time after its
        start, or since then, at another.
        """
        path = self._book.folder / ledger.FILE
        entries = json.loads(path.read_text())
        for entry in entries:
            boot, slash, start = entry["started"].rpartition("/")
            if of_the_host:  # where no boot is told, nothing is another
                entry["started"] = f"another{boot}/{start}" if boot else entry["started"]
            else:
                entry["started"] = f"{boot}{slash}1{start}"
        path.write_text(json.dumps(entries))

    def hidden(self) -> list[int]:
        """As `reserved`, where the system shows no file of a holder, whom another user has started."""
        real, absent, others = io.open, os.strerror(errno.ENOENT), PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        def opened(file: Any, *given: Any, **named: Any) -> Any:
            if re.fullmatch(r"/proc/\d+/\w+", str(file)):
                raise FileNotFoundError(errno.ENOENT, absent, str(file))
            return real(file, *given, **named)

        with opening(opened), mock.patch.object(os, "kill", side_effect=others):
            return self.reserved()

    def without_boot(self) -> list[int] | None:
        """As `reserved`, where the system does not say of which start it is; None where that is refused."""
        real, absent = io.open, os.strerror(errno.ENOENT)

        def opened(file: Any, *given: Any, **named: Any) -> Any:
            if str(file) == "/proc/sys/kernel/random/boot_id":
                raise FileNotFoundError(errno.ENOENT, absent, str(file))
            return real(file, *given, **named)

        with opening(opened), suppress(OSError):
            return self.reserved()
        return None

    def unseen(self, error: OSError) -> list[int]:
        """As `reserved`, while each holder's file in /proc was opened, and cannot be read for that reason, as where the holder ends."""
        real = io.open

        class Unseen(io.FileIO):
            def readinto(self, _: Any) -> NoReturn:
                raise error

            def readall(self) -> NoReturn:
                raise error

        def opened(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
            if not re.fullmatch(r"/proc/\d+/\w+", str(file)):
                return real(file, mode, buffering, *given, **named)
            read = Unseen(file) if buffering == 0 else io.BufferedReader(Unseen(file))
            return read if "b" in mode else io.TextIOWrapper(read, *given, **named)

        with opening(opened):
            return self.reserved()
