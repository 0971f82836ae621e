"""Hyperparameter rules in CEL: their limits, their compilation and their evaluation on the fields of one configuration."""

import importlib
import re
import string
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from blackswan.contracts.fields import CONFIG, ConfigError, as_double, checked, from_double
from blackswan.contracts.model import Rule

if "cel" not in sys.modules:  # the package imports its command line as well, which takes ten times as long as the engine
    sys.modules["cel.cli"] = ModuleType("cel.cli")
    importlib.import_module("cel")
    del sys.modules["cel.cli"]
import cel

_UNFORESEEN: Final = (ArithmeticError, LookupError)
"""The errors that CEL raises where a rule divides by zero or indexes past a list."""

LONGEST: Final = 1_000
"""Characters of an expression. The CEL engine recurses by its terms: 2,000 characters overflow a stack of 512 KiB, 200,000 one of 8 MiB."""
DEEPEST: Final = 16
"""Brackets within brackets of an expression."""
MOST_STEPS: Final = 200_000
"""Steps of evaluating an expression, as `steps` bounds them: a tenth of a second."""
_PASSES: Final = {"all": 1, "exists": 1, "exists_one": 1, "existsOne": 1, "map": 2, "filter": 2}
"""Macros that go through a list, with the power of its length that they take: map and filter copy their result at each entry."""
_PATTERN_STEPS: Final = 20_000
"""Steps of compiling a regular expression that is as large as the engine allows."""
_OPEN, _CLOSED = frozenset("([{"), frozenset(")]}")
_TOKEN: Final = re.compile(
    r"""//[^\n]* | [bB]?[rR][bB]?(?:\"{3}[\s\S]*?\"{3} | '{3}[\s\S]*?'{3} | "[^"\n]*" | '[^'\n]*')
    | [bB]?(?:"{3}(?:\\[\s\S]|[^\\])*?"{3} | '{3}(?:\\[\s\S]|[^\\])*?'{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*')
    | (\w+ | [^\w\s])""",
    re.VERBOSE,
)
"""Comments and texts, which have no group, and what an expression is made of beside them."""


class LimitError(ValueError):
    """A rule that asks for more than an evaluation may take; the message says of what, and how much it may be."""


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
    """A CEL program and the names in it, those bound by all, exists, map or filter included.

    ValueError on bad syntax, LimitError on an expression that is too long or too deep, before the engine sees it.
    """
    if len(expression) > LONGEST:
        raise LimitError(f"is an expression of {len(expression):,} characters; expected at most {LONGEST:,}")
    deepest = depth = 0
    for token in _tokens(expression):
        depth += (token in _OPEN) - (token in _CLOSED)
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise LimitError(f"has brackets nested {deepest} deep; expected at most {DEEPEST}")
    program = cel.compile(expression)
    return program, tuple(program.variables())


def _tokens(expression: str) -> list[str]:
    return [token for token in _TOKEN.findall(expression) if token]


def steps(expression: str, values: Mapping[str, Any]) -> int:
    """An upper bound of the steps that an evaluation takes, from the lengths of the lists and texts that it names, without making any.

    Every list of the evaluation is at most as long as all that the expression names together. A macro that goes through one multiplies what
    stands in its brackets by that length, once for each macro around it.
    """
    tokens = _tokens(expression)
    sizes = [_PATTERN_STEPS if word == "matches" else _size(values.get(word)) for word in tokens]
    longest, factors, total = sum(sizes), [1], 0
    for before, token, size in zip(["", *tokens], tokens, sizes, strict=False):
        if token in _OPEN:
            factors.append(factors[-1] * longest ** _PASSES.get(before, 0))
        elif token in _CLOSED and len(factors) > 1:
            factors.pop()
        total += factors[-1] * size
    return total


def _size(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(_size, value))
    return 1 + len(value) if isinstance(value, str) else 1


def require_few_steps(expression: str, values: Mapping[str, Any]) -> None:
    """LimitError where evaluating an expression on these values may take too many steps."""
    if (most := steps(expression, values)) > MOST_STEPS:
        raise LimitError(f"may take {most:.2g} steps, by the lengths of its lists and texts; expected at most {MOST_STEPS:,}")


def evaluate(rule: Rule, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Message and recommendation where the rule is violated, none where it holds or does not apply.

    Raises a ValueError on a faulty rule, and of these a RuleError on one that has no value here, a LimitError on one that takes too long.
    """
    try:
        return _evaluated(rule, values)
    except _UNFORESEEN as error:
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
        require_few_steps(expression, used)
    except LimitError as error:
        raise LimitError(f"{place} {expression!r} {error}") from None
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
        return checked(name, from_double(name, _run("recommend", expression, doubles)), fields=CONFIG)
    except ConfigError as error:
        raise ValueError(f"recommend {expression!r}: {error}") from error


def apply(config: Mapping[str, Any], recommendation: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with recommended values in place. ConfigError on a field that does not exist or a wrong type."""
    return {**config, **{name: checked(name, from_double(name, value), fields=CONFIG) for name, value in recommendation.items()}}
