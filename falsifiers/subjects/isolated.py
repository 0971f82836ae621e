"""A subject in a process of its own, which is given inputs and never what is expected of them."""

import hashlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import multiprocessing
import os
import pickle
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import blackswan
from blackswan import contracts
from blackswan.contracts.conventions import Declaration
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.precision import declared_by
from blackswan.falsifiers.subjects import far, libraries
from blackswan.falsifiers.subjects.doors.models import Described
from blackswan.falsifiers.subjects.libraries import PACKAGES
from blackswan.falsifiers.subjects.protocol import Lacks, Subject, TracedCall
from blackswan.reference.table import Array

Arrays = Mapping[str, Array]
SECONDS = 120.0
"""An answer that takes longer never comes."""
SEALED = ("blackswan.reference", "blackswan.falsifiers", "blackswan.tests")
"""What a subject cannot import: there are the answers."""
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


@dataclass(frozen=True)
class Named:
    """What a user calls a subject, the operation where it is one, and how it is asked.

    The name is `FILE.py:NAME`, `package.module:NAME`, or that of a library that ships: `torch`, `torch:FUSED`, `transformers` …
    """

    name: str
    operation: str | None = None
    device: str = "cpu"
    guarded: bool = True
    contiguous: bool = False
    aligned: bool = False
    declared: tuple[tuple[str, str], ...] = ()
    told: Described | None = None
    """What is said of a whole model that is handed over as it is; None for another subject."""

    def load(self) -> Any:
        """The object of that name. ValueError where there is none; whatever its module raises."""
        place, _, name = self.name.rpartition(":") if ":" in self.name else (self.name, "", "OPERATIONS")
        if place not in PACKAGES and ":" not in self.name:
            known = ", ".join(PACKAGES)
            raise ValueError(f"{self.name}: expected FILE.py:NAME or package.module:NAME, such as mine.py:rms_norm, or one of {known}")
        module = importlib.import_module(f"{libraries.__name__}.{place}") if place in PACKAGES else module_at(place)
        if not hasattr(module, name):
            near = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:12])
            raise ValueError(f"{self.name}: {place} has no {name}; it has {near or 'no public name'}")
        return getattr(module, name)


def require_device(name: str) -> None:
    """ValueError where there is no device of that name here."""
    from blackswan.impl.device import DeviceUnavailable, resolve_device

    try:
        resolve_device(name)
    except DeviceUnavailable as error:
        raise ValueError(error) from None


def module_at(place: str) -> ModuleType:
    """The module of that name, or in that file. ValueError where there is none."""
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and place.startswith(error.name):
                raise ValueError(f"{place}: no module of that name here; expected one that can be imported, or FILE.py") from None
            raise
    path = Path(place).resolve()
    if not path.is_file():
        raise ValueError(f"{place}: no such file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


@cache
def _functions_class() -> Callable[..., Subject]:
    """Functions, which imports torch: the process that asks does without. The one that is asked has it before it is sealed."""
    from blackswan.falsifiers.subjects.functions import Functions

    return Functions


def subject_of(
    given: Any, name: str, operation: str | None = None, device: str = "cpu", within: Any = None, declared: Declaration | None = None
) -> Subject:
    """The subject that an object is: a subject, a mapping of operations to functions, or one function or module and its operation.

    ValueError for another object, and where something is `declared` of a subject, which has its own method for that.
    """
    if all(callable(getattr(given, method, None)) for method in ("run", "differentiate", "unsupported")):
        known = inspect.signature(given).parameters if isinstance(given, type) else {}
        if declared and "declared" not in known:
            raise ValueError(f"{name} is a Subject, which declares by its method `declares`; expected no other declaration")
        told = {"device": device, "declared": declared}
        made: Subject = given(**{key: value for key, value in told.items() if key in known}) if isinstance(given, type) else given
        return made
    if isinstance(given, Mapping):
        return _functions_class()(given, name, device, within, declared)
    if not callable(given):
        raise ValueError(f"{name} is a {type(given).__name__}; expected a function, a torch.nn.Module, a mapping of them, or a Subject")
    if isinstance(given, type):
        raise ValueError(f"{name} is a class; expected a function, or an instance of a torch.nn.Module")
    own = str(getattr(given, "__name__", ""))
    if operation is None and own not in contracts.load_operations():
        called = f"{own!r} is not an operation" if own else f"a {type(given).__name__} has no name of an operation"
        raise ValueError(f"{name}: {called}; say which one it is by --operation NAME, in Python operation=…, or see contracts/CALLS.md")
    return _functions_class()({operation or own: given}, name, device, within, declared)


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
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, self.named), daemon=True)
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
    names, text = value
    made: type[Exception] = Exception
    for name in reversed(names):
        made = type(name, (made,), {})
    return made(text)


def _serve(connection: Connection, named: Named) -> None:
    """In the subject's process: answers one question after the other."""
    warnings.simplefilter("ignore")  # a subject that warns has not left a claim
    os.dup2(2, 1)  # whatever it prints is not among the verdicts
    from blackswan.falsifiers.subjects.guards import Guards, Tampered

    _functions_class()
    try:
        require_device(named.device)  # changes settings of torch, so it comes before the guards note them: later changes are the subject's
        loaded = named.load() if named.name.partition(":")[0] in PACKAGES else None
        within = Guards(contiguous=named.contiguous, aligned=named.aligned) if named.guarded else None
        build = _builder(named, within)
        _seal()
        subject = build(loaded or named.load())
    except ValueError as error:
        connection.send((0, "unusable", str(error)))
        return
    except BaseException as error:
        connection.send((0, "raised", _described(error)))
        return
    connection.send((0, "answer", None))
    while True:
        try:
            number, method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((number, "answer", _answer(subject, method, arguments)))
        except Tampered as error:
            connection.send((number, "tampered", str(error)))
        except Lacks as error:
            connection.send((number, "lacks", str(error)))
        except Exception as error:  # whatever a subject raises is its answer
            names, text = _described(error)
            said = text.partition("\n")[0]
            if "AcceleratorError" in names or re.search(r"CUDA error|Error \[CUDA\]", said):  # every later call would get it again
                connection.send((number, "broken", (names, said)))
                return
            connection.send((number, "raised", (names, text)))


def _builder(named: Named, within: Any) -> Callable[[Any], Any]:
    """What makes a subject of what was loaded; all that it imports is there."""
    if named.told is not None:
        from blackswan.falsifiers.subjects.handed import HandedModel

        return lambda given: HandedModel(given, named.name, named.device, named.told)

    def build(given: Any) -> Subject:
        subject = subject_of(given, named.name, named.operation, named.device, within, dict(named.declared))
        declared_by(subject)
        return subject

    return build


def _answer(subject: Subject, method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "sources":
        return _sources()
    return far.asked(subject, method, *arguments) if method in far.METHODS else getattr(subject, method)(*arguments)


def _sources() -> dict[str, str]:
    """What the subject's answers depend on: files that belong to no package, by their digests, and packages, by their versions."""
    packages, own = importlib.metadata.packages_distributions(), sysconfig.get_path("stdlib")
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        top = name.partition(".")[0]
        if top in packages:
            found[packages[top][0]] = importlib.metadata.version(packages[top][0])
        elif (
            file
            and top not in (*sys.stdlib_module_names, "blackswan", "__mp_main__", "__main__")
            and "site-packages" not in file
            and not file.startswith(own)
        ):
            found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def _described(error: BaseException) -> tuple[list[str], str]:
    """The names of its classes below Exception, the nearest first, and its text."""
    return [kind.__name__ for kind in type(error).__mro__ if kind not in (object, BaseException, Exception)], str(error)


def _seal() -> None:
    """From here on nobody in this process imports the reference or the falsifiers, finds the reference in memory or opens its files.

    What is loaded of the falsifiers keeps working.
    """
    answers = Path(importlib.import_module(SEALED[0]).__file__ or "").resolve().parent

    class Sealed(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
            del path, target
            if any(fullname == name or fullname.startswith(f"{name}.") for name in SEALED):
                raise ImportError(f"{fullname} cannot be imported by a subject: the answers are there")

    vars(blackswan).update(Lacks=Lacks, Subject=Subject)  # which code of a user's may import from there
    for name in list(sys.modules):
        if any(name == sealed or name.startswith(f"{sealed}.") for sealed in SEALED):
            module = sys.modules.pop(name)
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, importlib)).pop(child, None)
            if name.startswith(SEALED[0]):
                vars(module).clear()
    sys.meta_path.insert(0, Sealed())
    sys.addaudithook(lambda event, given: _refuse(answers, given[0]) if event == "open" else None)


def _refuse(answers: Path, file: Any) -> None:
    """PermissionError for a file of the folder of the answers, and for the memory of another process."""
    if not isinstance(file, str | bytes | os.PathLike):
        return
    path = os.path.realpath(os.fsdecode(file))
    if path.startswith(f"{answers}{os.sep}") or (re.fullmatch(r"/proc/\d+/mem", path) and str(os.getpid()) not in path):
        raise PermissionError(f"{path} cannot be opened by a subject: the answers are there")
