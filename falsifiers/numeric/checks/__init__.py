"""The named checks of contracts/checks.yaml, one function each: a claim about arrays names one where it compares more than plain parity."""

from collections.abc import Callable
from typing import TypeVar

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks import large, layers, losses, models, nf4, optimiser, refusals, relations, roundings, slopes
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.precision import checks

_MODULES = (relations, large, layers, losses, nf4, optimiser, slopes, models, refusals, roundings)
NamedCheck = Callable[[Attack, Case], list[Comparison]]
F = TypeVar("F", bound=NamedCheck)
CHECKS: dict[str, NamedCheck] = {name: getattr(module, name) for name in checks() for module in _MODULES if hasattr(module, name)}


def named_check(function: F) -> F:
    """Enters a check of a user's own under its name, which a checks.yaml declares. ValueError where there is a check of that name."""
    if function.__name__ in CHECKS:
        raise ValueError(f"there is a check {function.__name__!r} already; expected another name")
    CHECKS[function.__name__] = function
    return function
