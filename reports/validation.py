"""Records held to verdict.schema.json, compiled once: thousands a second, where the library that explains a violation checks hundreds."""

import datetime
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

Check = Callable[[Any], bool]

_FORMATS: Final = {"date-time": datetime.datetime, "date": datetime.date}
_SILENT: Final = frozenset({"$schema", "$id", "$defs", "title", "description", "then", "items", "additionalProperties"})
"""Keywords that say nothing by themselves; the last three are read with `if`, `type` and `properties`."""


def _type(name: str) -> Check:
    return {
        "object": lambda value: isinstance(value, dict),
        "array": lambda value: isinstance(value, list),
        "string": lambda value: isinstance(value, str),
        "boolean": lambda value: isinstance(value, bool),
        "null": lambda value: value is None,
        "number": _is_number,
        "integer": lambda value: _is_number(value) and value == value // 1,
    }[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_format(kind: type[datetime.date], text: Any) -> bool:
    try:
        return not isinstance(text, str) or bool(kind.fromisoformat(text))
    except ValueError:
        return False


class Compiler:
    """Turns the schema into functions from a value to whether it fits. A keyword that it does not know is a KeyError when it compiles."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._definitions = schema["$defs"]
        self._compiled: dict[str, Check] = {}

    def definition(self, name: str) -> Check:
        """The check of `$defs/name`."""
        if name not in self._compiled:
            self._compiled[name] = self._schema(self._definitions[name])
        return self._compiled[name]

    def _schema(self, schema: Any) -> Check:
        checks = [getattr(self, _KEYWORDS[name])(rule, schema) for name, rule in schema.items() if name not in _SILENT]
        if "items" in schema:
            item = self._schema(schema["items"])
            checks.append(lambda value: not isinstance(value, list) or all(map(item, value)))
        if "additionalProperties" in schema and "properties" not in schema:
            checks.append(self._properties({}, schema))
        return lambda value: all(check(value) for check in checks)

    def _ref(self, rule: str, _: Any) -> Check:
        return self.definition(rule.removeprefix("#/$defs/"))

    def _types(self, rule: Any, _: Any) -> Check:
        checks = [_type(name) for name in ([rule] if isinstance(rule, str) else rule)]
        return lambda value: any(check(value) for check in checks)

    def _properties(self, rule: Mapping[str, Any], schema: Any) -> Check:
        known = {name: self._schema(part) for name, part in rule.items()}
        others = schema.get("additionalProperties", {})
        other = None if others is False else self._schema(others)

        def fits(value: Any) -> bool:
            if not isinstance(value, dict):
                return True
            for name, entry in value.items():
                check = known.get(name, other)
                if check is None or not check(entry):
                    return False
            return True

        return fits

    def _property_names(self, rule: Any, _: Any) -> Check:
        check = self._schema(rule)
        return lambda value: not isinstance(value, dict) or all(map(check, value))

    def _required(self, rule: list[str], _: Any) -> Check:
        return lambda value: not isinstance(value, dict) or all(name in value for name in rule)

    def _all_of(self, rule: list[Any], _: Any) -> Check:
        checks = [self._schema(part) for part in rule]
        return lambda value: all(check(value) for check in checks)

    def _if(self, rule: Any, schema: Any) -> Check:
        condition, then = self._schema(rule), self._schema(schema["then"])
        return lambda value: not condition(value) or then(value)

    def _enum(self, rule: list[Any], _: Any) -> Check:
        return lambda value: any(type(value) is type(other) and value == other for other in rule)

    def _const(self, rule: Any, _: Any) -> Check:
        return lambda value: type(value) is type(rule) and bool(value == rule)

    def _minimum(self, rule: float, _: Any) -> Check:
        return lambda value: not _is_number(value) or value >= rule

    def _maximum(self, rule: float, _: Any) -> Check:
        return lambda value: not _is_number(value) or value <= rule

    def _min_length(self, rule: int, _: Any) -> Check:
        return lambda value: not isinstance(value, str) or len(value) >= rule

    def _pattern(self, rule: str, _: Any) -> Check:
        pattern = re.compile(rule)
        return lambda value: not isinstance(value, str) or pattern.search(value) is not None

    def _format(self, rule: str, _: Any) -> Check:
        kind = _FORMATS[rule]
        return lambda value: _has_format(kind, value)

    def _unique(self, rule: bool, _: Any) -> Check:
        return lambda value: not (rule and isinstance(value, list)) or all(item not in value[:index] for index, item in enumerate(value))


_KEYWORDS: Final = {
    "$ref": "_ref",
    "type": "_types",
    "properties": "_properties",
    "propertyNames": "_property_names",
    "required": "_required",
    "allOf": "_all_of",
    "if": "_if",
    "enum": "_enum",
    "const": "_const",
    "minimum": "_minimum",
    "maximum": "_maximum",
    "minLength": "_min_length",
    "pattern": "_pattern",
    "format": "_format",
    "uniqueItems": "_unique",
}
