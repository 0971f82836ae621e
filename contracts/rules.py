"""Hyperparameter rules in CEL: their compilation and their evaluation on the fields of one configuration."""

import string
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import cel

from blackswan.contracts.fields import CONFIG, ConfigError, as_double, checked
from blackswan.contracts.model import Rule

UNFORESEEN: Final = (ArithmeticError, LookupError, MemoryError)
"""How CEL and the formatting of a message end where a rule divides by zero, indexes past a list or asks for a line of many gigabytes."""


class RuleError(ValueError):
    """A rule that has no value on these fields, such as one that divides by zero; the message is the error's name and text."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


class _Message(string.Formatter):
    """Formats what is known; a quantity that is not reads as `unknown`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "unknown" if value is None else format(value, format_spec if not isinstance(value, list) else "")


@lru_cache(maxsize=1024)
def compiled(expression: str) -> tuple[cel.Program, tuple[str, ...]]:
    """A CEL program and the names in it, those bound by all, exists, map or filter included. ValueError on bad syntax."""
    program = cel.compile(expression)
    return program, tuple(program.variables())


def evaluate(rule: Rule, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Message and recommendation where the rule is violated, none where it holds or does not apply.

    Raises a ValueError on a faulty rule, and of these a RuleError on one that has no value here.
    """
    try:
        return _evaluated(rule, values)
    except UNFORESEEN as error:
        raise RuleError(error) from error


def _evaluated(rule: Rule, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    doubles = {name: as_double(value) for name, value in values.items()}
    if not _truth("when", rule.when, doubles) or _truth("require", rule.require, doubles):
        return None
    recommendation = {name: _recommended(name, expression, doubles) for name, expression in rule.recommend.items()}
    return _Message().vformat(rule.message, (), values), recommendation


def _run(place: str, expression: str, doubles: Mapping[str, Any]) -> Any:
    program, names = compiled(expression)
    used = {name: doubles[name] for name in names if name in doubles}
    try:
        return program.execute(used)
    except (ValueError, TypeError, RuntimeError) as error:
        given = ", ".join(f"{name} = {'null' if value is None else value}" for name, value in used.items())
        raise ValueError(f"{place} {expression!r} fails with {given or 'no variables'}: {str(error).split('. ')[0]}") from error


def _truth(place: str, expression: str, doubles: Mapping[str, Any]) -> bool:
    result = _run(place, expression, doubles)
    if not isinstance(result, bool):
        raise ValueError(f"{place} {expression!r} gives {result!r}; expected true or false")
    return result


def _recommended(name: str, expression: str, doubles: Mapping[str, Any]) -> Any:
    try:
        return checked(name, _run("recommend", expression, doubles), fields=CONFIG)
    except ConfigError as error:
        raise ValueError(f"recommend {expression!r}: {error}") from error


def apply(config: Mapping[str, Any], recommendation: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with recommended values in place. ConfigError on a field that does not exist or a wrong type."""
    return {**config, **{name: checked(name, value, fields=CONFIG) for name, value in recommendation.items()}}
