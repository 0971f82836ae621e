"""The two ways in which a step of training runs: what is claimed of either is asked of both."""

from blackswan.falsifiers.numeric.attack import Attack

ENGINES = ("torch", "fused")
"""Automatic differentiation, and the hand-written layers, which a GPU runs by default."""


def engines(attack: Attack) -> tuple[str, ...]:
    """Those that run where the subject does: the hand-written layers need a GPU."""
    return ENGINES if attack.subject.device.startswith("cuda") else ENGINES[:1]
