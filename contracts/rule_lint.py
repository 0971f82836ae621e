"""Static checks of hyperparameter rules: names, types, guards against missing fields, messages."""

import itertools
import random
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from blackswan.contracts.fields import CLIPPING, FIELDS, FUNCTIONS, SAMPLES, VARIABLES, ConfigError, checked, fields_of, split, variables
from blackswan.contracts.model import Range, Rule
from blackswan.contracts.problems import KeyPath, unknown
from blackswan.contracts.rules import LimitError, RuleError, compiled, evaluate, require_few_steps

Fault = tuple[KeyPath, str]

_BOUND = re.compile(r"\.(?:all|exists|exists_one|map|filter)\(\s*(\w+)\s*,")
_CASES = 24


def faults(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """All faults of a claim of kind rule, by key path within the claim."""
    rule = raw["rule"]
    found = [*_domain(raw["domain"]["scalars"]), *_expressions(raw), *_message(rule["message"]), *_examples(raw.get("examples", {}))]
    yield from found
    if not found:
        yield from _undrawn(rule, raw["domain"]["scalars"])
        yield from _failures(raw)


def parse(raw: Mapping[str, Any]) -> Rule:
    """The `rule` mapping of a claim as an object."""
    return Rule(raw["when"], raw["require"], raw["severity"], raw["message"], raw.get("recommend", {}))


def domain_choice(field: str, raw: Any) -> "Range | tuple[Any, ...]":
    """A field's choices in the field's type. ConfigError: unknown field, wrong type, empty range."""
    if not isinstance(raw, dict):
        return tuple(checked(field, value) for value in (raw if isinstance(raw, list) else [raw]))
    if field in FIELDS and FIELDS[field].type not in ("int", "real"):
        raise ConfigError(field, "cannot have a range; expected a list of choices")
    low, high = (checked(field, raw[end]) for end in ("min", "max"))
    if low > high:
        raise ConfigError(field, f"the range is empty: min {low} is more than max {high}")
    return Range(low, high)


def _domain(scalars: Mapping[str, Any]) -> Iterator[Fault]:
    for name, raw in scalars.items():
        yield from _field(("domain", "scalars", name), lambda name=name, raw=raw: domain_choice(name, raw))


def _field(path: KeyPath, check: Any) -> Iterator[Fault]:
    try:
        check()
    except ConfigError as error:
        yield path, str(error).removeprefix(f"{error.field}: ")


def _all_expressions(rule: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    for name in ("when", "require"):
        yield ("rule", name), rule[name]
    for name, expression in rule.get("recommend", {}).items():
        yield ("rule", "recommend", name), expression


def _expressions(raw: Mapping[str, Any]) -> Iterator[Fault]:
    rule, largest = raw["rule"], _largest(raw)
    for path, expression in _all_expressions(rule):
        try:
            program, names = compiled(expression)
            require_few_steps(expression, largest)
        except LimitError as error:
            yield path, str(error)
            continue
        except ValueError as error:
            yield path, f"is not CEL: {_syntax(str(error))}"
            continue
        for name in sorted(set(names) - set(VARIABLES) - set(_BOUND.findall(expression))):
            yield path, unknown("variable", name, VARIABLES)
        for name in program.functions():
            if name.isidentifier() and name not in FUNCTIONS:
                yield path, unknown("function", name, FUNCTIONS)
    for name in rule.get("recommend", {}):
        allowed = [field for field, spec in FIELDS.items() if spec.recommendable]
        if name not in allowed:
            yield ("rule", "recommend", name), unknown("field to recommend", name, allowed)


def _largest(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The longest list or text that the domain and the examples give each field."""
    given = [(name, value) for listed in raw.get("examples", {}).values() for example in listed for name, value in example.items()]
    for name, choices in raw["domain"]["scalars"].items():
        given += [(name, value) for value in (choices if isinstance(choices, list) else [choices])]
    found: dict[str, Any] = {}
    for name, value in given:
        if isinstance(value, list | str) and len(value) >= len(found.get(name, "")):
            found[name] = value
    return found


def _syntax(message: str) -> str:
    detail = message.split("ERROR: <input>:")[-1].splitlines()[0]
    return detail.split(" expecting ")[0].replace("Syntax error: ", "column ", 0)


def _message(message: str) -> Iterator[Fault]:
    path = ("rule", "message")
    try:
        parts = list(string.Formatter().parse(message))
    except ValueError as error:
        yield path, f"is not a format: {error}"
        return
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if name not in VARIABLES:
            yield path, unknown("placeholder", name, VARIABLES)
        elif re.search(r"\d{3}", spec or ""):
            yield path, f"the format {spec!r} has a number above 99; expected a shorter width or precision"
        elif conversion:
            yield path, f"the placeholder {{{name}}} has a conversion !{conversion}; expected {{name}} or {{name:format}}"
        else:
            try:
                format(_sample(name), spec or "")
            except (ValueError, TypeError) as error:
                yield path, f"the format {spec!r} does not fit {name}: {error}"


def _sample(name: str) -> Any:
    if name in FIELDS:
        return SAMPLES[FIELDS[name].type]
    return True if name == CLIPPING else 1


def _examples(examples: Mapping[str, Any]) -> Iterator[Fault]:
    for kind, listed in examples.items():
        for index, example in enumerate(listed):
            for name, value in example.items():
                yield from _field(("examples", kind, index, name), lambda name=name, value=value: checked(name, value))


def _undrawn(rule: Mapping[str, Any], scalars: Mapping[str, Any]) -> Iterator[Fault]:
    """A rule that reads what its domain never gives is never put to the test."""
    for path, expression in _all_expressions(rule):
        for name in compiled(expression)[1]:
            for need in sorted(fields_of([name], optional=True)):
                if need not in scalars:
                    yield path, f"reads {name!r}, and domain.scalars does not draw {need!r}"


def _failures(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """Evaluates the rule on corners of its domain, complete and with each field missing; the first failure is reported."""
    rule = parse(raw["rule"])
    for values in _cases({name: domain_choice(name, choice) for name, choice in raw["domain"]["scalars"].items()}):
        for left_out in (None, *values):
            config, statistics = split({name: value for name, value in values.items() if name != left_out})
            try:
                evaluate(rule, variables(config, statistics))
            except RuleError as error:
                yield (
                    ("rule",),
                    f"cannot be evaluated ({error}); expected expressions and a message that give a value on all of domain.scalars",
                )
                return
            except ValueError as error:
                missing = f"; a missing field is null: guard with `{left_out} != null`"
                hint = missing if left_out else "; numbers are doubles: write 2.0, not 2"
                yield ("rule",), f"{error}{hint}"
                return


def _cases(choices: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    ends = {name: (choice.min, choice.max) if isinstance(choice, Range) else choice for name, choice in choices.items()}
    total = 1
    for values in ends.values():
        total *= len(values)
    if total <= _CASES:
        yield from (dict(zip(ends, combination, strict=True)) for combination in itertools.product(*ends.values()))
        return
    draw = random.Random(0)  # noqa: S311  # a reproducible sample, not a secret
    yield from ({name: draw.choice(values) for name, values in ends.items()} for _ in range(_CASES))
