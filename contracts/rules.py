"""Hyperparameter diagnostics: the rules of contracts, evaluated on a configuration and the statistics of its data."""

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import cel

from blackswan.contracts.fields import CONFIG, ConfigError, as_double, checked, variables
from blackswan.contracts.model import Claim, Rule
from blackswan.contracts.problems import ContractError, Problem


@dataclass(frozen=True)
class Diagnostic:
    """What a rule says about a configuration. Severity is info, warn or error; only errors stop a run."""

    rule: str
    contract: str
    severity: str
    message: str
    recommendation: dict[str, Any] = field(default_factory=dict)


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
    """Message and recommendation where the rule is violated, none where it holds or does not apply. ValueError on a faulty rule."""
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


def diagnose(
    config: Mapping[str, Any], statistics: Mapping[str, Any] | None = None, rules: Iterable[Claim] | None = None
) -> list[Diagnostic]:
    """What the rules say about a configuration, errors first; a field or statistic that is not given is no finding.

    `rules` are claims of kind rule, by default those of all contracts. ConfigError: unknown field, or a value of a wrong type.
    """
    values = variables(config, statistics or {})
    found = []
    for claim in _installed() if rules is None else rules:
        if claim.rule is None:
            continue
        try:
            finding = evaluate(claim.rule, values)
        except ValueError as error:
            raise ContractError([Problem(*claim.location, claim.id, str(error))]) from error
        if finding:
            found.append(Diagnostic(claim.id, claim.contract, claim.rule.severity, *finding))
    return sorted(found, key=lambda diagnostic: ("error", "warn", "info").index(diagnostic.severity))


@lru_cache(maxsize=1)
def _installed() -> tuple[Claim, ...]:
    from blackswan.contracts.loader import load  # the loader compiles rules

    return tuple(claim for contract in load() for claim in contract.claims if claim.rule)


def apply(config: Mapping[str, Any], recommendation: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with recommended values in place. ConfigError on a field that does not exist or a wrong type."""
    return {**config, **{name: checked(name, value, fields=CONFIG) for name, value in recommendation.items()}}
