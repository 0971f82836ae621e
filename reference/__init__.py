"""The reference: every operation in float64 NumPy, forward and backward, slow and obviously correct."""

from blackswan.reference.operations import TABLE, table_of
from blackswan.reference.run import COMPOSITIONS, differentiate, evaluate, record
from blackswan.reference.table import Composition, Operation
from blackswan.reference.tape import Call, Tape

__all__ = ["COMPOSITIONS", "TABLE", "Call", "Composition", "Operation", "Tape", "differentiate", "evaluate", "record", "table_of"]
