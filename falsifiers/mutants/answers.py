"""Wrong answers of the implementation as a subject (unsteady ones, defaults, a device in the place of another), and rules that err."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan.contracts.model import Rule
from blackswan.falsifiers.mutants.registry import named_step, rule_mutant, wrong_step

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


RUN = IMPLEMENTATION, "Implementation.run"
FORWARD = "Every second forward pass differs in the last place of one logit."
TRAINING = "Every second training run differs in the last place of one loss."
named_step("forward_not_deterministic", "own", FORWARD, _unsteady("decoder_forward", "logits"), *RUN)
named_step("training_not_deterministic", "own", TRAINING, _unsteady("train_steps", "losses"), *RUN)


@wrong_step(*RUN, "S13")
def evaluation_trains(run: Step, self: Any, operation: str, inputs: Any, *others: Any) -> Any:
    """A forward pass writes into a parameter of its caller."""
    outputs = run(self, operation, inputs, *others)
    if operation == "decoder_forward":
        inputs["parameters/model.norm.weight"][...] *= 1.0 + 2.0**-10
    return outputs


@wrong_step(IMPLEMENTATION, "Implementation.default_configurations", "S31")
def defaults_of_the_ancestor(configurations: Step, self: Any, model_params: float) -> list[dict[str, Any]]:
    """Rank 16 with alpha 16, rate 1e-4 and batches of 32, whatever the model."""
    ancestral = {"lora_rank": 16, "lora_alpha": 16.0, "learning_rate": 1e-4, "batch_size": 32}
    return [{**config, **ancestral} for config in configurations(self, model_params)]


@wrong_step("blackswan.impl.device", "resolve_device", "S26")
def device_falls_back_in_silence(resolve: Step, name: str) -> Any:
    """The CPU instead of a device that is not there or has no such name."""
    try:
        return resolve(name)
    except Exception:  # the defect is that no refusal gets through, whatever it is
        return resolve("cpu")


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
