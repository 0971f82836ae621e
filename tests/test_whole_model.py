"""Whole models: claims' models follow from a seed, their noise is told the same way twice, and a wrong layer is named."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from falsifiers_claims import CLAIMS

from blackswan.falsifiers.diagnosis.blame import diagnose
from blackswan.falsifiers.mutants.registry import applied
from blackswan.falsifiers.mutants.whole_models import rounded_attention_scaled
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors
from blackswan.falsifiers.numeric.whole_model import SHAPES, chosen, dtypes, in_order, model, of_the_reference
from blackswan.falsifiers.subjects.impl import models
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.system import whole_models
from blackswan.falsifiers.system.trial import Trial
from blackswan.impl import decoder
from blackswan.reference.nf4 import dequantize
from blackswan.reference.table import Array


def case() -> Case:
    return Case("", "bfloat16", {}, {}, 0, "normal", {})


def trial(name: str, seed: int = 0) -> Trial:
    return Trial(Attack(CLAIMS[name], Implementation("cpu").using("torch"), "bfloat16"), seed)


def failing(name: str, mutant: str | None, seed: int = 0) -> Comparison | None:
    with applied(mutant):
        return next((each for each in trial(name, seed).run() if not each.held), None)


def test_few_numbers_of_a_small_model_are_judged_by_many_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the head's bias at this seed errs by 4 times the error of rounding to nearest alone."""
    monkeypatch.setattr(whole_models, "REPLAYS", 0)
    assert failing("WHOLE-TORCH", None, 2) is None
    monkeypatch.setattr(whole_models, "THOROUGH_REPLAYS_OF_SMALL", 0)
    assert failing("WHOLE-TORCH", None, 2) is not None


def test_small_models_have_no_number_that_a_program_would_have_by_mistake() -> None:
    whole = model("qwen2.5-0.5b", 0, true_size=False)
    assert whole.heads * whole.head_dim != whole.hidden
    assert whole.theta not in (1e4, 1e6)
    assert {model(name, 0, true_size=False).targets for name in SHAPES} == {"all", "q_v"}


@pytest.mark.parametrize(
    ("mutant", "tensor"),
    [
        ("whole_last_value_bias_dropped", "plain hidden/model.layers.2"),
        ("whole_first_layer_detached", "plain gradient/model.layers.0."),
        ("whole_first_layer_alone_quantised", "NF4 hidden/model.layers.1"),
    ],
)
def test_the_first_output_that_is_outside_is_the_one_that_fails(mutant: str, tensor: str) -> None:
    found = failing("WHOLE-TORCH", mutant)
    assert found.tensor.startswith(tensor)


@pytest.mark.parametrize(
    ("mutant", "place"),
    [("whole_last_value_bias_dropped", "model.layers.2.self_attn.v_proj"), ("whole_first_mlp_everywhere", "model.layers.1.mlp.gate_proj")],
)
def test_the_culprit_is_the_first_wrong_call_of_that_layer(mutant: str, place: str) -> None:
    found = failing("WHOLE-TORCH", mutant)
    with applied(mutant):
        culprit = diagnose(CLAIMS["WHOLE-TORCH"], case(), found, Implementation("cpu").using("torch"))
    assert culprit.path == place
    assert culprit.operation in ("linear", "lora_linear")


def test_a_gradient_that_does_not_arrive_is_blamed_on_its_layer() -> None:
    found = failing("WHOLE-TORCH", "whole_first_layer_detached")
    with applied("whole_first_layer_detached"):
        culprit = diagnose(CLAIMS["WHOLE-TORCH"], case(), found, Implementation("cpu").using("torch"))
    assert culprit.path.startswith("model.layers.0")


def test_float64_has_to_be_the_references_first() -> None:
    found = failing("WHOLE-QWEN3", "whole_head_norms_swapped")
    assert found.tensor.startswith("float64-plain hidden/model.layers.0")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are judged as true shapes are, though they are small; nothing that was kept for true shapes is used or changed."""
    monkeypatch.setattr(whole_models, "_judged_alone", lambda _: True)
    monkeypatch.setattr(whole_models, "_kept", {})


@pytest.fixture
def attention_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 0.95 in every dtype but float64, which is half the error of the mutant in the catalogue."""
    monkeypatch.setattr(decoder, "call", rounded_attention_scaled(0.95)(decoder.call))


@pytest.mark.usefixtures("attention_scaled")
def test_an_error_of_all_rounded_runs_is_no_noise() -> None:
    found = failing("WHOLE-QWEN3", None)
    assert found.tensor == "plain hidden/model.layers.0"


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("seed", [0, 2])
def test_the_correct_implementation_holds_by_its_own_noise(seed: int) -> None:
    assert failing("WHOLE-QWEN3", None, seed) is None


@pytest.mark.usefixtures("as_on_a_gpu", "attention_scaled")
def test_the_subjects_own_noise_has_to_be_the_references_first() -> None:
    found = failing("WHOLE-QWEN3", None)
    assert found.tensor == "rounded-plain hidden/model.layers.0"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_noise_that_only_replays_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = models._Rounding._moved
    monkeypatch.setattr(models._Rounding, "_moved", lambda self, value, step: moved(self, value, max(step, 2.0**-5)))
    found = failing("WHOLE-QWEN3", None)
    assert found.tensor == "rounded-plain hidden/model.embed_tokens"


def test_rounded_runs_of_torch_have_the_references_noise() -> None:
    """Rounding to nearest has no chance in it but the order of sums; the median over the outputs of the ratio of the noise is one."""
    for nf4 in (False, True):
        whole = replace(chosen(CLAIMS["WHOLE-QWEN3"], 0, "cpu"), nf4=nf4)
        ours = whole_models._oracle(trial("WHOLE-QWEN3"), whole)
        theirs = of_the_reference(whole, "bfloat16")
        for replays, low, high in ((0, 0.85, 1.15), (2, 0.75, 1.35)):
            one, other = ours.floors(replays), theirs.floors(replays)
            ratios = [one[name].rms / other[name].rms for name in one]
            assert low < float(np.median(ratios)) < high
            assert min(ratios) > 0.4
            assert max(ratios) < 2.5


def test_the_loss_is_given_the_noise_that_its_logits_pass_on() -> None:
    known = of_the_reference(model("qwen2.5-0.5b", 1, true_size=False), "bfloat16")
    floors = known.floors(2)
    assert 0 < floors["loss"].rms <= floors["logits"].rms * 2 / np.sqrt(known.whole.batch) + np.abs(known.expected["loss"]) * 2.0**-8


def test_outputs_come_in_the_order_of_the_computation() -> None:
    whole = model("qwen2.5-0.5b", 0, true_size=False)
    expected = of_the_reference(whole, "bfloat16").expected
    names = list(expected)
    assert names[:6] == [f"hidden/{path}" for path in ("model.embed_tokens", *whole.blocks, "model.norm")] + ["logits"]
    assert names[6] == "loss"
    layers = [int(name.split(".")[2]) for name in names if ".lora_" in name]
    assert layers == sorted(layers, reverse=True)
    assert expected["hidden/model.norm"].shape == (int(whole.inputs["mask"].sum()), whole.hidden)
    held = dtypes(expected, "bfloat16")
    assert str(held["logits"]) == "bfloat16"
    assert str(held["loss"]) == str(held[names[-1]]) == "float32"


def test_a_missing_gradient_is_a_finding() -> None:
    whole = model("qwen2.5-0.5b", 0, true_size=False)
    expected = of_the_reference(whole, "bfloat16").expected
    mask = whole.inputs["mask"]

    def padded(value: Array) -> Array:
        full = np.zeros((*mask.shape, whole.hidden))
        full[mask] = value
        return full

    answer = {name: padded(value) if name.startswith("hidden/") else value for name, value in expected.items()}
    assert whole_models._ordered(expected, whole, answer)[1] == []
    assert in_order(whole, answer).keys() == expected.keys()
    lost = answer.pop("gradient/score.bias")
    assert [each.tensor for each in whole_models._ordered(expected, whole, answer)[1]] == ["gradient/score.bias"]
    cut = {**answer, "gradient/score.bias": lost, "hidden/model.norm": answer["hidden/model.norm"][:1]}
    assert [each.reason for each in whole_models._ordered(expected, whole, cut)[1]] == ["shape"]


def test_parameters_are_of_a_checkpoints_dtypes_and_their_codes_are_theirs() -> None:
    whole = model("qwen3-4b", 3, true_size=False)
    stored, name = whole.parameters(), "model.layers.1.mlp.up_proj.weight"
    assert stored[name].dtype == ml_dtypes.bfloat16
    assert stored["score.weight"].dtype == np.float32
    assert whole.parameters() is replace(whole, nf4=True).parameters()
    back = dequantize(stored[f"{name}.nf4.codes"], stored[f"{name}.nf4.absmax"], *stored.shapes[name], 64)
    assert 0.05 < Errors.of(back - stored[name].astype(np.float32)).rms / Errors.of(back).rms < 0.15
    assert "model.norm.weight.nf4.codes" not in stored
    with pytest.raises(ValueError, match="read-only"):
        stored[name][0] = 0


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_true_shapes_are_those_of_the_published_models(name: str) -> None:
    whole = model(name, 7, true_size=True)
    stored = whole.parameters()
    count = sum(int(np.prod(shape)) for key, shape in stored.shapes.items() if key not in stored.trainable)
    assert count == {"qwen2.5-0.5b": 494_032_768, "qwen3-4b": 4_022_468_096}[name]
    assert whole == model(name, 8, true_size=True)
    assert model(name, 7, true_size=True, layers=1).layers == 1
