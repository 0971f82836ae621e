"""Checks documents against the schemas, and says what is wrong in the document's words instead of the schema's.

The compiled schemas let through what fits; jsonschema, which takes longer to import than that, explains the rest.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blackswan.contracts.document import Document
from blackswan.contracts.problems import KeyPath, unknown
from blackswan.contracts.tables import DTYPES, FLAVOURS
from blackswan.contracts.validation import Check, compiler

if TYPE_CHECKING:
    from jsonschema import ValidationError

_FOLDER = Path(__file__).parent
_FILES = ("contract.schema.json", "vocabulary.schema.json")
_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "string": "text",
    "number": "a finite number",
    "integer": "an integer of 64 bits",
    "boolean": "true or false",
    "null": "null",
}


def _is_integer(value: Any) -> bool:
    """True for an integer of 64 bits. JSON Schema counts 1.0 as an integer too."""
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64


def _is_number(value: Any) -> bool:
    """True for what a float can hold. Nothing can be computed with an integer beyond that; JSON Schema lets NaN pass every bound."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_TYPES: Mapping[str, Check] = {"integer": _is_integer, "number": _is_number}


@cache
def schemas() -> dict[str, Any]:
    """The schema files by name, with the names of dtypes and flavours filled in."""
    found = {name: json.loads((_FOLDER / name).read_text(encoding="utf-8")) for name in _FILES}
    shared = found["contract.schema.json"]["$defs"]
    shared["dtype"] |= {"enum": list(DTYPES), "description": f"one of {', '.join(DTYPES)}"}
    shared["flavour"]["enum"] = list(FLAVOURS)
    shared["tolerance"]["properties"]["factors"]["properties"] |= {name: {"$ref": "#/$defs/factors"} for name in DTYPES}
    return found


def kinds() -> tuple[str, ...]:
    """The kinds of claims."""
    return tuple(schemas()["contract.schema.json"]["$defs"]["kind"]["enum"])


@cache
def _compiled() -> Callable[[str], Check]:
    return compiler(schemas(), _TYPES)


@cache
def _validator(reference: str) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    types = {name: lambda _, value, check=check: check(value) for name, check in _TYPES.items()}
    kind: Any = extend(Draft202012Validator, type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(types))  # type: ignore[no-untyped-call]
    # Where a schema says $schema, jsonschema goes back to its own type checker.
    bare = {name: {key: value for key, value in schema.items() if key != "$schema"} for name, schema in schemas().items()}
    registry: Any = Registry().with_resources((name, DRAFT202012.create_resource(schema)) for name, schema in bare.items())
    return kind({"$ref": reference}, registry=registry)


def violations(document: Document, reference: str) -> Iterator[tuple[KeyPath, str]]:
    """Key path and message of each violation of a schema (`contract.schema.json`, `vocabulary.schema.json#/$defs/checks`)."""
    if _compiled()(reference)(document.data):
        return
    for error in _validator(reference).iter_errors(document.data):
        path = tuple(error.absolute_path)
        yield from ((path + key, message) for key, message in _translate(error, path, document.data))


def _translate(error: "ValidationError", path: KeyPath, data: Any) -> Iterator[tuple[KeyPath, str]]:
    instance: Any = error.instance
    rule: Any = error.validator_value
    schema: Any = error.schema
    description = schema.get("description")
    if "propertyNames" in error.absolute_schema_path:
        yield (instance,), f"is named {instance!r}; expected {description}"
        return
    match error.validator:
        case "additionalProperties":
            for name in instance.keys() - schema.get("properties", {}).keys():
                yield (name,), unknown("key", name, schema.get("properties", {})) + _situation(error, data)
        case "required":
            for name in [name for name in rule if name not in instance and repr(name) in error.message]:
                yield (), f"missing key {name!r}{_situation(error, data)}"
        case "not":
            yield (), f"is not allowed here{_situation(error, data)}"
        case "enum":
            name = str(path[-1] if isinstance(path[-1], str) else path[-2])
            lines = "; ".join(f"{flavour}: {line}" for flavour, line in FLAVOURS.items()) if name in ("flavour", "flavours") else ""
            yield (), unknown(name, instance, map(str, rule)) + (f" ({lines})" if lines else "")
        case "type":
            kinds = [rule] if isinstance(rule, str) else rule
            yield (), f"is {shown(instance)}; expected {description or ' or '.join(_NAMES[kind] for kind in kinds)}"
        case "pattern":
            yield (), f"is {shown(instance)}; expected {description}"
        case "minItems" | "minProperties":
            yield (), f"is empty; expected at least {rule} {'entry' if rule == 1 else 'entries'}"
        case "uniqueItems":
            twice = next(item for index, item in enumerate(instance) if item in instance[:index])
            yield (), f"contains {shown(twice)} twice"
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            bound = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "more than", "exclusiveMaximum": "less than"}
            yield (), f"is {shown(instance)}; expected {bound[error.validator]} {rule}"
        case "const":
            yield (), f"is {shown(instance)}; expected {shown(rule)}"
        case _:
            yield (), error.message


def _situation(error: "ValidationError", data: Any) -> str:
    """The reason why a conditional part of the schema applies: the claim's kind, the tolerance's basis or the domain's input."""
    conditional = {"then", "else"} & set(map(str, error.absolute_schema_path))
    if not conditional:
        return ""
    place, settings = data, ""
    for part in (None, *error.absolute_path):
        place = place if part is None else place[part]
        for name in ("kind", "basis", "input", "group", "type"):
            if isinstance(place, dict) and isinstance(place.get(name), str | bool):
                settings = f" ({name}: {shown(place[name]).strip(chr(39))})"
    return settings


def shown(value: Any) -> str:
    """A value as it may be written in a message."""
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value)
    text = text if len(text) <= 60 else f"{text[:60]}…"
    return repr(text) if isinstance(value, str) else text
