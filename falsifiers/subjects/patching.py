"""One step of a program changed while a subject runs, in this process and in those that the subject starts."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

_planted: list[str] = []


def planted() -> tuple[str, ...]:
    """The references of the changes that hold now, the outermost first, which `replanted` makes in another process."""
    return tuple(_planted)


@contextmanager
def planting(reference: str) -> Iterator[None]:
    """Inside the block a change holds that `replanted` makes in another process by its reference."""
    _planted.append(reference)
    try:
        yield
    finally:
        _planted.pop()


def owner_of(module: str, attribute: str) -> tuple[Any, str]:
    """The module, or the class in it, that has the attribute, which may be dotted, and the attribute's last name. Raises an AttributeError
    where there is none."""
    *owners, last = attribute.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    if last not in vars(owner):
        raise AttributeError(f"{module} has no {attribute} of its own", name=last, obj=owner)
    return owner, last


@contextmanager
def changed(module: str, attribute: str, change: Callable[[Any], Any], reference: str) -> Iterator[None]:
    """Inside the block the module's attribute, which may be dotted, is what `change` makes of it.

    `reference` is `module:name`, where `module.applied(name)` makes the same change in another process. Raises an AttributeError where the
    module has no such attribute.
    """
    owner, last = owner_of(module, attribute)
    before = vars(owner)[last]
    setattr(owner, last, change(before))
    try:
        with planting(reference):
            yield
    finally:
        setattr(owner, last, before)


@contextmanager
def replanted(references: Sequence[str]) -> Iterator[None]:
    """The changes of those references inside the block."""
    with ExitStack() as stack:
        for reference in references:
            module, _, name = reference.partition(":")
            stack.enter_context(import_module(module).applied(name))
        yield


@contextmanager
def opening(opened: Callable[..., Any]) -> Iterator[None]:
    """Inside the block files are opened by that function, whether they are asked for by `open` or by a path's own calls."""
    with mock.patch("io.open", opened), mock.patch("builtins.open", opened):
        yield


@contextmanager
def standing_in(function: Callable[..., Any], other: Callable[..., Any], package: str = "blackswan.impl") -> Iterator[None]:
    """Inside the block `other` stands for a function under every name that the modules of the package have for it."""
    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{package}.")]
    places = [(module, name) for module in modules for name, value in vars(module).items() if value is function]
    with ExitStack() as stack:
        for module, name in places:
            stack.enter_context(mock.patch.object(module, name, other))
        yield
