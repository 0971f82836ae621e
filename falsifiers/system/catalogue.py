"""The checks that claims about systems may name, as `python -m falsifiers catalogue` writes them for the lint of contracts."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from blackswan.falsifiers import system
from blackswan.falsifiers.system.trial import Trial

ON_BACKENDS = ("whole_models",)
"""Modules whose checks ask the door `models`, the only one that has a choice of backends."""


def checks() -> dict[str, dict[str, Any]]:
    """By `module.function`: the beginning of the docstring, and the arguments that a claim has to give and those that it may give."""
    modules = [import_module(f"{system.__name__}.{found.name}") for found in pkgutil.iter_modules(system.__path__)]
    return {f"{_name(module)}.{check.__name__}": _entry(module, check) for module in modules for check in functions(module)}


def functions(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """The checks of a module: its public functions of a Trial."""
    for name, function in sorted(vars(module).items()):
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"):
            parameters = [*inspect.signature(function).parameters.values()]
            if parameters and parameters[0].annotation is Trial and all(one.kind is one.KEYWORD_ONLY for one in parameters[1:]):
                yield function


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _entry(module: ModuleType, check: Callable[..., Any]) -> dict[str, Any]:
    """A check's arguments are its keyword-only parameters."""
    own = [one for one in inspect.signature(check).parameters.values() if one.kind is one.KEYWORD_ONLY]
    found: dict[str, Any] = {
        "arguments": [one.name for one in own if one.default is one.empty],
        "optional": [one.name for one in own if one.default is not one.empty],
        "backends": _name(module) in ON_BACKENDS,
    }
    doc = " ".join((inspect.getdoc(check) or "").partition("\n\n")[0].split())
    return {"doc": doc, **{key: value for key, value in found.items() if value}}
