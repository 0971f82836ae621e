"""The reference: every operation in float64 NumPy, forward and backward, slow and obviously correct."""

from reference.operations import TABLE
from reference.run import COMPOSITIONS, differentiate, evaluate, record
from reference.table import Composition, Operation
from reference.tape import Call, Tape

__all__ = ["COMPOSITIONS", "TABLE", "Call", "Composition", "Operation", "Tape", "differentiate", "evaluate", "record"]
