"""Kinds whose comparison is a named check: invariant, metamorphic, roundtrip, rejection, determinism, bound, resource, device."""

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.runner.checks import CHECKS


def run_check(attack: Attack, case: Case) -> list[Comparison]:
    """What the claim's check compares on the case."""
    assert attack.claim.check is not None
    return CHECKS[attack.claim.check](attack, case)
