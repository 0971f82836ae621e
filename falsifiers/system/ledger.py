"""The ledger of device memory: what is granted and refused to one process, to several at once, and after one has died."""

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.comparison import Comparison, value_at_least, value_inside
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.devices import Card
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial

if TYPE_CHECKING:
    from blackswan.falsifiers.subjects.impl.reservations import Ledger

GIB, MIB = 2**30, 2**20
PROCESSES, ROUNDS, TURNS = 6, 5, 30


@contextmanager
def _ledger(trial: Trial, cards: Sequence[Card], found: list[Comparison] | None = None) -> "Iterator[Ledger]":
    """A ledger in a folder that several users may use; `found` gets whether they may use its files, whatever the umask of who made them."""
    usual = os.umask(0o077)
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o770)
            yield trial.reservations.ledger(Path(folder), cards)
            if found is not None:
                modes = {path.name: oct(path.stat().st_mode & 0o777) for path in Path(folder).iterdir()}
                found += same("modes of the files", dict.fromkeys(modes, oct(0o660)), modes)
    finally:
        os.umask(usual)


def keeps_account(trial: Trial) -> list[Comparison]:
    """Random reservations of two cards are granted and refused as an account of its own says, which also says what is reserved, while other
    programs take memory of the cards and give it back.

    Fewer bytes than none, and parts of one, are refused. Whoever may use the folder may use its files.
    """
    rng = trial.rng("reservations")
    cards, found = [_card(rng), _card(rng)], list[Comparison]()
    held: dict[int, tuple[int, int]] = {}  # number of a reservation: its card and bytes
    with _ledger(trial, cards, found) as ledger:
        for turn in range(TURNS):
            verb = str(rng.choice(["acquire", "update", "update", "release"])) if held else "acquire"
            chosen = int(rng.choice(list(held))) if verb != "acquire" else -1
            card, before = held.get(chosen, (int(rng.integers(2)), 0))
            others = sum(count for at, count in held.values() if at == card) - before
            if rng.random() < 0.3:  # another program takes memory, or gives it back
                cards[card] = replace(cards[card], free=int(rng.integers(1, cards[card].total - cards[card].own + 1)))
            # The most bytes that fit: most of what goes wrong by a byte goes wrong there.
            limit = min(cards[card].free + min(cards[card].own, before), cards[card].total - others)
            count = int(rng.choice([limit, limit + 1, int(rng.integers(1, cards[card].total * 3 // 4))]))
            ask = partial(ledger.acquire, card, count) if verb == "acquire" else partial(ledger.update, chosen, count)
            if verb == "release":
                ledger.release(chosen)
                del held[chosen]
            elif count > max(before, limit):
                found.append(trial.refuses(f"{verb} in turn {turn}", ask, "needed", "InsufficientMemory"))
            else:
                answer = ask()
                held[chosen if answer is None else answer] = (card, count)
            wanted = [sum(count for at, count in held.values() if at == each) for each in (0, 1)]
            found += same(f"reserved after {verb} in turn {turn}", wanted, ledger.reserved())
            found += same(
                f"what reservations say after {verb} in turn {turn}", [count for _, count in held.values()], ledger.sizes(list(held))
            )
        asks: dict[str, Callable[[Any], Any]] = {"acquire": partial(ledger.acquire, 0)}
        asks |= {f"update of {chosen}": partial(ledger.update, chosen) for chosen in held}
        found += [
            trial.refuses(f"{name}, {odd} bytes", partial(change, odd), f"{odd} bytes", "ValueError")
            for name, change in asks.items()
            for odd in (-1, 1.5)
        ]
        found += same("reserved after these", wanted, ledger.reserved())
    return found + _told_of_cards(trial, cards, rng)


def _told_of_cards(trial: Trial, cards: Sequence[Card], rng: Generator) -> list[Comparison]:
    """Of each card its own numbers: what the allocator holds counts as the process's own, given out to tensors or not. A card has the same
    name in a process that sees the cards in another order."""
    in_use = [int(rng.integers(card.own + 1)) for card in cards]
    told = trial.reservations.cards(cards, in_use)
    found = same("numbers of each card", list(cards), [card for _, card in told])
    turned = trial.reservations.cards(cards[::-1], in_use[::-1])
    return found + same("two cards, and their names in another order", (2, told[::-1]), (len({name for name, _ in told}), turned))


def _card(rng: Generator) -> Card:
    total = int(rng.integers(50, 200)) * GIB + int(rng.integers(GIB))
    free = total if rng.random() < 0.5 else int(rng.integers(total // 4, total // 2))
    return Card(total, free, int(rng.integers(total - free + 1)))


def race_stays_within_capacity(trial: Trial) -> list[Comparison]:
    """Processes that reserve at once never hold more than the device has; each ends, some of them got memory, and nothing is left. Threads
    of one process wait for each other too, for hours where they must, and not for a child that one of them has forked."""
    fitting = int(trial.rng("race").integers(1, 3))
    room = fitting * GIB + GIB // 2
    context = multiprocessing.get_context("fork")
    held, peak, gained = (context.Value("q", 0) for _ in range(3))
    start = context.Barrier(PROCESSES, timeout=30)

    def hold(ledger: "Ledger") -> None:
        start.wait()
        for _ in range(ROUNDS):
            reservation = _granted(partial(ledger.acquire, 0, GIB))
            if reservation is None:
                continue
            with held.get_lock():
                held.value += 1
                peak.value = max(peak.value, held.value)
                gained.value += 1
            time.sleep(0.01)
            with held.get_lock():
                held.value -= 1
            ledger.release(reservation)

    cards = [Card(room, room)]
    with _ledger(trial, cards) as ledger:
        processes = [context.Process(target=hold, args=(ledger,)) for _ in range(PROCESSES)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        left = ledger.reserved()
        beside = ledger.entered_beside(ledger.acquire(0, GIB))
        shut = ledger.shut_by_a_child()
        waited = list(_waiting(trial, ledger, cards))
    return [
        *same("who is in the ledger beside one that waited for the last release", [], beside),
        *same("shut by a child that was forked inside", False, shut),
        *waited,
        value_inside("held together", peak.value, 0, fitting),
        *same("exit status of each process", [0] * PROCESSES, [process.exitcode for process in processes]),
        value_at_least("reservations", gained.value, fitting),
        *same("left over", [0], left),
    ]


def _waiting(trial: Trial, ledger: "Ledger", cards: list[Card]) -> Iterator[Comparison]:
    """Who waits for the ledger is given of what is free when it gets in, and not of what was free when it came."""
    full = cards[0]
    for reservation in (None, ledger.acquire(0, 0)):
        label = "acquire" if reservation is None else "update"
        ask = partial(ledger.after_waiting, partial(cards.__setitem__, 0, replace(full, free=MIB)), 0, GIB, reservation)
        yield trial.refuses(f"{label}: memory that was taken while it waited", ask, "needed", "InsufficientMemory")
        ledger.release(ledger.after_waiting(partial(cards.__setitem__, 0, full), 0, GIB, reservation))


def _granted(ask: Callable[[], int]) -> int | None:
    """The reservation; None where it is refused for want of memory."""
    try:
        return ask()
    except SubjectError as error:
        if type(error.__cause__).__name__ == "InsufficientMemory":
            return None
        raise


def the_dead_hold_nothing(trial: Trial) -> Iterator[Comparison]:
    """A killed holder's memory is free at once, and an earlier process of the same id holds none; a living one keeps its own."""
    count = int(trial.rng("holder").integers(1, 10)) * GIB
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hold(ledger: "Ledger") -> None:
        Path("/proc/self/comm").write_bytes(b"a) Z (1\xc3")  # a process may be called so, as where a name is cut inside a letter
        try:
            ledger.acquire(0, count)
        finally:
            ready.set()
        time.sleep(60)

    with _ledger(trial, [Card(20 * GIB, 20 * GIB)]) as ledger:
        yield from same("before the first", [0], ledger.reserved())  # what is known of this process is not true of the one forked from it
        process = context.Process(target=hold, args=(ledger,))
        process.start()
        try:
            ready.wait(30)
            yield from same("while its holder lives", [count], ledger.reserved())
            yield from same("of a process that ends as it is looked at", [0], ledger.unseen(ProcessLookupError()))
            yield from _of_a_living_one_unseen(trial, ledger, count)
            process.kill()
            os.waitid(os.P_PID, int(process.pid or 0), os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not taken note
            yield from same("after its holder was killed", [0], ledger.reserved())
        finally:
            process.kill()
            process.join()
        for of_the_host in (True, False):
            ledger.acquire(0, count)
            ledger.restart(of_the_host=of_the_host)
            yield from same(f"of an earlier process of the same id, before a restart: {of_the_host}", [0], ledger.reserved())
        yield from _of_no_ledger(trial)


def _of_a_living_one_unseen(trial: Trial, ledger: "Ledger", count: int) -> Iterator[Comparison]:
    """A holder at which nobody may look, or for which no file can be opened any more, is not taken for one that is gone."""
    for code in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO):
        ask = partial(ledger.unseen, OSError(code, os.strerror(code)))
        yield trial.refuses(f"a holder that cannot be looked at: {errno.errorcode[code]}", ask, re.escape(os.strerror(code)), "OSError")
        yield from same("of a holder that could not be looked at", [count], ledger.reserved())
    yield trial.refuses("another user's holder that the system does not show", ledger.hidden, "permitted|process", "OSError")
    yield from same("of a holder that the system did not show", [count], ledger.reserved())
    yield from same("of a holder, on a system that does not say its boot: taken for gone", False, ledger.without_boot() == [0])


def _of_no_ledger(trial: Trial) -> list[Comparison]:
    """A file that is damaged holds nothing, and a new one is begun, and replaced by a whole one whenever it changes; the folder is the one
    that the environment names."""
    found: list[Comparison] = []
    for content in (b"", b'[{"id": "a", "pid": 1', b"{}", b"null", b"5", b"[1]", b'[{"id": "a"}]', b"\xff", *_damaged_entries()):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "ledger.json").write_bytes(content)
            ledger = trial.reservations.ledger(Path(folder), [Card(GIB, GIB)])
            found += same("in a damaged file", [0], ledger.reserved())
            ledger.acquire(0, GIB)
            found += same("after a damaged file", [GIB], ledger.reserved())
            with (Path(folder) / "ledger.json").open("rb") as seen:  # what a process that is killed as it writes leaves
                before = seen.read()
                ledger.release(0)
                seen.seek(0)
                found += same("a file that is replaced, as it was", before, seen.read())
            ledger.acquire(0, 1)
            (Path(folder) / "ledger.json").write_bytes(content)
            ledger.update(1, GIB)
            found += same("after a file was damaged beside a reservation that grows", [GIB], ledger.reserved())
            (Path(folder) / "ledger.json").write_bytes(content)
            ledger.release(1)
            found += same("after a file was damaged beside a reservation that goes", [0], ledger.reserved())
    folders = {named: trial.reservations.ledger_folder(named) for named in ("of/all", "")}
    own = Path(tempfile.gettempdir()) / f"blackswan-{os.getuid()}"
    found += same("folders by what the environment names", {"of/all": Path("of/all").absolute(), "": own}, folders)
    return found + _of_no_folder(trial) + _of_no_file(trial) + _of_another_version(trial)


def _of_no_file(trial: Trial) -> list[Comparison]:
    """A file that cannot be written stays as it was, and is written as soon as it can be; one that cannot be read is refused and stays."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = trial.reservations.ledger(Path(folder), [Card(GIB, GIB)])
        ledger.acquire(0, MIB)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
        try:
            found = [trial.refuses("where nothing can be written", partial(ledger.acquire, 0, MIB), "ledger", "OSError")]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        found += same("where nothing could be written", [MIB], ledger.reserved())
        ledger.acquire(0, MIB)
        found += same("after nothing could be written", [2 * MIB], ledger.reserved())
        try:
            ask = partial(ledger.run, 0, MIB, partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, limit[1])))
            found.append(trial.refuses("a block at whose end nothing can be written", ask, "ledger", "OSError"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        (file := Path(folder) / "ledger.json").unlink()
        file.symlink_to(file.name)
        found.append(trial.refuses("a file that cannot be read", partial(ledger.acquire, 0, MIB), "ledger", "OSError"))
        return found + same("a link to itself in the place of the file", file.name, str(file.readlink()) if file.is_symlink() else "a file")


def _damaged_entries() -> Iterator[bytes]:
    """A reservation of this process of which one value has another type, or that has a key more."""
    whole = _written_by_hand()
    changes: list[dict[str, Any]] = [*({key: [value]} for key, value in whole.items()), {"surplus": 1}]
    yield from (json.dumps([whole | change]).encode() for change in changes)


def _written_by_hand() -> dict[str, Any]:
    """A reservation of this process, as every version of the program writes it: several of them may run on a host."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{stat[19]}"
    return {"id": "a", "pid": os.getpid(), "started": started, "device": "card 0", "bytes": GIB}


def _of_another_version(trial: Trial) -> list[Comparison]:
    """This version counts what another one has reserved, and leaves it there when it writes."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "ledger.json").write_text(json.dumps([_written_by_hand()]))
        ledger = trial.reservations.ledger(Path(folder), [Card(2 * GIB, 2 * GIB)])
        found = same("of another version", [GIB], ledger.reserved())
        found += _of_the_same_time(ledger, file)
        ledger.acquire(0, MIB)
        written = [{**each, "id": "a", "bytes": GIB} for each in json.loads(file.read_text())]
        return found + same("what this version writes beside it", [_written_by_hand()] * 2, written)


def _of_the_same_time(ledger: "Ledger", file: Path) -> list[Comparison]:
    """Who changes the file right after it was read leaves as many bytes, and by the clock of its disk the same time."""
    was, whole = file.stat(), file.read_text()
    file.write_text(whole.replace(str(GIB), str(GIB + 1)))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    found = same("changed at the time of the last look", [GIB + 1], ledger.reserved())
    file.write_text(whole)
    return found


def _of_no_folder(trial: Trial) -> list[Comparison]:
    """A folder that is not there yet, or any more, is made, with those above it, and is its maker's alone."""
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "not" / "there"
        ledger = trial.reservations.ledger(folder, [Card(GIB, GIB)])
        usual = os.umask(0)
        try:
            with mock.patch.object(tempfile, "tempdir", f"{above}/of others"):  # which may be another disk, and full
                ledger.acquire(0, GIB)
        finally:
            os.umask(usual)
        found = same("in a folder that was not there", [GIB], ledger.reserved())
        found += same("mode of a folder that was not there", "0o700", oct(folder.stat().st_mode & 0o777))
        shutil.rmtree(folder)
        ledger.release(0)
        ledger.acquire(0, MIB)
        return found + same("in a folder that was removed meanwhile", [MIB], ledger.reserved())


def too_little_memory_is_refused(trial: Trial) -> Iterator[Comparison]:
    """More than is free, and than others have left, is refused with the bytes needed, available, free, in all and reserved, and by whom,
    before its block is entered; the rest is given, and given back where the block fails."""
    for unit, shown, most in ((GIB, r"{}\.00 GiB", 300), (MIB, r"{}\.0 MiB", 50)):
        yield from _refused_in(trial, unit, shown, most)


def _refused_in(trial: Trial, unit: int, shown: str, most: int) -> Iterator[Comparison]:
    """Memory in that unit, and how a refusal shows it; so many units at most are missing."""
    rng = trial.rng("too little")
    total = int(rng.integers(40, 200))
    free = int(rng.integers(total // 2 + 1, total - 1))
    others = int(rng.integers(*((2, total - free + 1) if trial.seed // 2 % 2 else (total - free + 1, free + 1))))
    available = min(free, total - others)
    needed, entered = available + int(rng.integers(1, most)), list[int]()
    one = int(rng.integers(1, others))  # of two reservations of one process
    told = {count: shown.format(count) for count in (needed, available, free, total, others, one, others - one)}
    numbers = rf"\b{told[needed]} needed.*\b{told[available]} available.*\b{told[free]} of {told[total]}.*free"
    own = f"process {os.getpid()}:"
    holders = [f"{own} {told[one]}, {own} {told[others - one]}", f"{own} {told[others - one]}, {own} {told[one]}", f"{own} {told[others]}"]
    numbers += rf".*\b{told[others]} .*reserved.*\(({'|'.join(holders)})\)"
    at = 1 - trial.seed % 2
    with _ledger(trial, [Card(total * unit, free * unit)] * 2) as ledger:
        ledger.acquire(at, one * unit)
        ledger.acquire(at, (others - one) * unit)
        ledger.acquire(1 - at, unit)
        ask = partial(ledger.run, at, needed * unit, partial(entered.append, needed))
        yield trial.refuses("more than is available", ask, numbers, "InsufficientMemory")
        ask = partial(ledger.run_by_a_worker, at, needed * unit)
        yield trial.refuses("more than is available, told by a worker", ask, numbers, "InsufficientMemory")
        ledger.run(at, available * unit, partial(entered.append, available))
        yield trial.refuses("a block that fails", partial(ledger.run, at, unit, _failing), "block", "ArithmeticError")
        yield from same("reserved after a block that failed", others * unit, ledger.reserved()[at])
    yield from same(f"units of {unit} bytes of the blocks that were entered", [available], entered)


def _failing() -> None:
    raise ArithmeticError("the block fails")
