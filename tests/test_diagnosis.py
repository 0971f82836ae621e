"""Who is to blame: mutants planted into the real model are traced to their operation, and an honest subject is not blamed."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from falsifiers_claims import CLAIMS

from benchmarks.planting import COMPOSITIONS, FIRST_WRONG, NOT_PLANTED, culprit, planting
from blackswan.contracts.model import Factors, Tolerance
from blackswan.falsifiers.diagnosis.blame import diagnose, suspicions
from blackswan.falsifiers.diagnosis.mutant_match import questions
from blackswan.falsifiers.mutants import MUTANTS
from blackswan.falsifiers.mutants import subject as mutated
from blackswan.falsifiers.runner.engine import Options, cases, falsify
from blackswan.falsifiers.runner.verdict import Culprit, State
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.subjects.protocol import Interrupted
from blackswan.impl.decoder import FeedForward
from blackswan.impl.dispatch import replaced
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.optimiser import AdamW

IMPL = Implementation()
QUICK = Options(examples=3, shrink=False)


def blamed(claim: str, dtype: str, plant, left_out=()) -> Culprit:
    with plant:
        verdict = falsify(CLAIMS[claim], dtype, IMPL, QUICK)
        assert verdict.state is State.FALSIFIED, f"{claim} holds with the mutant in the model"
        found = diagnose(verdict.claim, verdict.case, verdict.comparison, IMPL, left_out)
    assert found is not None
    return found


def planted(mutant: str, claim: str, dtype: str = "float32", left_out=()) -> Culprit:
    plant = planting(mutant, dtype)
    assert not isinstance(plant, str), plant
    return blamed(claim, dtype, plant(), left_out)


@pytest.mark.parametrize(
    ("mutant", "claim", "dtype", "path"),
    [
        ("linear_bias_dropped", "FWD-DECODER", "float32", "model.layers.0.self_attn.q_proj"),
        ("attention_scale_from_hidden", "FWD-DECODER", "bfloat16", "model.layers.0.self_attn.attention"),
        ("rms_norm_gradient_without_projection", "BWD-DECODER", "float32", "model.norm"),
        ("pool_detached", "CLS-GRADIENT", "float32", "pool"),
        ("lora_b_gradient_unscaled", "CLS-GRADIENT", "bfloat16", "model.layers.0"),
        ("decoder_final_norm_dropped", "FWD-DECODER", "float32", "model.norm"),
        ("decoder_norms_swapped", "FWD-DECODER", "float32", "model.layers.0.input_layernorm"),
        ("nf4_not_applied", "CLS-FORWARD-NF4", "float32", "model.layers.0.self_attn.q_proj.weight.nf4"),
        ("nf4_blocks_per_row", "CLS-FORWARD-NF4", "float32", "model.layers.0.self_attn.q_proj.weight.nf4"),
        ("classifier_targets_q_k", "CLS-FORWARD", "float32", "model.layers.0.self_attn.v_proj"),
        ("cross_entropy_weights_dropped", "CLS-LOSS", "float32", "loss"),
        ("adamw_eps_inside_root", "CLS-TRAJECTORY", "float32", "steps.0.adamw"),
        ("train_reports_clipped_norm", "CLS-TRAJECTORY", "float32", "steps."),
        ("train_moments_reset", "CLS-TRAJECTORY", "float32", "steps.1.adamw"),
        ("train_steps_head_only", "CLS-TRAJECTORY", "float32", "steps.0.adamw"),
    ],
)
def test_the_operation_is_named_without_its_mutant(mutant, claim, dtype, path):
    found = planted(mutant, claim, dtype, left_out=(mutant,))
    assert found.operation == culprit(mutant), found
    assert found.path.startswith(path), found
    assert found.mutant != mutant


@pytest.mark.parametrize("mutant", ["swiglu_sigmoid_only", "rope_inverse", "decoder_head_untied"])
def test_the_mutant_is_named_with_its_distance(mutant):
    found = planted(mutant, "FWD-DECODER")
    assert found.mutant == mutant
    assert found.distance < 1e-5


def test_a_mutant_of_an_operation_that_the_reference_does_not_call_is_named_by_the_call():
    found = planted("nf4_linear_gradient_untransposed", "CLS-GRADIENT-NF4")
    assert (found.operation, found.mutant) == ("nf4_linear", "nf4_linear_gradient_untransposed")


def test_a_break_in_the_history_between_two_calls_is_found():
    whole = FeedForward.forward
    found = blamed("BWD-DECODER", "float32", patch.object(FeedForward, "forward", lambda self, x: whole(self, x).detach()))
    assert found.path.endswith("mlp.down_proj")
    assert "no gradient" in found.explanation


def test_a_gradient_lost_inside_a_call_is_the_calls_own():
    right = OPERATIONS["swiglu"]
    found = blamed("BWD-DECODER", "float32", replaced({"swiglu": lambda gate, up: right(gate.detach(), up)}))
    assert (found.operation, found.explanation) == ("swiglu", "gives no gradient of its gate")


def test_an_operation_that_raises_is_named():
    def raising(**_):
        raise ValueError("out of order")

    found = blamed("FWD-DECODER", "float32", replaced({"attention": raising}))
    assert found.operation == "attention"
    assert "out of order" in found.explanation
    case = next(cases(CLAIMS["FWD-DECODER"], "float32", QUICK))
    with replaced({"attention": raising}), pytest.raises(Interrupted) as interrupted:
        IMPL.record(case.operation, case.inputs, case.scalars, "float32")
    assert interrupted.value.calls[-1].operation == "rope"
    assert isinstance(interrupted.value.__cause__, ValueError)


def test_an_operation_that_changes_its_mind_is_named():
    state = torch.Generator().manual_seed(0)
    right = OPERATIONS["swiglu"]
    found = blamed(
        "FWD-DETERMINISTIC",
        "float32",
        replaced({"swiglu": lambda gate, up: right(gate, up) * (1 + 1e-7 * torch.randn(gate.shape, generator=state))}),
    )
    assert (found.operation, found.explanation) == ("swiglu", "answers differently the second time")


def test_a_claim_on_two_operations_names_the_wrong_one():
    right = OPERATIONS["lora_unmerge"]
    plant = replaced({"lora_unmerge": lambda weight, lora_a, lora_b, alpha: right(weight, lora_a, lora_b, -alpha)})
    found = blamed("LORA-MERGE-ROUNDTRIP", "float32", plant)
    assert (found.operation, found.mutant) == ("lora_unmerge", "lora_unmerge_adds")


def test_a_claim_on_an_operation_names_it():
    right = OPERATIONS["softmax"]
    found = blamed("OP-SOFTMAX", "float32", replaced({"softmax": lambda x: right(x) + 1e-3}))
    assert (found.operation, found.path) == ("softmax", "softmax")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("FWD-DECODER", "bfloat16"), ("BWD-DECODER", "float32"), ("CLS-FORWARD-NF4", "bfloat16"), ("CLS-TRAJECTORY", "bfloat16")],
)
def test_an_honest_subject_under_a_tolerance_that_is_too_tight_is_not_blamed(name, dtype):
    tight = Tolerance("rounding", {dtype: Factors(1e-3, 1e-3, 1e-3)})
    claim = replace(CLAIMS[name], tolerance=tight)
    verdict = falsify(claim, dtype, IMPL, QUICK)
    assert verdict.state is State.FALSIFIED
    found = diagnose(claim, verdict.case, verdict.comparison, IMPL)
    assert (found.operation, found.path, found.mutant) == (claim.operation, claim.operation, None)
    assert found.explanation.endswith("leaves the tolerance; no recorded call was found wrong")


def test_an_optimiser_that_lacks_a_parameter_is_named(monkeypatch):
    right = AdamW.__init__
    monkeypatch.setattr(AdamW, "__init__", lambda self, named, decay: right(self, dict(list(named.items())[:-1]), decay))
    verdict = falsify(CLAIMS["CLS-TRAJECTORY"], "float32", IMPL, QUICK)
    found = diagnose(verdict.claim, verdict.case, verdict.comparison, IMPL)
    assert (found.operation, found.path) == ("adamw_step", "steps.0.adamw")
    assert "elements; the trainable parameters have" in found.explanation


@pytest.mark.parametrize("name", ["FWD-PADDING", "CLS-GRADIENT", "CLS-TRAJECTORY", "LORA-MERGE-ROUNDTRIP", "OP-POOL-REFUSES-EMPTY"])
def test_nothing_is_suspected_where_nothing_is_wrong(name):
    claim = CLAIMS[name]
    case = next(cases(claim, "float32", QUICK))
    assert list(suspicions(claim, questions(claim, case, IMPL), IMPL)) == []


def test_the_reference_itself_is_traced_too():
    found = falsify(CLAIMS["CLS-TRAJECTORY"], "float32", mutated("clip_per_tensor"), QUICK)
    assert found.state is State.FALSIFIED
    culprit_ = diagnose(found.claim, found.case, found.comparison, mutated("clip_per_tensor"))
    assert (culprit_.operation, culprit_.mutant) == ("clip_by_global_norm", "clip_per_tensor")


def test_every_mutant_that_planting_names_is_a_composition_of_the_catalogue():
    assert {MUTANTS[name].operation for name in {*FIRST_WRONG, *NOT_PLANTED}} <= set(COMPOSITIONS)
