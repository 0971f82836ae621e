"""A subject in a process of its own, which is given inputs and never what is expected of them."""

import io
import itertools
import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from copy import copy
from multiprocessing.connection import Connection
from typing import Any

from blackswan.contracts.conventions import Declaration
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.subjects import far
from blackswan.falsifiers.subjects.named import Named
from blackswan.falsifiers.subjects.protocol import Lacks, OutOfMemory, Subject, TracedCall
from blackswan.falsifiers.subjects.serving import serve
from blackswan.reference.table import Array

Arrays = Mapping[str, Array]
SECONDS = 120.0
"""An answer that takes longer never comes."""
PLAIN = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "ml_dtypes": {"bfloat16"},
    "_codecs": {"encode"},
}
"""What a message of a subject may be made of, beside plain values. An object of any other kind could run code where the answers are."""


class Isolated(Subject):
    """The subject `named`, asked in another process. ValueError where it cannot be loaded. A process that dies is an answer; the next
    question starts another."""

    def __init__(self, named: Named, start: bool = True) -> None:
        self.named, self.name, self.device = named, named.name, named.device
        self._backend: str | None = None
        self._connection: Connection | None = None
        self._process: Any = None
        if start:
            self._started()

    def __reduce__(self) -> tuple[type["Isolated"], tuple[Named, bool]]:
        """Loaded anew in another process, with the first question: one that is itself being started cannot start another."""
        return Isolated, (self.named, False)

    def __copy__(self) -> "Isolated":
        """A subject that asks the same process."""
        made = object.__new__(Isolated)
        vars(made).update(vars(self))
        return made

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Why the operation cannot run in that dtype here; None when it can."""
        reason: str | None = self._ask("unsupported", operation, dtype)
        return reason

    def declares(self, operation: str) -> Declaration:
        """The conventions by which it computes the operation."""
        found: Declaration = self._ask("declares", operation)
        return found

    def run(self, operation: str, inputs: Arrays, scalars: Mapping[str, Any], dtype: str) -> dict[str, Array]:
        """The operation's outputs."""
        answer: dict[str, Array] = self._ask("run", operation, dict(inputs), dict(scalars), dtype)
        return answer

    def differentiate(
        self, operation: str, inputs: Arrays, scalars: Mapping[str, Any], cotangents: Arrays, wrt: Sequence[str], dtype: str
    ) -> dict[str, Array]:
        """The vector-Jacobian products with respect to the inputs in `wrt`."""
        answer: dict[str, Array] = self._ask("differentiate", operation, dict(inputs), dict(scalars), dict(cotangents), list(wrt), dtype)
        return answer

    def at_rows(
        self,
        operation: str,
        inputs: Arrays,
        scalars: Mapping[str, Any],
        dtype: str,
        count: int,
        rows: Sequence[int],
        cotangents: Arrays | None = None,
    ) -> dict[str, Array]:
        """These rows of its outputs, or gradients, for repeated rows; all of them are in its process alone."""
        upstream = None if cotangents is None else dict(cotangents)
        answer: dict[str, Array] = self._ask("at_rows", operation, dict(inputs), dict(scalars), dtype, count, list(rows), upstream)
        return answer

    def record(
        self, operation: str, inputs: Arrays, scalars: Mapping[str, Any], dtype: str, cotangents: Arrays | None = None
    ) -> list[TracedCall]:
        """The calls that a composition makes."""
        upstream = None if cotangents is None else dict(cotangents)
        calls: list[TracedCall] = self._ask("record", operation, dict(inputs), dict(scalars), dtype, upstream)
        return calls

    def using(self, backend: str) -> "Isolated":
        """The same process, where whole programs are asked on that backend."""
        other = copy(self)
        other._backend = backend
        return other

    def door(self, name: str) -> object:
        """The doors `models` and `trainer`; the others do not reach into another process."""
        if name not in far.DOORS:
            raise Lacks(f"{self.name} is asked in a process of its own, where no question about {name} reaches it")
        self._ask("door", self._backend, name)
        return far.DOORS[name](lambda method, *arguments: self._ask(method, self._backend, *arguments))

    def described(self) -> dict[str, Any]:
        """What a model that was handed over is, see `handed.HandedModel`."""
        found: dict[str, Any] = self._ask("described")
        return found

    def answered(self, inputs: Arrays) -> dict[str, Array]:
        """What it makes of a batch."""
        found: dict[str, Array] = self._ask("answered", dict(inputs))
        return found

    def sources(self) -> dict[str, str]:
        """SHA-256 of the files that are its own, and versions of the packages that it has loaded, by name."""
        found: dict[str, str] = self._ask("sources")
        return found

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _ask(self, method: str, *arguments: Any) -> Any:
        alive = self._connection is not None and self._process.is_alive()  # a copy may have ended it
        connection = self._connection if alive and self._connection else self._started()
        number = next(_numbers)
        connection.send((number, method, arguments))
        if not connection.poll(SECONDS):
            self.close()
            raise SubjectError(f"gave no answer within {SECONDS:g} s")
        try:
            kind, value = _message(connection, number)
        except EOFError:
            self._process.join()
            status = self._process.exitcode
            self.close()
            raise SubjectError(f"ended its process with status {status}") from None
        except SubjectError:  # what it says next may belong to this question
            self.close()
            raise
        if kind == "answer":
            return value
        if kind == "broken":  # whatever that process were asked next would fail alike
            self.close()
        raise _raised(kind, value)

    def _started(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, self.named), daemon=True)
        self._process.start()
        theirs.close()
        self._connection = ours
        try:
            kind, value = _message(ours, 0)
        except (EOFError, SubjectError) as error:
            self.close()
            said = "its process ended" if isinstance(error, EOFError) else f"its process {error}"
            raise ValueError(f"{self.name}: {said} while it was being loaded") from None
        if kind != "answer":
            self.close()
            raise _unusable(self.name, kind, value)
        return ours


_numbers = itertools.count(1)


class _Plain(pickle.Unpickler):
    """Reads arrays and plain values, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """A class or function of PLAIN; SubjectError for another one."""
        if name not in PLAIN.get(module, ()):
            raise SubjectError(f"answered with an object of {module}.{name}; expected arrays and plain values")
        return super().find_class(module, name)


def _message(connection: Connection, number: int) -> tuple[str, Any]:
    """What the subject's process says to the question of that number. EOFError where it has ended; SubjectError for anything else."""
    received = connection.recv_bytes()
    try:
        answered, kind, value = _Plain(io.BytesIO(received)).load()
    except SubjectError:
        raise
    except Exception as error:
        raise SubjectError(f"answered with bytes that cannot be read: {error}") from None
    if answered != number:
        raise SubjectError("spoke when it was not asked")
    return kind, value


def _unusable(name: str, kind: str, value: Any) -> ValueError:
    """Why a subject could not be loaded, with its name or its file's once."""
    said = value if kind == "unusable" else f"{value[0][0] if value[0] else 'Exception'}: {value[1]}"
    return ValueError(said if said.startswith(name.partition(":")[0]) else f"{name}: {said}")


def _raised(kind: str, value: Any) -> Exception:
    if kind == "lacks":
        return Lacks(value)
    if kind == "tampered":
        return SubjectError(value)
    if kind == "full":
        return OutOfMemory(value)
    names, text = value
    made: type[Exception] = Exception
    for name in reversed(names):
        made = type(name, (made,), {})
    return made(text)
