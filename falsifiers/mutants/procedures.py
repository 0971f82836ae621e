"""Wrong procedures, settings and rules: a subject with one outcome changed, or a rule that errs."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan.contracts.model import Rule
from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.mutants.changes import in_bfloat16
from blackswan.falsifiers.mutants.registry import procedure_mutant, rule_mutant
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.falsifiers.subjects.wrapped import Outputs, Wrapped
from blackswan.reference.table import Arrays, Scalars

LAYER = "parameters/model.layers."


class _Changed(Wrapped):
    """The outputs of one operation changed."""

    def __init__(self, inner: Subject, operation: str, change: Callable[[Outputs], Outputs]) -> None:
        super().__init__(inner)
        self._operation, self._change = operation, change

    def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> Outputs:
        """The outputs, changed where the operation is the one."""
        outputs = super().run(operation, inputs, scalars, dtype)
        return self._change(outputs) if operation == self._operation else outputs


class _Accepting(Wrapped):
    """One operation that answers where it had to refuse."""

    def __init__(self, inner: Subject, operation: str, instead: Callable[[Subject, Scalars, Exception], Outputs]) -> None:
        super().__init__(inner)
        self._operation, self._instead = operation, instead

    def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> Outputs:
        """The outputs, or what stands for them where the subject refuses."""
        if operation != self._operation:
            return super().run(operation, inputs, scalars, dtype)
        try:
            return super().run(operation, inputs, scalars, dtype)
        except Exception as error:  # the defect is that no refusal gets through, whatever it is
            return self._instead(self.inner, scalars, error)


@procedure_mutant("S1", "P4", of="load_checkpoint")
def checkpoint_biases_dropped(inner: Subject) -> Subject:
    """Bias tensors of the file arrive as zeros."""
    return _Changed(
        inner,
        "load_checkpoint",
        lambda outputs: {name: np.zeros_like(value) if name.endswith("_proj.bias") else value for name, value in outputs.items()},
    )


@procedure_mutant("S29", of="load_checkpoint")
def checkpoint_layers_swapped(inner: Subject) -> Subject:
    """Tensors of the first two layers change places."""
    other = {f"{LAYER}0.": f"{LAYER}1.", f"{LAYER}1.": f"{LAYER}0."}

    def source(name: str) -> str:
        found = next((layer for layer in other if name.startswith(layer)), None)
        return other[found] + name.removeprefix(found) if found else name

    return _Changed(inner, "load_checkpoint", lambda outputs: {name: outputs[source(name)] for name in outputs})


@procedure_mutant("own", of="load_checkpoint")
def checkpoint_rounded_to_bfloat16(inner: Subject) -> Subject:
    """A float32 file arrives rounded to bfloat16."""
    return _Changed(inner, "load_checkpoint", lambda outputs: {name: in_bfloat16(value) for name, value in outputs.items()})


@procedure_mutant("own", of="load_checkpoint")
def checkpoint_damage_ignored(inner: Subject) -> Subject:
    """A folder that cannot be read gives the tensors of another one."""
    return _Accepting(
        inner, "load_checkpoint", lambda subject, *_: subject.run("load_checkpoint", {}, {"path": str(CHECKPOINT)}, "float32")
    )


@procedure_mutant("own", of="load_tokenizer")
def tokenizer_falls_back_to_bytes(inner: Subject) -> Subject:
    """Bytes instead of a tokenizer that is missing or broken."""
    return _Accepting(inner, "load_tokenizer", lambda *_: {"vocab": np.asarray(256)})


@procedure_mutant("S26", of="resolve_device")
def device_falls_back_in_silence(inner: Subject) -> Subject:
    """The CPU instead of a device that is not there or has no such name."""
    return _Accepting(inner, "resolve_device", lambda *_: {"index": np.asarray(0)})


class _Unsteady(Wrapped):
    """Every second answer is one unit in the last place away in one element."""

    def __init__(self, inner: Subject, operation: str, output: str) -> None:
        super().__init__(inner)
        self._operation, self._output, self._answers = operation, output, 0

    def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> Outputs:
        """The outputs, moved every second time."""
        outputs = super().run(operation, inputs, scalars, dtype)
        if operation == self._operation:
            self._answers += 1
            if self._answers % 2 == 0:
                moved = outputs[self._output].copy()
                moved.reshape(-1)[0] = np.nextafter(moved.reshape(-1)[0], moved.dtype.type(np.inf))
                outputs[self._output] = moved
        return outputs


@procedure_mutant("own", of="decoder_forward")
def forward_not_deterministic(inner: Subject) -> Subject:
    """Every second forward pass differs in the last place of one logit."""
    return _Unsteady(inner, "decoder_forward", "logits")


@procedure_mutant("own", of="train_steps")
def training_not_deterministic(inner: Subject) -> Subject:
    """Every second training run differs in the last place of one loss."""
    return _Unsteady(inner, "train_steps", "losses")


@procedure_mutant("S13", of="decoder_forward")
def evaluation_trains(inner: Subject) -> Subject:
    """A forward pass writes into a parameter of its caller."""

    class Writing(Wrapped):
        def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> Outputs:
            """The outputs; a parameter of the caller is another one afterwards."""
            outputs = super().run(operation, inputs, scalars, dtype)
            if operation == "decoder_forward":
                inputs["parameters/model.norm.weight"][...] *= 1.0 + 2.0**-10
            return outputs

    return Writing(inner)


@procedure_mutant("S31")
def defaults_of_the_ancestor(inner: Subject) -> Subject:
    """Rank 16 with alpha 16, rate 1e-4 and batches of 32, whatever the model."""

    class Ancestral(Wrapped):
        def default_configurations(self, model_params: float) -> list[dict[str, Any]]:
            """The general defaults, for a model of any size."""
            ancestral = {"lora_rank": 16, "lora_alpha": 16.0, "learning_rate": 1e-4, "batch_size": 32}
            return [{**config, **ancestral} for config in super().default_configurations(model_params)]

    return Ancestral(inner)


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
