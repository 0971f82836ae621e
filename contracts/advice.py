"""Advice on a configuration: the rules of contracts, evaluated on its fields and on the statistics of its data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from blackswan.contracts.fields import fields_of, variables
from blackswan.contracts.loader import load
from blackswan.contracts.model import Claim
from blackswan.contracts.problems import ContractError, Problem
from blackswan.contracts.rules import RuleError, apply, compiled, evaluate

_ROUNDS = 10


@dataclass(frozen=True)
class Finding:
    """A rule's objection to a configuration. Severity is info, warn or error; only errors stop a run.

    `sources` are the claim's, by the names that its contract gives them; `correction` says where they disagree or were wrong.
    """

    rule: str
    contract: str
    severity: str
    message: str
    recommendation: dict[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    correction: str | None = None


def check(config: Mapping[str, Any], statistics: Mapping[str, Any] | None = None, rules: Iterable[Claim] | None = None) -> list[Finding]:
    """The findings of the rules about a configuration, errors first. A rule that needs a field which is not given has no finding.

    The recommendations belong together: applied at once they leave no finding that has a recommendation, unless rules contradict each
    other. `rules` are claims of kind rule, by default those of all contracts. ConfigError: unknown field, or a value of a wrong type or
    outside its field's limits. ContractError: a rule that cannot be evaluated on this configuration.
    """
    claims = _rules(rules)
    found = _findings(config, statistics or {}, claims)
    return _together(found, config, statistics or {}, claims)


def unjudged(
    config: Mapping[str, Any], statistics: Mapping[str, Any] | None = None, rules: Iterable[Claim] | None = None
) -> dict[str, tuple[str, ...]]:
    """The rules that were not judged, by id, with the fields and statistics that they need and that are not given."""
    given = {*config, *(statistics or {})}
    missing = {claim.id: tuple(sorted(_read(claim) - given)) for claim in _rules(rules)}
    return {rule: names for rule, names in missing.items() if names}


def advised(config: Mapping[str, Any], findings: Iterable[Finding]) -> dict[str, Any]:
    """The configuration with all recommendations applied; where two name one field, that of the finding that stands first holds."""
    changed = dict(config)
    for finding in reversed(list(findings)):
        changed = apply(changed, finding.recommendation)
    return changed


def _rules(rules: Iterable[Claim] | None) -> list[Claim]:
    return [claim for claim in (_installed() if rules is None else rules) if claim.rule is not None]


def _findings(config: Mapping[str, Any], statistics: Mapping[str, Any], rules: Iterable[Claim]) -> list[Finding]:
    values = variables(config, statistics)
    found = []
    for claim in rules:
        assert claim.rule is not None
        try:
            finding = evaluate(claim.rule, values)
        except ValueError as error:
            message = f"cannot be evaluated on this configuration ({error})" if isinstance(error, RuleError) else str(error)
            raise ContractError([Problem(*claim.location, claim.id, message)]) from error
        if finding:
            found.append(Finding(claim.id, claim.contract, claim.rule.severity, *finding, claim.sources, claim.correction))
    return sorted(found, key=lambda finding: ("error", "warn", "info").index(finding.severity))


def _together(found: list[Finding], config: Mapping[str, Any], statistics: Mapping[str, Any], rules: list[Claim]) -> list[Finding]:
    """The findings, with recommendations that leave none when all are applied at once.

    Following advice may cause another finding: a larger batch needs more epochs. So advice is followed until nothing is left to advise, and
    the values that come of it are recommended by the findings whose advice led there. As the rules gave them where that never ends.
    """
    reads = {claim.id: _read(claim, optional=True) for claim in rules}
    fields = [set(finding.recommendation) for finding in found]
    changed, later = advised(config, found), found
    for _ in range(_ROUNDS):
        later = [finding for finding in _findings(changed, statistics, rules) if finding.recommendation]
        if not later:
            return [
                replace(finding, recommendation={name: changed[name] for name in changed if name in names})
                for finding, names in zip(found, fields, strict=True)
            ]
        for finding in later:
            for names in fields:
                names |= set(finding.recommendation) if names & reads[finding.rule] else set()
        changed = advised(changed, later)
    return found


def _read(claim: Claim, optional: bool = False) -> set[str]:
    """The fields that decide whether a rule reports; with `optional` also those that may be null."""
    assert claim.rule is not None
    names = {name for expression in (claim.rule.when, claim.rule.require) for name in compiled(expression)[1]}
    return fields_of(names, optional)


@lru_cache(maxsize=1)
def _installed() -> tuple[Claim, ...]:
    return tuple(claim for contract in load() for claim in contract.claims if claim.rule)
