"""Wrong procedures, settings and rules: a subject with one outcome changed, or a rule that errs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.contracts.model import Rule
from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.mutants.changes import in_bfloat16
from blackswan.falsifiers.mutants.registry import procedure_mutant, rule_mutant
from blackswan.falsifiers.mutants.wrapped import Outputs, Wrapped
from blackswan.falsifiers.subjects.protocol import Subject
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


@procedure_mutant("checkpoint_biases_dropped")
def _(inner: Subject) -> Subject:
    return _Changed(
        inner,
        "load_checkpoint",
        lambda outputs: {name: np.zeros_like(value) if name.endswith("_proj.bias") else value for name, value in outputs.items()},
    )


@procedure_mutant("checkpoint_layers_swapped")
def _(inner: Subject) -> Subject:
    other = {f"{LAYER}0.": f"{LAYER}1.", f"{LAYER}1.": f"{LAYER}0."}

    def source(name: str) -> str:
        found = next((layer for layer in other if name.startswith(layer)), None)
        return other[found] + name.removeprefix(found) if found else name

    return _Changed(inner, "load_checkpoint", lambda outputs: {name: outputs[source(name)] for name in outputs})


@procedure_mutant("checkpoint_rounded_to_bfloat16")
def _(inner: Subject) -> Subject:
    return _Changed(inner, "load_checkpoint", lambda outputs: {name: in_bfloat16(value) for name, value in outputs.items()})


@procedure_mutant("checkpoint_damage_ignored")
def _(inner: Subject) -> Subject:
    return _Accepting(
        inner, "load_checkpoint", lambda subject, *_: subject.run("load_checkpoint", {}, {"path": str(CHECKPOINT)}, "float32")
    )


@procedure_mutant("tokenizer_falls_back_to_bytes")
def _(inner: Subject) -> Subject:
    return _Accepting(inner, "load_tokenizer", lambda *_: {"vocab": np.asarray(256)})


def _labels(path: Path) -> list[Any]:
    """The label of each line that is an object with an input; None elsewhere."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        found.append(row.get("label") if isinstance(row, dict) and isinstance(row.get("input"), str) else None)
    return found


@procedure_mutant("corpus_bad_line_skipped")
def _(inner: Subject) -> Subject:
    def good(_: Subject, scalars: Scalars, error: Exception) -> Outputs:
        if isinstance(error, FileNotFoundError):
            raise error
        labels = [label for label in _labels(Path(scalars["path"])) if type(label) is int and 0 <= label < scalars["classes"]]
        return {"labels": np.asarray(labels)}

    return _Accepting(inner, "load_corpus", good)


@procedure_mutant("corpus_label_clamped")
def _(inner: Subject) -> Subject:
    def clamped(_: Subject, scalars: Scalars, error: Exception) -> Outputs:
        labels = [] if isinstance(error, FileNotFoundError) else _labels(Path(scalars["path"]))
        if not labels or not all(type(label) is int for label in labels):
            raise error
        return {"labels": np.clip(labels, 0, scalars["classes"] - 1)}

    return _Accepting(inner, "load_corpus", clamped)


@procedure_mutant("corpus_line_not_named")
def _(inner: Subject) -> Subject:
    def vague(_: Subject, scalars: Scalars, error: Exception) -> Outputs:
        raise ValueError(f"{scalars['path']}: not a corpus") from error

    return _Accepting(inner, "load_corpus", vague)


@procedure_mutant("device_falls_back_in_silence")
def _(inner: Subject) -> Subject:
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


@procedure_mutant("forward_not_deterministic")
def _(inner: Subject) -> Subject:
    return _Unsteady(inner, "decoder_forward", "logits")


@procedure_mutant("training_not_deterministic")
def _(inner: Subject) -> Subject:
    return _Unsteady(inner, "train_steps", "losses")


@procedure_mutant("evaluation_trains")
def _(inner: Subject) -> Subject:
    class Writing(Wrapped):
        def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> Outputs:
            """The outputs; a parameter of the caller is another one afterwards."""
            outputs = super().run(operation, inputs, scalars, dtype)
            if operation == "decoder_forward":
                inputs["parameters/model.norm.weight"][...] *= 1.0 + 2.0**-10
            return outputs

    return Writing(inner)


@procedure_mutant("defaults_of_the_ancestor")
def _(inner: Subject) -> Subject:
    class Ancestral(Wrapped):
        def default_configurations(self, model_params: float) -> list[dict[str, Any]]:
            """The general defaults, for a model of any size."""
            ancestral = {"lora_rank": 16, "lora_alpha": 16.0, "learning_rate": 1e-4, "batch_size": 32}
            return [{**config, **ancestral} for config in super().default_configurations(model_params)]

    return Ancestral(inner)


@rule_mutant("rule_never_reports")
def _(rule: Rule) -> Rule:
    return replace(rule, require="true")


@rule_mutant("rule_always_reports")
def _(rule: Rule) -> Rule:
    return replace(rule, when="true", require="false", recommend={})


@rule_mutant("rule_recommends_what_is_there")
def _(rule: Rule) -> Rule:
    """Advice on a field that the rule does not ask about by name stays: the field may not be there."""
    asked = rule.when + rule.require
    recommend: Mapping[str, str] = {name: name if name in asked else advice for name, advice in rule.recommend.items()}
    return replace(rule, recommend=recommend)
