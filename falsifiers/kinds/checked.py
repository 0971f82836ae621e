"""Kinds whose comparison is a named check: invariant, metamorphic, roundtrip, rejection, determinism, bound, resource, device."""

from falsifiers.attack import Attack
from falsifiers.case import Case
from falsifiers.checks import CHECKS
from falsifiers.comparison import Comparison


def run_check(attack: Attack, case: Case) -> list[Comparison]:
    """What the claim's check compares on the case."""
    assert attack.claim.check is not None
    return CHECKS[attack.claim.check](attack, case)
