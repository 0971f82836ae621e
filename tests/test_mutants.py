"""The mutants: one for each name of the catalogue, none equivalent to correct code, each a consistent wrong program."""

import argparse
import fnmatch
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blackswan import contracts, reference
from blackswan.falsifiers import mutants
from blackswan.falsifiers.mutants import MUTANTS, Mutant, catalogue_command, reaching
from blackswan.falsifiers.mutants.changes import edited
from blackswan.falsifiers.mutants.registry import STEPS, StepMutant, absent_steps, wrong_step
from blackswan.falsifiers.mutants.registry import mutants as enter
from blackswan.falsifiers.numeric import strategies
from blackswan.falsifiers.numeric.case import Case, differentiable
from blackswan.falsifiers.numeric.precision import STORAGE, signatures
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference import TABLE
from blackswan.reference.table import Operation

MODEL = {"batch": 3, "seq": 5, "vocab": 11, "hidden": 8, "intermediate": 12, "layers": 2, "kv_heads": 2, "groups": 2, "half_dim": 2}
DECODER = {"family": "qwen3", "eps": 1e-6, "theta": 100.0, "tied": True}
CLASSIFIER = {**DECODER, "alpha": 6.0, "targets": "q_v", "pooling": "mean"}
TRAINING = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_norm": 0.5, "warmup_fraction": 0.5, "schedule": "linear"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 64}
NF4 = ({"nf4": False}, {"nf4": True}, {"nf4": True, "double_quantize": True})
ROWS = {"rows": 5, "in_features": 6, "out_features": 6}
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-3, "weight_decay": 0.1}

Setting = tuple[dict[str, int], dict[str, Any]]

SETTINGS: dict[str, list[Setting]] = {
    "embedding": [({"batch": 3, "seq": 5, "vocab": 7, "hidden": 4}, {})],
    "linear": [(ROWS, {}), ({**ROWS, "out_features": 3}, {})],
    "residual_add": [({"rows": 3, "hidden": 4}, {})],
    "rms_norm": [({"rows": 4, "hidden": 8}, {"eps": 1e-6})],
    "qk_norm": [({"batch": 2, "seq": 3, "heads": 2, "head_dim": 4}, {"eps": 1e-6})],
    "rope": [
        ({"batch": 2, "seq": 4, "heads": 2, "half_dim": 3}, {"theta": 50.0}),
        ({"batch": 2, "seq": 4, "heads": 2, "half_dim": 8}, {"theta": 50.0, **LLAMA3}),
    ],
    "attention": [({"batch": 3, "seq": 6, "kv_heads": 2, "groups": 2, "head_dim": 4}, {})],
    "softmax": [({"rows": 3, "classes": 5}, {})],
    "swiglu": [({"rows": 3, "intermediate": 5}, {})],
    "pool": [({"batch": 4, "seq": 6, "hidden": 3}, {"mode": mode}) for mode in ("mean", "last", "first")],
    "weighted_cross_entropy": [({"batch": 5, "classes": 4}, {})],
    "cross_entropy_per_sample": [({"rows": 4, "classes": 3}, {})],
    "bce_with_logits": [({"batch": 4, "classes": 3}, {})],
    "lm_cross_entropy": [({"batch": 4, "seq": 6, "vocab": 5}, {})],
    "lora_linear": [({**ROWS, "rank": 2}, {"alpha": 6.0})],
    "lora_merge": [({"in_features": 4, "out_features": 5, "rank": 2}, {"alpha": 6.0})],
    "lora_unmerge": [({"in_features": 4, "out_features": 5, "rank": 2}, {"alpha": 6.0})],
    "nf4_quantize": [({"rows": 5, "columns": 13, "block_size": 8}, {})],
    "nf4_dequantize": [({"rows": 5, "columns": 13, "block_size": 8}, {})],
    "nf4_linear": [({**ROWS, "block_size": 8}, {})],
    "nf4_double_quantize": [({"blocks": 300}, {})],
    "nf4_double_dequantize": [({"blocks": 300}, {})],
    "adamw_step": [({"count": 9}, {**ADAM, "step": step, "learning_rate": 1e-2}) for step in (1, 3)],
    "adamw_8bit_step": [({"count": 300}, {**ADAM, "step": step, "learning_rate": 1e-2}) for step in (1, 3)],
    "clip_by_global_norm": [({"tensors": 3, "count": 4}, {"max_norm": limit}) for limit in (0.7, 100.0)],
    "average_gradients": [({"micro_batches": 3, "count": 4}, {})],
    "learning_rate_schedule": [
        ({"total_steps": 9}, {"peak": 1e-3, "warmup_fraction": 0.3, "kind": kind}) for kind in ("constant", "linear", "cosine")
    ],
    "decoder_forward": [(MODEL, {**DECODER, "family": family}) for family in ("qwen3", "qwen2")],
    "language_model_loss": [(MODEL, {**DECODER, "family": family}) for family in ("qwen3", "qwen2")],
    "classifier_forward": [({**MODEL, "classes": 3, "rank": 2}, {**CLASSIFIER, **nf4}) for nf4 in NF4],
    "classifier_loss": [({**MODEL, "classes": 3, "rank": 2}, {**CLASSIFIER, **nf4}) for nf4 in NF4],
    "pretrain_steps": [
        ({**MODEL, "vocab": 90, "steps": 3, "micro": 2}, {**DECODER, **TRAINING, "family": family, "tied": tied})
        for family, tied in (("qwen3", True), ("qwen2", False))
    ],
    "multi_label_steps": [({**MODEL, "classes": 3, "rank": 2, "steps": 3, "micro": 2}, {**CLASSIFIER, **TRAINING, "targets": "all"})],
    "train_steps": [({**MODEL, "classes": 3, "rank": 2, "steps": 3, "micro": 2}, {**CLASSIFIER, **TRAINING, **nf4}) for nf4 in NF4],
}
DIFFERENTIABLE = {"decoder_forward": "language_model_loss", "classifier_forward": "classifier_loss"}
"""The loss through which a composition without gradients of its own is differentiated."""


ROUNDED = {
    "linear_accumulates_in_low_precision",
    "cross_entropy_sum_in_float16",
    "lm_loss_sum_in_float16",
    "rms_norm_squares_in_float16",
    "rms_norm_weight_rounded",
    "softmax_exponentials_in_float16",
    "swiglu_exponential_in_float16",
    "rms_norm_statistics_in_low_precision",
    "attention_probabilities_in_low_precision",
    "lora_input_rounded",
    "attention_queries_scaled_first",
    "attention_scores_rounded",
    "linear_bias_after_rounding",
    "lora_update_rounded",
    "pool_sum_rounded",
    "qk_norm_rounds_before_weight",
    "rms_norm_inverse_rounded",
    "rms_norm_rounds_before_weight",
    "rope_products_rounded",
    "softmax_exponentials_rounded",
    "swiglu_activation_rounded",
}
"""Forward passes that round: a step function has no derivative to compare with."""

OTHER_GRADIENT = {
    "cross_entropy_probability_floor": "the defect as reported left the gradient right",
    "decoder_head_untied": "the head is another array than the embedding, and trained apart from it",
    "decoder_logits_flat": "the head is another array than the embedding, and trained apart from it",
    "classifier_head_quantised": "a quantised head is frozen",
}
"""Wrong forward passes that have, on purpose, not their own derivative."""

SMALL_SLOPES = {"bce_gradient_of_target", "bce_gradient_one_sided", "cross_entropy_gradient_floored", "per_sample_gradient_floored"}
"""Wrong gradients beside which the rounding of central differences is large, or at a single point."""


def _case(operation: str, setting: Setting, flavour: str, seed: int, dtype: str = "float64") -> Case:
    sizes, scalars = setting
    claim: Any = SimpleNamespace(operation=operation)
    return strategies.build(claim, strategies.Draw(sizes, scalars, {}, seed), flavour, dtype)


def test_registry_is_the_catalogue() -> None:
    catalogue, registered = contracts.load_mutants(), mutants.every()
    assert set(registered) == set(catalogue)
    assert {name: getattr(entry, "operation", None) for name, entry in registered.items()} == {
        name: entry.operation for name, entry in catalogue.items()
    }
    assert {name: entry.hidden_in for name, entry in MUTANTS.items()} == {name: catalogue[name].hidden_in for name in MUTANTS}


def test_the_readme_lists_the_defects_that_mutants_have_as_pedigree() -> None:
    text = (Path(mutants.__file__).parent / "README.md").read_text()
    stated, _, later = text.partition("## Not stated yet")
    numbered = {number for entry in mutants.every().values() for number in entry.pedigree if number != "own"}
    assert set(re.findall(r"^\| ([SP]\d+) \|", stated, re.MULTILINE)) == numbered
    named = {cell for row in later.splitlines() if row.startswith("|") for cell in re.findall(r"`([a-z0-9_*]+)`", row.split("|")[1])}
    assert named
    assert [name for name in named if not fnmatch.filter(mutants.every(), name)] == [], "such mutants are not there any more"


def _slopes(case: Case, table: Mapping[str, Any], wrt: list[str], seed: int) -> tuple[float, float]:
    """The derivative of Σ cotangent · output along a random direction in some inputs: by central differences, and from the gradient."""
    rng = np.random.default_rng(seed)
    direction = {name: rng.standard_normal(case.inputs[name].shape) for name in wrt}

    def total(step: float) -> float:
        moved = {**case.inputs, **{name: case.inputs[name] + step * direction[name] for name in wrt}}
        outputs = reference.evaluate(case.operation, moved, case.scalars, table)
        return sum(float((case.cotangents[name] * outputs[name]).sum()) for name in case.cotangents)

    gradients = reference.differentiate(case.operation, case.inputs, case.scalars, case.cotangents, wrt, table)
    step = 1e-5
    return (total(step) - total(-step)) / (2 * step), sum(float((gradients[name] * direction[name]).sum()) for name in wrt)


def _inconsistent(entry: Mutant) -> list[str]:
    """The inputs whose gradient is not the derivative of the mutant's own forward pass."""
    operation, table, found = DIFFERENTIABLE.get(entry.operation, entry.operation), entry.build(), []
    settings = [({"rows": 1030, "hidden": 2}, {"eps": 1e-6})] if "first_rows" in entry.name else SETTINGS[operation]
    for setting in settings:
        for flavour in ("normal", "left_padded"):
            case = _case(operation, setting, flavour, 1)
            names = differentiable(signatures()[operation], case)
            for wrt in [names] if signatures()[operation].composition else [[name] for name in names]:
                with np.errstate(all="ignore"):
                    numeric, analytic = _slopes(case, table, wrt, 3)
                agree = abs(numeric - analytic) <= 1e-6 * (1 + abs(numeric))
                if np.isfinite(numeric) and not agree:
                    found += wrt
    return found


def _keeps_forward(entry: Mutant) -> bool:
    made = entry.entry()
    return isinstance(made, Operation) and made.forward is TABLE[entry.operation].forward


def _differentiated(entry: Mutant) -> bool:
    return bool(signatures()[DIFFERENTIABLE.get(entry.operation, entry.operation)].gradients)


DIFFERENTIATED = sorted(name for name, entry in MUTANTS.items() if _differentiated(entry))
BACKWARD_ONLY = [name for name in DIFFERENTIATED if _keeps_forward(MUTANTS[name])]


@pytest.mark.parametrize("name", [name for name in DIFFERENTIATED if name not in {*BACKWARD_ONLY, *ROUNDED, *OTHER_GRADIENT}])
def test_backward_is_the_derivative_of_the_wrong_forward(name: str) -> None:
    assert _inconsistent(MUTANTS[name]) == []


@pytest.mark.parametrize("name", sorted(set(BACKWARD_ONLY) - SMALL_SLOPES))
def test_backward_only_mutant_contradicts_its_forward(name: str) -> None:
    assert _inconsistent(MUTANTS[name]) != []


def _held(case: Case, name: str) -> Any:
    """The dtype that the vocabulary gives an output."""
    output = signatures()[case.operation].outputs[name.split("/")[0]]
    declared = "float32" if output.group == "trainable" else output.dtype
    held = case.dtype if declared == "storage" else "float64" if (declared, case.dtype) == ("float32", "float64") else declared
    return STORAGE.get(held, np.dtype(held))


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_runs_in_mixed_precision(name: str) -> None:
    """A result that leaves float32 is a TypeError of the wrapper."""
    entry = MUTANTS[name]
    subject = mutants.subject(name)
    case = _case(entry.operation, SETTINGS[entry.operation][-1], "normal", 0, "bfloat16")
    outputs = subject.run(case.operation, case.inputs, case.scalars, "bfloat16")
    assert {output: value.dtype for output, value in outputs.items()} == {output: _held(case, output) for output in outputs}
    if wrt := differentiable(signatures()[case.operation], case):
        gradients = subject.differentiate(case.operation, case.inputs, case.scalars, case.cotangents, wrt, "bfloat16")
        assert set(gradients) == set(wrt)


def test_record_gives_local_gradients() -> None:
    case = _case("classifier_loss", SETTINGS["classifier_loss"][0], "normal", 0)
    calls = ReferenceSubject().record("classifier_loss", case.inputs, case.scalars, "float64", case.cotangents)
    by_path = {call.path: call for call in calls}
    name = "model.layers.0.self_attn.q_proj"
    wanted = reference.differentiate("classifier_loss", case.inputs, case.scalars, case.cotangents, [f"parameters/{name}.lora_A.weight"])
    np.testing.assert_allclose(by_path[name].gradients["lora_a"], wanted[f"parameters/{name}.lora_A.weight"], rtol=1e-12, atol=1e-15)
    assert calls[-1].path == "loss"
    assert calls[-1].cotangents["loss"] == case.cotangents["loss"]
    plain = ReferenceSubject().record("classifier_loss", case.inputs, case.scalars, "float64")
    assert [call.path for call in plain] == [call.path for call in calls]
    assert not any(call.gradients or call.cotangents for call in plain)


class _Watching(dict[str, Any]):
    """A table that notes what is looked up."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        super().__init__(table)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("operation", sorted(reference.COMPOSITIONS))
def test_uses_is_what_compositions_call(operation: str) -> None:
    seen: set[str] = set()
    for sizes, scalars in [*SETTINGS[operation], (SETTINGS[operation][0][0], {**SETTINGS[operation][0][1], **NF4[2]})]:
        table = _Watching(TABLE)
        case = _case(
            operation, (sizes, {name: value for name, value in scalars.items() if name in signatures()[operation].scalars}), "normal", 0
        )
        reference.record(operation, case.inputs, case.scalars, table)
        seen |= table.seen
    assert seen - {operation} == mutants.USES[operation]


def test_reaching_lists_the_mutants_of_what_is_called() -> None:
    names = {entry.name for entry in reaching("classifier_forward")}
    assert {"rms_norm_eps_dropped", "nf4_not_applied", "nf4_absmax_signed", "pool_detached"} <= names
    assert not names & {"decoder_layers_swapped", "bce_unstable", "nf4_linear_bias_dropped", "cross_entropy_sum", "adamw_decay_dropped"}
    assert {entry.operation for entry in reaching("softmax")} == {"softmax"}


def test_every_step_that_a_mutant_names_is_in_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert absent_steps() == {}
    gone = {"renamed": "impl.fit:of_before", "moved": "impl.of_before:fit", "inherited": "impl.trainer:Trainer.__str__"}
    for name, step in gone.items():
        monkeypatch.setitem(STEPS, name, StepMutant(name, step, ("own",), "It is wrong.", lambda right: right))
    assert absent_steps() == gone
    monkeypatch.setattr(catalogue_command, "FOLDER", tmp_path)
    assert catalogue_command.run(argparse.Namespace()) == 1
    assert "mutant renamed: impl.fit:of_before is not there" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_mutant_has_a_line_and_a_name_of_its_own() -> None:
    with pytest.raises(ValueError, match="two mutants are called softmax_unnormalised"):
        enter("softmax", softmax_unnormalised=("Another one.", lambda entry: entry))
    with pytest.raises(ValueError, match="nothing_said: needs a docstring"):
        wrong_step("impl.fit:_FREE", name="nothing_said")(lambda free: free)


@pytest.mark.parametrize(("old", "times"), [("exponential", 4), ("no such text", 0)])
def test_an_edit_replaces_a_text_that_stands_in_the_source_once(old: str, times: int) -> None:
    with pytest.raises(ValueError, match=rf"softmax\.py: a mutant replaces '{old}', which stands there {times} times, not once"):
        edited((old, "1"))(TABLE["softmax"])


def test_an_edit_of_one_pass_keeps_the_other() -> None:
    correct, edit = TABLE["softmax"], ("np.exp(shifted)", "np.exp(2 * shifted)")
    both, backward = edited(edit)(correct), edited(edit, only="backward")(correct)
    assert both.forward is not correct.forward
    assert backward.forward is correct.forward
    assert both.backward is backward.backward is not correct.backward


class _Program:
    """A function, a method, a property, a class method and a constant."""

    constant = 3

    def method(self, x: int) -> int:
        return x + self.constant

    @property
    def twice(self) -> int:
        return 2 * self.constant

    @classmethod
    def of(cls, x: int) -> int:
        return x * cls.constant


@pytest.mark.parametrize(
    ("attribute", "wrong", "asked", "answer"),
    [
        ("method", lambda method, self, x: -method(self, x), lambda: _Program().method(4), -7),
        ("twice", lambda twice, self: -twice(self), lambda: _Program().twice, -6),
        ("of", lambda of, x: -of(x), lambda: _Program.of(5), -15),
        ("constant", lambda constant: -constant, lambda: _Program.constant, -3),
    ],
)
def test_a_wrong_step_is_given_the_right_one(
    attribute: str, wrong: Callable[..., Any], asked: Callable[[], int], answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = StepMutant("wrong", "tests:_Program", ("own",), "It is negative.", wrong)
    monkeypatch.setattr(_Program, attribute, step.make(vars(_Program)[attribute]))
    assert asked() == answer
