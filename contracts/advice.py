"""Advice on a configuration: the rules of contracts, evaluated on its fields and on the statistics of its data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from blackswan.contracts.fields import variables
from blackswan.contracts.loader import load
from blackswan.contracts.model import Claim
from blackswan.contracts.problems import ContractError, Problem
from blackswan.contracts.rules import RuleError, evaluate


@dataclass(frozen=True)
class Finding:
    """What a rule says about a configuration. Severity is info, warn or error; only errors stop a run."""

    rule: str
    contract: str
    severity: str
    message: str
    recommendation: dict[str, Any] = field(default_factory=dict)


def check(config: Mapping[str, Any], statistics: Mapping[str, Any] | None = None, rules: Iterable[Claim] | None = None) -> list[Finding]:
    """What the rules say about a configuration, errors first; a field or statistic that is not given is no finding.

    `rules` are claims of kind rule, by default those of all contracts. ConfigError: unknown field, or a value of a wrong type.
    ContractError: a rule that cannot be evaluated on this configuration.
    """
    values = variables(config, statistics or {})
    found = []
    for claim in _installed() if rules is None else rules:
        if claim.rule is None:
            continue
        try:
            finding = evaluate(claim.rule, values)
        except ValueError as error:
            message = f"cannot be evaluated on this configuration ({error})" if isinstance(error, RuleError) else str(error)
            raise ContractError([Problem(*claim.location, claim.id, message)]) from error
        if finding:
            found.append(Finding(claim.id, claim.contract, claim.rule.severity, *finding))
    return sorted(found, key=lambda finding: ("error", "warn", "info").index(finding.severity))


@lru_cache(maxsize=1)
def _installed() -> tuple[Claim, ...]:
    return tuple(claim for contract in load() for claim in contract.claims if claim.rule)
