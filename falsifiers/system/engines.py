"""The two ways in which a step of training runs: what is claimed of either is asked of both."""

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.system.trial import Trial

ENGINES = ("torch", "fused")
"""Automatic differentiation, and the hand-written layers, which a GPU runs by default."""


def engines(asked: Attack | Trial) -> tuple[str, ...]:
    """Those that run where the subject does: the hand-written layers need a GPU."""
    return ENGINES if asked.subject.device.startswith("cuda") else ENGINES[:1]
