"""Asks a subject, and says how it failed to answer: it raised, or answered with something else than arrays, or with NaN."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np

from blackswan.falsifiers.numeric.comparison import NO_ANSWER, Comparison, broken
from blackswan.falsifiers.numeric.precision import is_real
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.reference.table import Array

NOT_FINITE = "not a finite number"


class SubjectError(Exception):
    """The subject gave no answer: it raised (then the cause is what it raised), or returned something else than arrays by name."""


class NotFiniteError(SubjectError):
    """The subject answered with NaN or an infinity where a check compares numbers."""

    def __init__(self, tensor: str, index: tuple[int, ...], value: float) -> None:
        where = f"{tensor} at {list(index)}" if index else tensor
        super().__init__(f"answered with {value} in {where}; expected a finite number")
        self.comparison = broken(tensor, NOT_FINITE, "a finite number", value, index)


def require_finite(answer: Mapping[str, Array], may: Iterable[str]) -> None:
    """NotFiniteError at the first number that is none, in an output that no pattern of `may` names."""
    for name, value in answer.items():
        if is_real(value) and not np.isfinite(value).all() and not any(fnmatchcase(name, pattern) for pattern in may):
            index = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
            raise NotFiniteError(name, index, float(value[index]))


def asked(inputs: Mapping[str, Array], ask: Callable[[dict[str, Array]], object]) -> dict[str, Array]:
    """The answer to copies of the inputs, itself a copy: a subject that writes to either changes neither the case nor an earlier answer."""
    given = {name: value.copy() for name, value in inputs.items()}
    failure: Exception | None = None
    answer: object = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a subject that warns has not left the claim, whatever pytest makes of warnings
            answer = ask(dict(given))
    except (Lacks, SubjectError):
        raise
    except Exception as error:  # whatever a subject raises, where it had to answer, is a finding about the subject
        failure = error
    changed = [name for name, value in inputs.items() if value.tobytes() != given[name].tobytes()]
    if changed:
        raise SubjectError(f"changed its input {changed[0]} in place")
    if failure is not None:
        raise SubjectError(f"raised {type(failure).__name__}: {failure}") from failure
    if not isinstance(answer, Mapping) or not all(isinstance(value, np.ndarray) for value in answer.values()):
        raise SubjectError(f"answered with {_kind(answer)}; expected arrays by name")
    return {name: value.copy() for name, value in answer.items()}


def _kind(answer: object) -> str:
    if not isinstance(answer, Mapping):
        return type(answer).__name__
    return ", ".join(f"{name}: {type(value).__name__}" for name, value in answer.items())


def raised(error: SubjectError) -> Comparison:
    """The comparison of an answer that never came, or that no number can be compared with."""
    return error.comparison if isinstance(error, NotFiniteError) else broken(NO_ANSWER, str(error))
