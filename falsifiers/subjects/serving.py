"""The process of a subject: it answers questions and cannot reach what is expected of the answers."""

import hashlib
import importlib
import importlib.abc
import importlib.metadata
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import blackswan
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.precision import declared_by
from blackswan.falsifiers.subjects import far
from blackswan.falsifiers.subjects.libraries import PACKAGES
from blackswan.falsifiers.subjects.memory import short_of_memory
from blackswan.falsifiers.subjects.named import Named, functions_class, require_device, subject_of
from blackswan.falsifiers.subjects.protocol import Lacks, Subject

SEALED = ("blackswan.reference", "blackswan.falsifiers", "blackswan.tests")
"""What a subject cannot import: there are the answers."""
OF_A_SUBJECT = "BLACKSWAN_SUBJECT"
STARTING = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")
"""Events of Python by which a program is started."""
"""The variable by which the reference knows a process that a subject has started."""


def serve(connection: Connection, named: Named) -> None:
    """In the subject's process: answers one question after the other."""
    warnings.simplefilter("ignore")  # a subject that warns has not left a claim
    os.dup2(2, 1)  # whatever it prints is not among the verdicts
    from blackswan.falsifiers.subjects.guards import Guards

    functions_class()
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
        connection.send((0, "raised", described(error)))
        return
    connection.send((0, "answer", None))
    while True:
        try:
            number, method, arguments = connection.recv()
        except EOFError:
            return
        try:
            kind, value = "answer", _answer(subject, method, arguments)
        except Exception as error:  # whatever a subject raises is its answer
            kind, value = failure(error, named.device)
        connection.send((number, kind, value))
        if kind == "broken":  # every later call would fail alike
            return


def failure(error: Exception, device: str) -> tuple[str, Any]:
    """What the process says of an error: its kind, and its text or its description."""
    if isinstance(error, SubjectError | Lacks):
        return ("lacks" if isinstance(error, Lacks) else "tampered"), str(error)
    names, text = described(error)
    said = text.partition("\n")[0]
    if short_of_memory(error, device):
        return "full", said
    broken = "AcceleratorError" in names or re.search(r"CUDA error|Error \[CUDA\]", said)
    return ("broken", (names, said)) if broken else ("raised", (names, text))


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


def described(error: BaseException) -> tuple[list[str], str]:
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
    os.environ[OF_A_SUBJECT] = "1"  # another Python that it starts with this environment is sealed as well

    def watch(event: str, given: Sequence[Any]) -> None:
        if event == "open":
            _refuse(answers, given[0])
        elif event in STARTING:
            environment = os.environ if event == "os.system" or given[-1] is None else given[-1]
            if OF_A_SUBJECT not in map(os.fsdecode, environment):
                raise PermissionError(f"a subject starts no program without the variable {OF_A_SUBJECT}: the answers are there")

    sys.addaudithook(watch)


def _refuse(answers: Path, file: Any) -> None:
    """PermissionError for a file of the folder of the answers, and for the memory of another process."""
    if not isinstance(file, str | bytes | os.PathLike):
        return
    path = os.path.realpath(os.fsdecode(file))
    if path.startswith(f"{answers}{os.sep}") or (re.fullmatch(r"/proc/\d+/mem", path) and str(os.getpid()) not in path):
        raise PermissionError(f"{path} cannot be opened by a subject: the answers are there")
