"""Wrong answers of the implementation as a subject (unsteady ones, defaults, a device in the place of another), and rules that err."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan.contracts.model import Rule
from blackswan.falsifiers.mutants.registry import rule_mutant, step_mutant, step_mutants

IMPLEMENTATION = "blackswan.falsifiers.subjects.implementation"
Step = Callable[..., Any]


def _unsteady(operation: str, output: str) -> Callable[[Step], Step]:
    """Every second answer is one unit in the last place away in one element."""

    def change(run: Step) -> Step:
        answers = 0

        def changed(self: Any, asked: str, *arguments: Any) -> Any:
            nonlocal answers
            outputs = run(self, asked, *arguments)
            answers += asked == operation
            if asked == operation and answers % 2 == 0:
                moved = outputs[output] = outputs[output].copy()
                moved.reshape(-1)[0] = np.nextafter(moved.reshape(-1)[0], moved.dtype.type(np.inf))
            return outputs

        return changed

    return change


step_mutants(
    IMPLEMENTATION,
    "Implementation.run",
    forward_not_deterministic=(
        "Every second forward pass differs in the last place of one logit.",
        _unsteady("decoder_forward", "logits"),
    ),
    training_not_deterministic=(
        "Every second training run differs in the last place of one loss.",
        _unsteady("train_steps", "losses"),
    ),
)


@step_mutant(IMPLEMENTATION, "Implementation.run", "S13")
def evaluation_trains(run: Step) -> Step:
    """A forward pass writes into a parameter of its caller."""

    def changed(self: Any, operation: str, inputs: Any, *others: Any) -> Any:
        outputs = run(self, operation, inputs, *others)
        if operation == "decoder_forward":
            inputs["parameters/model.norm.weight"][...] *= 1.0 + 2.0**-10
        return outputs

    return changed


@step_mutant(IMPLEMENTATION, "Implementation.default_configurations", "S31")
def defaults_of_the_ancestor(configurations: Step) -> Step:
    """Rank 16 with alpha 16, rate 1e-4 and batches of 32, whatever the model."""
    ancestral = {"lora_rank": 16, "lora_alpha": 16.0, "learning_rate": 1e-4, "batch_size": 32}
    return lambda self, model_params: [{**config, **ancestral} for config in configurations(self, model_params)]


@step_mutant("blackswan.impl.device", "resolve_device", "S26")
def device_falls_back_in_silence(resolve: Step) -> Step:
    """The CPU instead of a device that is not there or has no such name."""

    def changed(name: str) -> Any:
        try:
            return resolve(name)
        except Exception:  # the defect is that no refusal gets through, whatever it is
            return resolve("cpu")

    return changed


@rule_mutant("own")
def rule_never_reports(rule: Rule) -> Rule:
    """A rule that holds for everything."""
    return replace(rule, require="true")


@rule_mutant("own")
def rule_always_reports(rule: Rule) -> Rule:
    """A rule that holds for nothing."""
    return replace(rule, when="true", require="false", recommend={})


@rule_mutant("S18")
def rule_recommends_what_is_there(rule: Rule) -> Rule:
    """Advice that does not heal.

    Advice on a field that the rule does not ask about by name stays: the field may not be there.
    """
    asked = rule.when + rule.require
    recommend: Mapping[str, str] = {name: name if name in asked else advice for name, advice in rule.recommend.items()}
    return replace(rule, recommend=recommend)
