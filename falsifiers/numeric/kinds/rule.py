"""Rules: one holds and is violated where its examples say, never raises, heals what it reports, and passes the subject's own defaults."""

import re
from typing import Any

from blackswan.contracts import rules
from blackswan.contracts.fields import split, variables
from blackswan.contracts.model import Claim, Rule
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken

_HELD = "rule"
_ZERO_BILLION = re.compile(r"(?<![\d.])0(\.0*)?\s?B\b")


def check_rule(attack: Attack, case: Case) -> list[Comparison]:
    """One drawn configuration; the examples and the defaults of the subject with it."""
    assert attack.claim.rule is not None
    with attack.watch.on("subject"):
        found = [_drawn(attack.claim.rule, dict(case.scalars))]
        found += [_without(attack.claim.rule, dict(case.scalars), name) for name in case.scalars]
        found += _examples(attack.claim)
        found += _defaults(attack, attack.claim.rule, dict(case.scalars))
    return found


def _evaluate(rule: Rule, fields: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    config, statistics = split(fields)
    return rules.evaluate(rule, variables(config, statistics))


def _held(name: str) -> Comparison:
    return Comparison(name, True, 0.0, _HELD)


def _drawn(rule: Rule, fields: dict[str, Any]) -> Comparison:
    """Not violated; or the message reads well and the recommendation heals."""
    finding = _evaluate(rule, fields)
    if finding is None:
        return _held("configuration")
    message, recommendation = finding
    if _ZERO_BILLION.search(message) or "{" in message or "nan" in message.split():
        return broken("message", "does not read well", "numbers as the configuration has them", message)
    if not recommendation:
        return _held("configuration")
    config, statistics = split(fields)
    healed = rules.evaluate(rule, variables(rules.apply(config, recommendation), statistics))
    if healed is not None:
        return broken("recommendation", "does not heal", f"no finding with {recommendation}", healed[0])
    return _held("configuration")


def _without(rule: Rule, fields: dict[str, Any], name: str) -> Comparison:
    """A field that is not given is no error."""
    try:
        _evaluate(rule, {key: value for key, value in fields.items() if key != name})
    except ValueError as error:
        return broken(f"without {name}", "raised", "no exception for a field that is not given", str(error))
    return _held(f"without {name}")


def _examples(claim: Claim) -> list[Comparison]:
    assert claim.rule is not None
    found = []
    for label, examples, violated in (("holds", claim.examples.holds, False), ("violates", claim.examples.violates, True)):
        for index, example in enumerate(examples):
            finding = rules.evaluate(claim.rule, variables(example.config, example.statistics))
            name = f"examples.{label}[{index}]"
            found.append(_held(name) if (finding is not None) is violated else broken(name, label, label, str(finding)))
    return found


def _defaults(attack: Attack, rule: Rule, fields: dict[str, Any]) -> list[Comparison]:
    """The subject's own defaults pass, for the model size that was drawn."""
    model_params = fields.get("model_params") or 494_000_000
    found = []
    for config in attack.subject.default_configurations(model_params):
        known = {**config, "model_params": int(model_params)} if config["num_classes"] == 2 or model_params <= 13e9 else config
        finding = _evaluate(rule, known)
        found.append(_held("defaults") if finding is None else broken("defaults", "violate the rule", "no finding", finding[0]))
    return found
