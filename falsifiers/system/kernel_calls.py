"""Triton's kernels as functions on tensors: in given memory, of 16 bits, in the places of operations, and on packed sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial

ROWS = 5
"""So few that with a row of three numbers a pair of NF4 codes has one number, and a tile more rows than there are."""


def keep_to_their_memory(trial: Trial) -> list[Comparison]:
    """Kernels write all of what they are given to write into and nothing beside, over inputs where they say so, and refuse what does not
    fit."""
    return [each for name, right, found in trial.kernels.memory(ROWS) for each in same(name, right, found)]


def round_once(trial: Trial) -> list[Comparison]:
    """On 16 bits kernels give what they give for the same numbers in 32, rounded once, and parts that are kept are rounded between."""
    return [each for name, right, found in trial.kernels.rounded(ROWS) for each in same(name, right, found)]


def stand_for_operations(trial: Trial) -> list[Comparison]:
    """Kernels in the places of operations take arrays as these lie, and the dtypes that these take, and refuse what has no answer."""
    return _near(trial, trial.kernels.stand_ins())


def attend_within_sequences(trial: Trial) -> list[Comparison]:
    """Attention of packed sequences, of no token too, beside tokens of none and with another scale."""
    return _near(trial, trial.kernels.packed())


def _near(trial: Trial, answers: Sequence[tuple[str, Any, Any]]) -> list[Comparison]:
    found = []
    for name, right, answer in answers:
        found += [trial.near(name, right, answer)] if isinstance(right, np.ndarray) else same(name, right, answer)
    return found
