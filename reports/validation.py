"""Records held to verdict.schema.json, compiled once: thousands a second, where the library that explains a violation checks hundreds."""

import datetime
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

Check = Callable[[Any], bool]

_FORMATS: Final = {"date-time": datetime.datetime, "date": datetime.date}
_SILENT: Final = frozenset({"title", "description", "then"})
"""Keywords that ask nothing by themselves; `then` is read with `if`."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Final[Mapping[str, Check]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == value // 1,
}


def compiler(schema: Mapping[str, Any]) -> Callable[[str], Check]:
    """From a schema whose parts are all in its `$defs`: the function that gives, for the name of a part, whether a value fits it.

    A keyword that is not known here is a KeyError when the part is compiled.
    """

    @cache
    def part(name: str) -> Check:
        return _compiled(schema["$defs"][name.removeprefix("#/$defs/")], part)

    return part


def _compiled(schema: Mapping[str, Any], part: Callable[[str], Check]) -> Check:
    def inner(rule: Any) -> Check:
        return _compiled(rule, part)

    checks: list[Check] = []
    for name, rule in schema.items():
        if name == "$ref":
            checks.append(part(rule))
        elif name == "if":
            checks.append(_implied(inner(rule), inner(schema["then"])))
        elif name == "allOf":
            checks += map(inner, rule)
        elif name == "properties" or (name == "additionalProperties" and "properties" not in schema):
            others = schema.get("additionalProperties", {})
            known = {key: inner(value) for key, value in schema.get("properties", {}).items()}
            checks.append(_entries(known, None if others is False else inner(others)))
        elif name in ("items", "propertyNames"):
            checks.append(_each(list if name == "items" else dict, inner(rule)))
        elif name not in (*_SILENT, "additionalProperties"):
            checks.append(_KEYWORDS[name](rule))
    return lambda value: all(check(value) for check in checks)


def _implied(condition: Check, then: Check) -> Check:
    return lambda value: not condition(value) or then(value)


def _each(kind: type[list[Any] | dict[str, Any]], check: Check) -> Check:
    """For each item of a list, or each key of an object."""
    return lambda value: not isinstance(value, kind) or all(check(entry) for entry in value)


def _entries(known: Mapping[str, Check], other: Check | None) -> Check:
    def fits(value: Any) -> bool:
        if not isinstance(value, dict):
            return True
        return all((check := known.get(name, other)) is not None and check(entry) for name, entry in value.items())

    return fits


def _type(rule: str | list[str]) -> Check:
    checks = [_TYPES[name] for name in ([rule] if isinstance(rule, str) else rule)]
    return lambda value: any(check(value) for check in checks)


def _format(rule: str) -> Check:
    kind = _FORMATS[rule]

    def fits(value: Any) -> bool:
        try:
            return not isinstance(value, str) or bool(kind.fromisoformat(value))
        except ValueError:
            return False

    return fits


def _unique(_: Any) -> Check:
    return lambda value: not isinstance(value, list) or all(item not in value[:index] for index, item in enumerate(value))


_KEYWORDS: Final[Mapping[str, Callable[[Any], Check]]] = {
    "type": _type,
    "format": _format,
    "uniqueItems": _unique,
    "required": lambda rule: lambda value: not isinstance(value, dict) or all(name in value for name in rule),
    "enum": lambda rule: lambda value: any(type(value) is type(other) and value == other for other in rule),
    "const": lambda rule: lambda value: type(value) is type(rule) and bool(value == rule),
    "minimum": lambda rule: lambda value: not _is_number(value) or value >= rule,
    "maximum": lambda rule: lambda value: not _is_number(value) or value <= rule,
    "minLength": lambda rule: lambda value: not isinstance(value, str) or len(value) >= rule,
    "pattern": lambda rule: lambda value: not isinstance(value, str) or re.search(rule, value) is not None,
}
