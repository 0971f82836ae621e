"""The mutants: one for each name of the catalogue, none equivalent to correct code, each a consistent wrong program."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blackswan import contracts, reference
from blackswan.falsifiers import mutants
from blackswan.falsifiers.mutants import MUTANTS, Mutant, reaching
from blackswan.falsifiers.mutants.changes import edited
from blackswan.falsifiers.mutants.registry import StepMutant, wrong_step
from blackswan.falsifiers.mutants.registry import mutants as enter
from blackswan.falsifiers.numeric import strategies
from blackswan.falsifiers.numeric.case import Case, differentiable
from blackswan.falsifiers.numeric.precision import STORAGE, signatures
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference import TABLE
from blackswan.reference.nf4 import MIDPOINTS
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
FLAVOURS = ("normal", "masked", "right_padded", "left_padded", "zeros", "tiny_norm", "outliers")
SEEDS = 2
DIFFERENTIABLE = {"decoder_forward": "language_model_loss", "classifier_forward": "classifier_loss"}
"""The loss through which a composition without gradients of its own is differentiated."""

REFUSALS = {
    "cross_entropy_nan_swallowed",
    "cross_entropy_label_clamped",
    "cross_entropy_one_class_accepted",
    "clip_nan_swallowed",
    "lm_loss_made_up_when_empty",
    "lm_loss_nan_when_empty",
    "pool_empty_accepted",
}
"""Mutants that differ only where the correct operation refuses its input."""

ROUNDED = {
    "linear_accumulates_in_low_precision",
    "rms_norm_weight_rounded",
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


def _cases(operation: str) -> Iterator[Case]:
    for setting in SETTINGS[operation]:
        for flavour in FLAVOURS:
            yield from (_case(operation, setting, flavour, seed) for seed in range(SEEDS))


def _large_logits() -> Case:
    case = _case("weighted_cross_entropy", SETTINGS["weighted_cross_entropy"][0], "normal", 0)
    return replace(case, inputs={**case.inputs, "logits": case.inputs["logits"] * 1000})


def _scaled_inputs(operation: str, factor: float) -> Case:
    case = _case(operation, SETTINGS[operation][0], "normal", 0)
    inputs = {
        name: value * factor if value.dtype.kind == "f" and name not in ("mask", "targets") else value
        for name, value in case.inputs.items()
    }
    return replace(case, inputs=inputs)


def _certain_labels() -> Case:
    """Labels of which logits next to 40 make sure: 1 + e^(−40) is 1 in float64."""
    case = _case("bce_with_logits", SETTINGS["bce_with_logits"][0], "normal", 0)
    sign = 2 * case.inputs["targets"] - 1
    return replace(case, inputs={**case.inputs, "logits": sign * (40 + case.inputs["logits"])})


def _midpoints() -> Case:
    weight = np.concatenate([MIDPOINTS, [1.0]]).astype(np.float64).reshape(2, 8)
    return replace(_case("nf4_quantize", ({"rows": 2, "columns": 8, "block_size": 16}, {}), "normal", 0), inputs={"weight": weight})


def _untied_midpoint() -> Case:
    """A short last block whose absmax is no power of two: a midpoint times it, over it, is the midpoint only by one of two roundings."""
    absmax = np.float32(1.73)
    weight = np.array([[absmax, MIDPOINTS[14] * absmax]], np.float32).astype(np.float64)
    return replace(_case("nf4_quantize", ({"rows": 1, "columns": 2, "block_size": 16}, {}), "normal", 0), inputs={"weight": weight})


def _far_along() -> Case:
    """Positions from 5,001 on, which bfloat16 does not hold."""
    case = _case("rope", SETTINGS["rope"][0], "normal", 0)
    positions = np.broadcast_to(5_001 + np.arange(case.inputs["positions"].shape[1]), case.inputs["positions"].shape)
    return replace(case, inputs={**case.inputs, "positions": positions})


def _other_betas() -> Case:
    return _case("adamw_step", ({"count": 9}, {**ADAM, "step": 3, "learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.95}), "normal", 0)


def _heavier_weights() -> Case:
    """Class weights that do not add up to the number of classes, as a claim's domain draws them."""
    case = _case("weighted_cross_entropy", SETTINGS["weighted_cross_entropy"][0], "normal", 0)
    classes = case.inputs["logits"].shape[1]
    return replace(case, inputs={**case.inputs, "class_weights": np.full(classes, 4.0)})


SHOWN_BY: dict[str, Callable[[], Case]] = {
    "cross_entropy_weights_add_up_to_classes": _heavier_weights,
    "nf4_ties_to_upper": _midpoints,
    "rope_positions_in_bfloat16": _far_along,
    "rope_table_too_short": _far_along,
    "adamw_beta1_hard_coded": _other_betas,
    "adamw_beta2_hard_coded": _other_betas,
    "nf4_tail_block_divides": _untied_midpoint,
    "cross_entropy_without_max_shift": _large_logits,
    "softmax_without_max_shift": lambda: _scaled_inputs("softmax", 1000),
    "attention_without_max_shift": lambda: _scaled_inputs("attention", 100),
    "rms_norm_weight_gradient_of_first_rows": lambda: _case("rms_norm", ({"rows": 1030, "hidden": 2}, {"eps": 1e-6}), "normal", 0),
    "lm_loss_first_tokens_only": lambda: _case("lm_cross_entropy", ({"batch": 1, "seq": 2, "vocab": 70_000}, {}), "normal", 0),
    "bce_log_of_one_plus": _certain_labels,
    "bce_probability_floor": _certain_labels,
    "bce_through_the_sum": _certain_labels,
    "cross_entropy_gradient_floored": lambda: _case("weighted_cross_entropy", ({"batch": 1, "classes": 3}, {}), "certain", 0),
    "per_sample_gradient_floored": lambda: _case("cross_entropy_per_sample", ({"rows": 1, "classes": 3}, {}), "certain", 0),
    "bce_gradient_of_target": _certain_labels,
    "bce_gradient_one_sided": lambda: _scaled_inputs("bce_with_logits", 0),
    "bce_unstable": lambda: _scaled_inputs("bce_with_logits", 100),
}
"""Inputs for mutants that random values of ordinary size do not show."""


def _answers(case: Case, table: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Outputs, and gradients where the operation has them."""
    with np.errstate(all="ignore"):
        found = reference.evaluate(case.operation, case.inputs, case.scalars, table)
        signature = signatures()[case.operation]
        if signature.gradients:
            wrt = differentiable(signature, case)
            gradients = reference.differentiate(case.operation, case.inputs, case.scalars, case.cotangents, wrt, table)
            found |= {f"gradient of {name}": value for name, value in gradients.items()}
    return found


def _differs(expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]) -> bool:
    """Whether some array differs by clearly more than float64 rounding; the differing placement of NaN counts."""
    for name, wanted in expected.items():
        got = actual[name]
        if wanted.shape != got.shape or not np.array_equal(np.isfinite(wanted), np.isfinite(got)):
            return True
        finite = np.isfinite(wanted)
        difference = np.abs(wanted[finite].astype(np.float64) - got[finite].astype(np.float64))
        scale = np.abs(wanted[finite].astype(np.float64)).max(initial=0.0)
        if difference.size and difference.max() > 1e-6 * scale:
            return True
    return False


def _shows(entry: Mutant, cases: Iterable[Case]) -> bool:
    table = entry.build()
    return any(_differs(_answers(case, reference.TABLE), _answers(case, table)) for case in cases)


def _plausible(entry: Mutant) -> Iterable[Case]:
    return [SHOWN_BY[entry.name]()] if entry.name in SHOWN_BY else _cases(entry.operation)


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


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - REFUSALS))
def test_mutant_is_not_equivalent_to_correct_code(name: str) -> None:
    assert _shows(MUTANTS[name], _plausible(MUTANTS[name]))


def _spelt_otherwise(_: Operation) -> Operation:
    """SwiGLU in another order of products: correct."""
    return replace(TABLE["swiglu"], forward=lambda gate, up: up * gate / (1 + np.exp(-gate)))


@pytest.mark.parametrize("operation", ["attention", "swiglu"])
def test_an_equivalent_mutant_is_found(operation: str) -> None:
    make = {"attention": edited(("QUERIES = 64", "QUERIES = 3")), "swiglu": _spelt_otherwise}[operation]
    assert not _shows(Mutant("equivalent", operation, ("own",), "correct", make), _cases(operation))


def test_positions_from_one_is_equivalent_in_a_model() -> None:
    """Rotary attention sees differences of positions only: the mutant belongs to claims about the rotation itself."""
    table = MUTANTS["rope_positions_from_one"].build()
    for case in _cases("classifier_forward"):
        assert not _differs(_answers(case, reference.TABLE), _answers(case, table))


def _bad_inputs() -> dict[str, tuple[Case, type[Exception]]]:
    entropy = _case("weighted_cross_entropy", SETTINGS["weighted_cross_entropy"][0], "normal", 0)
    one_class = _case("weighted_cross_entropy", ({"batch": 3, "classes": 1}, {}), "normal", 0)
    clip = _case("clip_by_global_norm", SETTINGS["clip_by_global_norm"][0], "normal", 0)
    tokens = _case("lm_cross_entropy", ({"batch": 2, "seq": 1, "vocab": 5}, {}), "normal", 0)
    pool = _case("pool", SETTINGS["pool"][0], "normal", 0)
    logits, gradients = entropy.inputs["logits"].copy(), clip.inputs["gradients"].copy()
    logits[1, 2] = gradients[1, 2] = np.nan
    return {
        "cross_entropy_nan_swallowed": (replace(entropy, inputs={**entropy.inputs, "logits": logits}), ValueError),
        "cross_entropy_label_clamped": (replace(entropy, inputs={**entropy.inputs, "labels": entropy.inputs["labels"] + 9}), ValueError),
        "cross_entropy_one_class_accepted": (one_class, ValueError),
        "clip_nan_swallowed": (replace(clip, inputs={"gradients": gradients}), FloatingPointError),
        "lm_loss_made_up_when_empty": (tokens, ValueError),
        "lm_loss_nan_when_empty": (tokens, ValueError),
        "pool_empty_accepted": (replace(pool, inputs={**pool.inputs, "mask": pool.inputs["mask"] & False}), ValueError),
    }


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_mutant_lacks_the_refusal(name: str) -> None:
    case, error = _bad_inputs()[name]
    with pytest.raises(error):
        reference.evaluate(case.operation, case.inputs, case.scalars)
    answer = reference.evaluate(case.operation, case.inputs, case.scalars, MUTANTS[name].build())
    assert all(np.isfinite(value).all() or "nan" in name for value in answer.values())


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


@pytest.mark.parametrize("operation", sorted(SETTINGS))
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_subject_answers_in_the_declared_dtypes(operation: str, dtype: str) -> None:
    subject, case = ReferenceSubject(), _case(operation, SETTINGS[operation][-1], "normal", 0, dtype)
    outputs = subject.run(operation, case.inputs, case.scalars, dtype)
    expected = reference.evaluate(operation, case.inputs, case.scalars)
    assert set(outputs) == set(expected)
    for name, value in outputs.items():
        assert value.dtype == _held(case, name)
        if dtype == "float64":
            np.testing.assert_allclose(value, expected[name], rtol=1e-6)


def test_trainable_masters_have_float32_gradients() -> None:
    case = _case("classifier_loss", SETTINGS["classifier_loss"][0], "normal", 0, "bfloat16")
    wrt = differentiable(signatures()["classifier_loss"], case)
    gradients = ReferenceSubject().differentiate("classifier_loss", case.inputs, case.scalars, case.cotangents, wrt, "bfloat16")
    assert {value.dtype for value in gradients.values()} == {np.dtype(np.float32)}


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
