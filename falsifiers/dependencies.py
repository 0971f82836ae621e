"""Where the code begins that a claim's verdict depends on: entry files, whose imports are followed (reports.dependencies).

Imports do not tell everything: operations are found by name in tables. What a claim may find there is named here, `path::function`, so that
a table that gives another function now is seen.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from contracts.model import Claim
from falsifiers.checks import CHECKS
from falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from falsifiers.kinds import KINDS
from falsifiers.mutants import USES
from reference import COMPOSITIONS, TABLE
from reference.table import Composition
from reports.dependencies import Sources

ROOT = Path(__file__).resolve().parent.parent
DISPATCH = "impl/dispatch.py"
KERNELS = ("impl/kernels/__init__.py", "impl/kernels/functions.py")
_HOST = ("impl/device.py",)
"""Which device computes, and how."""
_RUNS = ("reference/run.py", "reference/tape.py")
_PROCEDURES = "falsifiers/subjects/procedures/"
WORKERS, RANKS = f"{_PROCEDURES}workers.py", f"{_PROCEDURES}forking.py"
"""What starts processes, and their own program, which it names and does not import."""
_ALWAYS = ("falsifiers/attack.py", "falsifiers/engine.py", "falsifiers/strategies.py", "falsifiers/subjects/implementation.py")


def entries(claim: Claim) -> dict[str, list[str]]:
    """Files from the checkout's root, and functions in them, by part: the reference of the operation, the subject's own code for it, and
    the comparison."""
    operations = sorted({claim.operation, *USES.get(claim.operation, ())}) if claim.operation else []
    check = _places([CHECKS[claim.check]] if claim.check else [])
    found = {
        "reference": {*_of_reference(operations)} or {*_that_the_check_asks(tuple(check))},
        "subject": {*_of_subject(claim, operations)},
        "comparison": {*_ALWAYS, *check, *_places([KINDS[claim.kind]]), *_input(claim, check)},
    }
    return {part: sorted(files) for part, files in found.items()}


def _input(claim: Claim, check: Iterable[str]) -> Iterator[str]:
    """The shipped checkpoint and corpora, where they are, and what reads them, where the claim takes cases from there."""
    if claim.domain.input == "checkpoint":
        yield "falsifiers/real_input.py"
    if claim.domain.input == "checkpoint" or _mentions("falsifiers.data", tuple(check)):
        shipped = (*CHECKPOINT.iterdir(), *CORPUS_HELDOUT.parent.iterdir())
        yield from (path.relative_to(ROOT).as_posix() for path in shipped if path.is_file() and not path.name.startswith("."))
        yield "falsifiers/data/__init__.py"


@functools.cache
def _mentions(module: str, check: tuple[str, ...]) -> bool:
    """Whether a check imports a module, or a file does that it alone brings."""
    return any(_sources().mentions(name, module) for name in _own(check))


def _own(check: Iterable[str]) -> set[str]:
    """The files of the comparison that are not every claim's."""
    return set(_sources().closure("comparison", check)) - set(_sources().closure("comparison", _ALWAYS))


def _of_reference(operations: Iterable[str]) -> list[str]:
    """The operations' files, and what runs them; none for a procedure."""
    found = [entry for name in operations if (entry := COMPOSITIONS.get(name) or TABLE.get(name)) is not None]
    functions = [
        function
        for entry in found
        for function in ((entry.build,) if isinstance(entry, Composition) else (entry.forward, entry.backward))
        if function is not None
    ]
    return [*_places(functions), *_RUNS] if functions else []


@functools.cache
def _that_the_check_asks(check: tuple[str, ...]) -> tuple[str, ...]:
    """The reference's files of a claim whose operation has none there: what its check imports of them. One that runs operations by their
    names, other than those of the claim, may run all of them."""
    sources = _sources()
    every = _of_reference([*TABLE, *COMPOSITIONS]) if _mentions("reference", check) else []
    return (*sources.imported("comparison", check, "reference"), *every)


def _of_subject(claim: Claim, operations: Iterable[str]) -> Iterator[str]:
    """An elementary operation's own function; the subject's class for a composition, whose module imports the models; a procedure, which
    may call every operation where it runs a model."""
    from falsifiers.subjects.implementation import Implementation
    from falsifiers.subjects.procedures import PROCEDURES, default_configurations
    from impl.kernels import NAMES
    from impl.operations import OPERATIONS

    tables: list[dict[str, Callable[..., Any]]] = [dict(OPERATIONS), dict(PROCEDURES), dict.fromkeys(COMPOSITIONS, Implementation)]
    found = _places([table[name] for name in operations for table in tables if name in table] or [default_configurations])
    helpers = {name for name in found if name.startswith(_PROCEDURES)}
    helpers = set(_sources().closure("subject", helpers, (_PROCEDURES,)))
    if WORKERS in helpers:
        helpers |= set(_sources().closure("subject", [RANKS], (_PROCEDURES,)))
    runs = not helpers or DISPATCH in _sources().closure("subject", helpers)
    called = set(OPERATIONS) if helpers and runs else set(operations)
    yield from (*found, *helpers, *_HOST)
    if runs and claim.operation:
        yield from (DISPATCH, *_places([OPERATIONS[name] for name in called if name in OPERATIONS]))
    if claim.path != "torch" and not called.isdisjoint(NAMES):
        yield from KERNELS


@functools.cache
def _sources() -> Sources:
    return Sources(ROOT)


def _places(functions: Iterable[Callable[..., Any]]) -> list[str]:
    """`path::name` of the functions and of what wraps them; one that somebody put in from outside has no file in the checkout."""
    found = set()
    for function in functions:
        innermost = inspect.unwrap(function)
        named = [(inspect.getsourcefile(innermost), innermost.__qualname__), *map(_wrapper, _wrappers(function))]
        for file, name in named:
            path = Path(file or "").resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                found.add(f"{path.relative_to(ROOT).as_posix()}::{name}")
    return sorted(found)


def _wrappers(function: Any) -> Iterator[Any]:
    """What stands around the innermost function, the outermost first."""
    while hasattr(function, "__wrapped__"):
        yield function
        function = function.__wrapped__


def _wrapper(wrapper: Any) -> tuple[str | None, str]:
    """Where a wrapper is defined, and its own name: functools.wraps gives it that of the function within."""
    code = getattr(wrapper, "__code__", None)
    if code is not None:
        return code.co_filename, code.co_qualname
    made = type(wrapper)
    return getattr(sys.modules.get(made.__module__), "__file__", None), made.__qualname__
