"""How a user names a subject, and what becomes a subject: a function, a module, a mapping of operations, or a Subject."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from blackswan import contracts
from blackswan.contracts.conventions import Declaration
from blackswan.falsifiers.subjects import libraries
from blackswan.falsifiers.subjects.doors.models import Described
from blackswan.falsifiers.subjects.libraries import EXTRAS, PACKAGES
from blackswan.falsifiers.subjects.protocol import Subject


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
        module = _library(place) if place in PACKAGES else module_at(place)
        if not hasattr(module, name):
            near = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:12])
            raise ValueError(f"{self.name}: {place} has no {name}; it has {near or 'no public name'}")
        return getattr(module, name)


def _library(name: str) -> ModuleType:
    """The module about a library that ships. ValueError where the library, or what it needs, is not installed."""
    try:
        return importlib.import_module(f"{libraries.__name__}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("blackswan"):
            raise
        missing = (error.name or name).partition(".")[0]
        what = f"'blackswan-contracts[{name}]'" if name in EXTRAS else PACKAGES[name]
        needed = f"expected the package {PACKAGES[name]} and what it needs: pip install {what}"
        raise ValueError(f"{missing} is not installed here; {needed}") from None


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
def functions_class() -> Callable[..., Subject]:
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
        return functions_class()(given, name, device, within, declared)
    if not callable(given):
        raise ValueError(f"{name} is a {type(given).__name__}; expected a function, a torch.nn.Module, a mapping of them, or a Subject")
    if isinstance(given, type):
        raise ValueError(f"{name} is a class; expected a function, or an instance of a torch.nn.Module")
    own = str(getattr(given, "__name__", ""))
    if operation is None and own not in contracts.load_operations():
        called = f"{own!r} is not an operation" if own else f"a {type(given).__name__} has no name of an operation"
        raise ValueError(f"{name}: {called}; say which one it is by --operation NAME, in Python operation=…, or see contracts/CALLS.md")
    return functions_class()({operation or own: given}, name, device, within, declared)
