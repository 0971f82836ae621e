"""Where the code begins that a claim's verdict depends on: entry files, whose imports are followed (reports.dependencies)."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from contracts.model import Claim
from falsifiers.checks import CHECKS
from falsifiers.kinds import KINDS
from falsifiers.mutants import USES
from reference import COMPOSITIONS, TABLE
from reference.table import Composition
from reports.dependencies import Sources

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "impl/kernels/functions.py"
_ALWAYS = ("falsifiers/attack.py", "falsifiers/engine.py", "falsifiers/strategies.py")


def entries(claim: Claim) -> dict[str, list[str]]:
    """Files from the checkout's root, by part: the reference of the operation, the subject's own code for it, and the comparison."""
    operations = sorted({claim.operation, *USES.get(claim.operation, ())}) if claim.operation else []
    return {
        "reference": _files(_of_reference(operations)) or _that_the_check_asks(claim),
        "subject": sorted({*_files(_of_subject(operations)), *_kernels(claim, operations)}),
        "comparison": sorted({*_ALWAYS, *_sometimes(claim), *_files([KINDS[claim.kind], *([CHECKS[claim.check]] if claim.check else [])])}),
    }


def _sometimes(claim: Claim) -> Iterator[str]:
    if claim.operation in TABLE or claim.operation in COMPOSITIONS:
        yield "falsifiers/subjects/implementation.py"
    if claim.domain.input == "checkpoint":
        yield "falsifiers/real_input.py"


def _of_reference(operations: Iterable[str]) -> list[Callable[..., Any]]:
    found = [entry for name in operations if (entry := COMPOSITIONS.get(name) or TABLE.get(name)) is not None]
    return [entry.build if isinstance(entry, Composition) else entry.forward for entry in found]


def _that_the_check_asks(claim: Claim) -> list[str]:
    """The reference's files of a claim whose operation has none there (a procedure's): what its check imports of them."""
    check = _files([CHECKS[claim.check]] if claim.check else [])
    return list(_imported_by_check(tuple(check)))


@functools.cache
def _imported_by_check(check: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(Sources(ROOT).imported("comparison", check, "reference"))


def _of_subject(operations: Iterable[str]) -> list[Callable[..., Any]]:
    """An elementary operation's own function; the subject's class for a composition, whose module imports the models; a procedure."""
    from falsifiers.subjects.implementation import Implementation
    from falsifiers.subjects.procedures import PROCEDURES, default_configurations
    from impl.operations import OPERATIONS

    tables: list[dict[str, Callable[..., Any]]] = [dict(OPERATIONS), dict(PROCEDURES), dict.fromkeys(COMPOSITIONS, Implementation)]
    return [table[name] for name in operations for table in tables if name in table] or [default_configurations]


def _kernels(claim: Claim, operations: Iterable[str]) -> list[str]:
    """The kernels, where a run on CUDA may have taken them for one of the operations."""
    from impl.kernels import NAMES

    return [KERNELS] if claim.path != "torch" and not set(NAMES).isdisjoint(operations) else []


def _files(functions: Iterable[Callable[..., Any]]) -> list[str]:
    """Where the functions are written; one that somebody put in from outside has no file in the checkout."""
    paths = {Path(inspect.getsourcefile(inspect.unwrap(function)) or "").resolve() for function in functions}
    return sorted(path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and path.is_relative_to(ROOT))
