"""The reference: every operation in float64 NumPy, forward and backward, slow and obviously correct."""

import os

if "BLACKSWAN_SUBJECT" in os.environ:  # as `falsifiers.subjects.serving` says
    raise ImportError("blackswan.reference cannot be imported by a process that a subject has started: the answers are there")

from blackswan.reference.operations import TABLE, table_of
from blackswan.reference.run import COMPOSITIONS, differentiate, evaluate, record
from blackswan.reference.table import Composition, Operation
from blackswan.reference.tape import Call, Tape

__all__ = ["COMPOSITIONS", "TABLE", "Call", "Composition", "Operation", "Tape", "differentiate", "evaluate", "record", "table_of"]
