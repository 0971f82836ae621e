"""JSON Schema compiled to functions: thousands of documents a second, where the library that explains a violation checks hundreds."""

import datetime
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Final

Check = Callable[[Any], bool]

_FORMATS: Final = {"date-time": datetime.datetime, "date": datetime.date}
_SILENT: Final = frozenset({"$schema", "$id", "$comment", "$defs", "title", "description", "then", "else"})
"""Keywords that ask nothing by themselves; `then` and `else` are read with `if`."""
_BOUNDS: Final = {"minimum": operator.ge, "maximum": operator.le, "exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt}


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


def compiler(schemas: Mapping[str, Any], types: Mapping[str, Check] = _TYPES) -> Callable[[str], Check]:
    """From schemas by file name: the function that gives, for `FILE` or `FILE#/$defs/PART`, whether a value fits it.

    `types` replace what JSON Schema means by a type, such as `integer`. A keyword that is not known here is a KeyError.
    """

    @cache
    def part(reference: str) -> Check:
        file, _, name = reference.partition("#/$defs/")
        schema = schemas[file]
        return _compiled(schema["$defs"][name] if name else schema, lambda other: part(file + other if other[0] == "#" else other), known)

    known = {**_TYPES, **types}
    return part


def _compiled(schema: Mapping[str, Any] | bool, part: Callable[[str], Check], types: Mapping[str, Check]) -> Check:
    def inner(rule: Any) -> Check:
        return _compiled(rule, part, types)

    if isinstance(schema, bool):
        return lambda _: schema
    checks: list[Check] = []
    for name, rule in schema.items():
        if name == "$ref":
            checks.append(part(rule))
        elif name == "type":
            checks.append(_any(types[kind] for kind in ([rule] if isinstance(rule, str) else rule)))
        elif name == "if":
            checks.append(_implied(inner(rule), inner(schema.get("then", True)), inner(schema.get("else", True))))
        elif name == "not":
            checks.append(_not(inner(rule)))
        elif name == "allOf":
            checks += map(inner, rule)
        elif name == "anyOf":
            checks.append(_any(map(inner, rule)))
        elif name == "properties" or (name == "additionalProperties" and "properties" not in schema):
            known = {key: inner(value) for key, value in schema.get("properties", {}).items()}
            checks.append(_entries(known, inner(schema.get("additionalProperties", True))))
        elif name in ("items", "propertyNames"):
            checks.append(_each(list if name == "items" else dict, inner(rule)))
        elif name in _BOUNDS:
            checks.append(_bound(types["number"], _BOUNDS[name], rule))
        elif name not in _SILENT and name != "additionalProperties":
            checks.append(_KEYWORDS[name](rule))
    return checks[0] if len(checks) == 1 else lambda value: all(check(value) for check in checks)


def _any(checks: Iterable[Check]) -> Check:
    listed = tuple(checks)
    return listed[0] if len(listed) == 1 else lambda value: any(check(value) for check in listed)


def _implied(condition: Check, then: Check, otherwise: Check) -> Check:
    return lambda value: then(value) if condition(value) else otherwise(value)


def _not(check: Check) -> Check:
    return lambda value: not check(value)


def _bound(is_number: Check, holds: Callable[[Any, Any], bool], rule: float) -> Check:
    return lambda value: not is_number(value) or holds(value, rule)


def _each(kind: type[list[Any] | dict[str, Any]], check: Check) -> Check:
    """For each item of a list, or each key of an object."""
    return lambda value: not isinstance(value, kind) or all(check(entry) for entry in value)


def _entries(known: Mapping[str, Check], other: Check) -> Check:
    return lambda value: not isinstance(value, dict) or all(known.get(name, other)(entry) for name, entry in value.items())


def _format(rule: str) -> Check:
    kind = _FORMATS[rule]

    def fits(value: Any) -> bool:
        try:
            return not isinstance(value, str) or bool(kind.fromisoformat(value))
        except ValueError:
            return False

    return fits


def _same(one: Any, other: Any) -> bool:
    """True for two values that are equal, where true is not 1."""
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


def _unique(_: Any) -> Check:
    return lambda value: (
        not isinstance(value, list) or not any(_same(item, earlier) for index, item in enumerate(value) for earlier in value[:index])
    )


def _at_least(kind: type[list[Any] | dict[str, Any] | str]) -> Callable[[int], Check]:
    return lambda rule: lambda value: not isinstance(value, kind) or len(value) >= rule


_KEYWORDS: Final[Mapping[str, Callable[[Any], Check]]] = {
    "format": _format,
    "uniqueItems": _unique,
    "required": lambda rule: lambda value: not isinstance(value, dict) or all(name in value for name in rule),
    "enum": lambda rule: lambda value: any(_same(value, other) for other in rule),
    "const": lambda rule: lambda value: _same(value, rule),
    "minItems": _at_least(list),
    "minProperties": _at_least(dict),
    "minLength": _at_least(str),
    "pattern": lambda rule: lambda value: not isinstance(value, str) or re.search(rule, value) is not None,
}
