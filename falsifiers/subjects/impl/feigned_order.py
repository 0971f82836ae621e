"""In which order the streams of a feigned card do their work, and which of it reads or writes what another stream may not be done with.

Two deeds on one memory, of which one writes, are in order where both are one stream's, or where the later one's stream waited, by way of
whatever streams and events, for the earlier one (happens-before: Lamport 1978).
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from blackswan.falsifiers.subjects.impl.late import storages_of

_WRITES = re.compile(r"(?:tl\.store\(|_write\(|target = )(\w+)")


@cache
def written_by(kernel: Callable[..., Any]) -> frozenset[str]:
    """The arguments that a Triton kernel writes to, by its source."""
    return frozenset(_WRITES.findall(inspect.getsource(kernel)))


@cache
def _written_by(operation: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation of torch writes to."""
    arguments = enumerate(operation._schema.arguments)
    return tuple((place, each.name) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write)


class Line:
    """What one stream does, counted, and how much it waited for of what others do."""

    def __init__(self) -> None:
        self.count, self.after = 0, dict["Line", int]()

    def follow(self, reached: Mapping["Line", int]) -> None:
        """What comes now comes after that."""
        for line, count in reached.items():
            self.after[line] = max(count, self.after.get(line, 0))

    def reached(self) -> dict["Line", int]:
        """All that has to be done before what follows this stream now."""
        return {**self.after, self: self.count}


class Accesses:
    """The last deeds on each memory. `races` names those whose stream did not wait for what they depend on."""

    def __init__(self) -> None:
        self.races = list[str]()
        self._host = Line()  # what the program has waited for, and with it all streams
        self._lines = set[Line]()
        self._writes = dict[StorageWeakRef, tuple[Line, int, str]]()
        self._reads = dict[StorageWeakRef, dict[Line, tuple[int, str]]]()

    def take(self, line: Line, name: str, reads: Iterable[StorageWeakRef], writes: Iterable[StorageWeakRef]) -> None:
        """The stream does what is called so."""
        line.count += 1
        self._lines.add(line)
        for storage in writes:
            for other, (count, what) in self._reads.pop(storage, {}).items():
                self._require(line, other, count, name, "writes", what, "reads")
        for storage in (*reads, *writes):
            if storage in self._writes:
                other, count, what = self._writes[storage]
                self._require(line, other, count, name, "uses", what, "writes")
        self._writes |= dict.fromkeys(writes, (line, line.count, name))
        for storage in reads:
            self._reads.setdefault(storage, {})[line] = line.count, name

    def _require(self, line: Line, other: Line, count: int, name: str, does: str, what: str, did: str) -> None:
        if other is not line and max(line.after.get(other, 0), self._host.after.get(other, 0)) < count:
            self.races.append(f"{name} {does} what {what} {did}")

    def done(self, reached: Mapping[Line, int] | None = None) -> None:
        """The program has waited for that, or for all that was begun."""
        self._host.follow({line: line.count for line in self._lines} if reached is None else reached)

    def captured(self, line: Line) -> None:
        """A capture on the stream ends. What others did in it has to be waited for."""
        for other in self._lines:
            self._require(line, other, other.count, "a capture", "does not wait for", "another stream", "does")
        self.done()


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Inside the block the current stream of the card does what torch's operations do."""

    def __init__(self, cards: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._cards = cards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operation gives. Views, and memory without a content yet, are no deed."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (self._cards.filling or func.is_view or "empty" in func.__name__):
            given = storages_of((args, kwargs))
            written = storages_of([args[place] if place < len(args) else kwargs.get(name) for place, name in _written_by(func)])
            self._cards.accesses.take(self._cards.own, str(func), given - written, written | storages_of(result) - given)
        return result
