"""A card that is not here, and another one that is the current card: what a trainer does there is recorded, on tensors of the CPU.

Kernels are not run, and memory that nothing was written to holds zeros. A graph replays nothing; it looks for what it would have read.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from blackswan.falsifiers.subjects.impl.feigned_library import Library
from blackswan.falsifiers.subjects.impl.feigned_order import Accesses, Line, Watched, written_by
from blackswan.falsifiers.subjects.impl.late import Touched, storages_of
from blackswan.impl.fused import cublaslt

_OFFSETS = 40
"""Bits of an address that count bytes inside one piece of memory."""
_DEVICE, _IS_CUDA = (vars(torch._C.TensorBase)[name].__get__ for name in ("device", "is_cuda"))
_BACKWARD = vars(torch.autograd)["_engine_run_backward"]
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided")


class Cards(TorchFunctionMode):
    """Inside the block every tensor with a content says that it is on the card `used`; the current card is `current`.

    `done` counts what was done (launches, captures, streams, …) by the device for which it was done, `gone` names what was read after it
    was freed, `modes` are those of captures, and `accesses` says what did not wait for another stream. `graphs` are those that live.
    `owners` says of memory for which card it was read first.
    """

    def __init__(self, used: int, current: int, owners: dict[StorageWeakRef, torch.device]) -> None:
        super().__init__()
        self.used, self.current = torch.device("cuda", used), torch.device("cuda", current)
        self.done: Counter[tuple[str, str]] = Counter()
        self.gone: list[str] = []
        self.modes: set[str] = set()
        self.accesses, self.filling = Accesses(), False
        self.graphs: WeakSet[Any] = WeakSet()
        self.captures: list[Touched] = []
        self._owners = owners
        self._streams: dict[torch.device, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls torch's function; asked for its device, a tensor names the card."""
        name = getattr(func, "__name__", "")
        if func == _DEVICE:
            return found if (found := func(*args)).type == "meta" else self.used
        if func == _IS_CUDA:
            return not args[0].is_meta
        if name == "data_ptr":
            return self._address(args[0])
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        options = {key: self._placed(value) for key, value in (kwargs or {}).items()}
        result = func(*map(self._placed, args), **options)
        return self._filled(result) if name in _EMPTY and not result.is_meta else result

    def _filled(self, value: Tensor) -> Tensor:
        """Zeros, by no deed of the program."""
        self.filling = True
        try:
            return value.zero_()
        finally:
            self.filling = False

    def _placed(self, value: Any) -> Any:
        if not str(value if isinstance(value, torch.device | str) else "").startswith("cuda"):
            return value
        self.note("tensors", self.named(value))
        return torch.device("cpu")

    def named(self, device: Any = None) -> torch.device:
        """The device of that number or name, the current one where there is none."""
        found = torch.device("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)
        return self.current if found == torch.device("cuda") else found

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, within the block also where torch calls it for one that was given to this mode."""

        def entered(*given: Any, **options: Any) -> Any:
            with self:
                return function(*given, **options)

        return entered

    def note(self, what: str, device: torch.device | None = None) -> None:
        """Counts what was done for a device, or where none is named on the current one."""
        self.done[what, str(device or self.current)] += 1

    def _address(self, value: Tensor) -> int:
        """No two pieces of memory have the same, also where one was freed before the other was taken."""
        storage = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]  # torch
        self._owners.setdefault(storage, self.used)
        return ((list(self._owners).index(storage) + 1) << _OFFSETS) + int(value.storage_offset()) * value.element_size()

    def read(self, name: str, *values: Tensor | int) -> None:
        """Tensors, or addresses, that something reads or writes to beside torch's operations."""
        for storage in self.stored(*values):
            self.note("memory", self._owners.setdefault(storage, self.used))
            if storage.expired():  # type: ignore[no-untyped-call]  # torch
                self.gone.append(name)
            for capture in self.captures:
                capture.inputs.setdefault(storage, name)

    def stored(self, *values: Tensor | int) -> set[StorageWeakRef]:
        """The memory of tensors, or at addresses."""
        return storages_of(values) | {list(self._owners)[(each >> _OFFSETS) - 1] for each in values if isinstance(each, int)}

    @property
    def own(self) -> Any:
        """The current stream of the card `used`."""
        return self.stream_of(self.used)

    def stream_of(self, device: Any = None) -> Any:
        """The current stream of a device."""
        return self._streams.setdefault(self.named(device), Stream(device))

    @contextmanager
    def on(self, device: Any) -> Iterator[None]:
        """Another current device."""
        before, self.current = self.current, self.named(device)
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Another current stream, and its device."""
        before = self.stream_of(stream.device)
        self._streams[stream.device] = stream
        try:
            with self.on(stream.device):
                yield
        finally:
            self._streams[stream.device] = before

    @contextmanager
    def captured(self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        """As torch.cuda.graph."""
        self.accesses.done()  # as torch does
        with self.on_stream(stream or self.stream_of()):
            graph.capture_begin(pool, capture_error_mode)
            try:
                yield
            finally:
                graph.capture_end()

    def launcher(self, kernel: Any) -> Callable[..., None]:
        """Stands for a kernel with its grid."""

        def launched(*arguments: Any, **_: Any) -> None:
            self.note("launches")
            given = {name: each for name, each in zip(kernel.arg_names, arguments, strict=False) if isinstance(each, Tensor)}
            self.read(kernel.fn.__name__, *given.values())
            written = storages_of([each for name, each in given.items() if name in written_by(kernel.fn)])
            self.accesses.take(self.own, kernel.fn.__name__, storages_of(list(given.values())) - written, written)

        return launched


class Stream(Line):
    """One of a device, by default of the current one. What waits for it, or that it waits for, is noted."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        del priority
        super().__init__()
        self.device = _cards().named(device)
        self.cuda_stream = id(self)

    def wait_stream(self, stream: "Stream") -> None:
        """Notes both."""
        self.follow(stream.reached())
        _cards().note("streams waited for", stream.device)
        _cards().note("streams that wait", self.device)

    def wait_event(self, event: "Event") -> None:
        """Notes both."""
        self.follow(event.reached)
        _cards().note("events", event.device)
        _cards().note("streams that wait", self.device)

    def synchronize(self) -> None:
        """All that it was given is done."""
        _cards().accesses.done(self.reached())


class Event:
    """Recorded on a stream. Each takes less time than the one before."""

    _TIMES = itertools.count(1)

    def __init__(self, **_: Any) -> None:
        self.device, self.reached = _cards().current, dict[Line, int]()

    def record(self, stream: Stream | None = None) -> None:
        """On that stream, or the current one."""
        own = stream or _cards().stream_of()
        self.device, self.reached = own.device, own.reached()
        _cards().note("events", self.device)

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds."""
        del other
        return 1.0 / next(self._TIMES)

    def synchronize(self) -> None:
        """All before it is done."""
        _cards().accesses.done(self.reached)


class Graph:
    """What was captured: the memory that it reads and has not made itself, and the pool of what it has."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._reads = Touched()
        _cards().graphs.add(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """On the current stream."""
        _cards().modes.add(capture_error_mode)
        self._pool = pool or (0, id(self))
        _cards().note("captures")
        _cards().captures.append(self._reads)
        self._reads.__enter__()  # type: ignore[no-untyped-call]  # torch

    def capture_end(self) -> None:
        """What was made meanwhile is the pool's, whoever holds it."""
        self._reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch
        _cards().captures.remove(self._reads)
        _cards().accesses.captured(_cards().own)

    def pool(self) -> Any:
        """What says which pool it is."""
        return self._pool

    def kept(self) -> int:
        """Bytes of what was made in the capture and lives on: no other graph of the pool may use them."""
        living = (torch.UntypedStorage._new_with_weak_ptr(made.cdata) for made in self._reads.outputs)
        return sum(storage.nbytes() for storage in living if storage is not None)

    def replay(self) -> None:
        """Looks for what it reads, and writes over what it made."""
        _cards().accesses.take(_cards().own, "a graph", (), {*self._reads.inputs, *self._reads.outputs})
        for storage, name in self._reads.inputs.items():
            if storage not in self._reads.outputs and storage.expired():  # type: ignore[no-untyped-call]  # torch
                _cards().gone.append(f"replayed {name}")


class Generator(torch.Generator):
    """One of the CPU, whatever it is made for."""

    def __new__(cls, device: Any = None) -> "Generator":
        """Notes the device."""
        if device is not None and torch.device(device).type == "cuda":
            _cards().note("generators", _cards().named(device))
        return super().__new__(cls)


_entered: list[Cards] = []


def _cards() -> Cards:
    return _entered[-1]


@contextmanager
def feigned(cards: Cards) -> Iterator[None]:
    """Inside the block torch, Triton and cuBLASLt behave as if those cards were there."""
    from triton.runtime.jit import KernelInterface

    places: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": cards.captured,
        "stream": cards.on_stream,
        "device": cards.on,
        "current_stream": cards.stream_of,
        "default_stream": Stream,
        "current_device": lambda: cards.current.index,
        "synchronize": lambda *_: cards.accesses.done(),
    }
    with ExitStack() as patched:
        for name, stand_in in places.items():
            patched.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        patched.enter_context(mock.patch.object(torch, "Generator", Generator))
        patched.enter_context(mock.patch.object(KernelInterface, "__getitem__", lambda kernel, _: cards.launcher(kernel)))
        patched.enter_context(mock.patch.object(cublaslt, "_library", return_value=Library(cards)))
        _entered.append(cards)
        patched.callback(_entered.pop)
        patched.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", cards.inside(_BACKWARD)))
        patched.enter_context(cards)
        patched.enter_context(Watched(cards))
        yield


class Alike:
    """The group of a worker and others that do the same on the same samples."""

    rank = 0

    def __init__(self, size: int = 2) -> None:
        self.size = size

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of each."""
        return torch.stack([tensor] * self.size)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """As many times the tensor."""
        return self.size * tensor

    def gather_text(self, text: str) -> list[str]:
        """The text of each."""
        return [text] * self.size
