"""The comparison that a claim of each kind makes on a case: of outputs, of gradients, of a hyperparameter rule, or by a named check."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from blackswan.contracts import rules
from blackswan.contracts.fields import split, variables
from blackswan.contracts.model import Claim, Rule
from blackswan.falsifiers.numeric.attack import Attack, rounded_gradients, rounded_outputs
from blackswan.falsifiers.numeric.case import Case, differentiable
from blackswan.falsifiers.numeric.checks import CHECKS
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF, gradient_dtypes
from blackswan.reference.table import Arrays


def compare_outputs(attack: Attack, case: Case) -> list[Comparison]:
    """Every output of the operation equals the reference's within the claim's tolerance."""
    expected, actual = attack.expect(case), attack.answer(case)
    floors = lambda: attack.floor(case, rounded_outputs(case), expected)  # noqa: E731  # asked for where the tolerance needs it
    return attack.judge(expected, actual, floors, attack.dtypes(expected), attack.reach(case))


def compare_gradients(attack: Attack, case: Case) -> list[Comparison]:
    """The gradient with respect to each differentiable input that is present equals the reference's."""
    wrt = differentiable(attack.signature, case)
    expected, actual = attack.expect_gradients(case, wrt), attack.answer_gradients(case, wrt)
    dtypes = gradient_dtypes(attack.signature, case.scalars, wrt, attack.dtype)

    def floors() -> dict[str, Errors]:
        return _with_cancellation(attack.floor(case, rounded_gradients(case, wrt), expected), expected, attack.dtype)

    return attack.judge(expected, actual, floors, dtypes)


def _with_cancellation(floors: Mapping[str, Errors], expected: Arrays, dtype: str) -> dict[str, Errors]:
    """The floors, and for a gradient that is zero without any noise a rounding of the case's largest gradient.

    Such a zero may be the difference of two equal terms, as a query's is that sees one key; an implementation that computes the terms in
    two ways leaves their rounding.
    """
    largest = max((float(np.abs(value).max()) for value in expected.values() if value.size), default=0.0)
    least = Errors.flat(UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"] * largest)
    return {name: least if floor.max == 0.0 and not np.any(expected[name]) else floor for name, floor in floors.items()}


def run_check(attack: Attack, case: Case) -> list[Comparison]:
    """The comparisons of the check that the claim names."""
    assert attack.claim.check is not None
    return CHECKS[attack.claim.check](attack, case)


_ZERO_BILLION = re.compile(r"(?<![\d.])0(\.0*)?\s?B\b")


def check_rule(attack: Attack, case: Case) -> list[Comparison]:
    """One drawn configuration; the examples and the defaults of the subject with it."""
    rule, fields = attack.claim.rule, dict(case.scalars)
    assert rule is not None
    with attack.watch.on("subject"):
        without = [_without(rule, fields, name) for name in fields]
        return [_drawn(rule, fields), *without, *_examples(attack.claim, rule), *_defaults(attack, rule, fields)]


def _finding(rule: Rule, fields: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The message and the recommendation where a configuration violates the rule."""
    return rules.evaluate(rule, variables(*split(fields)))


def _held(name: str) -> Comparison:
    return Comparison(name, True, 0.0, "rule")


def _drawn(rule: Rule, fields: dict[str, Any]) -> Comparison:
    """Not violated; or the message reads well and the recommendation heals."""
    message, recommendation = _finding(rule, fields) or ("", {})
    if _ZERO_BILLION.search(message) or "{" in message or "nan" in message.split():
        return broken("message", "does not read well", "numbers as the configuration has them", message)
    config, statistics = split(fields)
    healed = rules.evaluate(rule, variables(rules.apply(config, recommendation), statistics)) if recommendation else None
    if healed is not None:
        return broken("recommendation", "does not heal", f"no finding with {recommendation}", healed[0])
    return _held("configuration")


def _without(rule: Rule, fields: dict[str, Any], name: str) -> Comparison:
    """A field that is not given is no error."""
    try:
        _finding(rule, {key: value for key, value in fields.items() if key != name})
    except ValueError as error:
        return broken(f"without {name}", "raised", "no exception for a field that is not given", str(error))
    return _held(f"without {name}")


def _examples(claim: Claim, rule: Rule) -> list[Comparison]:
    found = []
    for label, examples, violated in (("holds", claim.examples.holds, False), ("violates", claim.examples.violates, True)):
        for index, example in enumerate(examples):
            finding, name = rules.evaluate(rule, variables(example.config, example.statistics)), f"examples.{label}[{index}]"
            found.append(_held(name) if (finding is not None) is violated else broken(name, label, label, str(finding)))
    return found


def _defaults(attack: Attack, rule: Rule, fields: dict[str, Any]) -> list[Comparison]:
    """The subject's own defaults pass, for the model size that was drawn."""
    model_params, found = fields.get("model_params") or 494_000_000, []
    for config in attack.subject.default_configurations(model_params):
        known = {**config, "model_params": int(model_params)} if config["num_classes"] == 2 or model_params <= 13e9 else config
        finding = _finding(rule, known)
        found.append(_held("defaults") if finding is None else broken("defaults", "violate the rule", "no finding", finding[0]))
    return found


KINDS: dict[str, Callable[[Attack, Case], list[Comparison]]] = {
    "parity": compare_outputs,
    "trajectory": compare_outputs,
    "gradient": compare_gradients,
    "rule": check_rule,
    **dict.fromkeys(("invariant", "metamorphic", "roundtrip", "rejection", "determinism", "bound", "resource", "device"), run_check),
}
