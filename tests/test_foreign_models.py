"""Whole models of others: libraries' under the whole-model claims, a user's own on its own weights. A bug is found and placed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import pytest
import torch
from falsifiers_claims import CLAIMS
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

from blackswan.cli import DOORS
from blackswan.falsifiers.__main__ import main
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.runner.campaign import Selection
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.model_command import check_model
from blackswan.falsifiers.runner.vet import campaign_of
from blackswan.falsifiers.runner.vet import main as vet
from blackswan.falsifiers.subjects.libraries import classifiers
from blackswan.falsifiers.subjects.libraries.transformers import MODEL, MODEL_EAGER
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.falsifiers.system.trial import Trial

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
SIZES = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}
STORED = {"loss_dtype": "storage"}
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "vet" / "models.py"


def first_wrong(claim: str, subject: Any) -> Comparison | None:
    return next((one for one in Trial(Attack(CLAIMS[claim], subject, "bfloat16"), 0).run() if not one.held), None)


@pytest.mark.parametrize("kind", [MODEL, MODEL_EAGER])
@pytest.mark.parametrize("claim", ["WHOLE-TORCH", "WHOLE-QWEN3-BLOCK", "WHOLE-QWEN3"])
def test_transformers_peft_and_bitsandbytes_hold(kind: Callable[[], Any], claim: str) -> None:
    assert first_wrong(claim, kind()) is None


def test_the_loss_in_bfloat16_is_declared_and_nothing_else() -> None:
    found = first_wrong("WHOLE-TORCH", MODEL(declared={"loss_dtype": "float32"}))
    assert (found.tensor, found.reason or found.metric) == ("plain loss", "dtype")


def test_vet_asks_it_in_its_own_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ("--claim", "WHOLE-TORCH", "--claim", "WHOLE-FUSED", "-n", "1", "--verdicts", str(tmp_path / "v.jsonl"))
    assert vet(["transformers:MODEL", *asked]) == 0
    said = capsys.readouterr().out
    assert "HELD       WHOLE-TORCH" in said
    assert "declared weighted_cross_entropy loss_dtype: storage" in said
    assert "the claim is about cuda, and this run's device is cpu" in said, "its tolerance was measured on GPUs alone"


def test_it_lacks_the_backends_of_this_project() -> None:
    with pytest.raises(Lacks, match="has no backend fused"):
        Trial(Attack(CLAIMS["WHOLE-FUSED"], MODEL().using("fused"), "bfloat16"), 0).run()


def test_operations_are_not_asked_of_a_whole_model() -> None:
    with pytest.raises(ValueError, match="has no operation"):
        campaign_of(MODEL(), Selection(["OP-RMSNORM"]), Options())


def _patched(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], None]) -> None:
    """Changes what a step of the building of classifiers gives."""
    step = getattr(classifiers, name)

    def changed(*given: Any) -> Any:
        result = step(*given)
        change(given[0] if result is None else result)
        return result

    monkeypatch.setattr(classifiers, name, changed)


def _absmax_doubled(decoder: Any) -> None:
    decoder.layers[1].mlp.up_proj.weight.quant_state.absmax *= 2


def _lora_unscaled(body: Any) -> None:
    body.get_base_model().layers[2].self_attn.v_proj.scaling["default"] = 1.0


def _other_theta(decoder: Any) -> None:
    decoder.rotary_emb.inv_freq = decoder.rotary_emb.inv_freq**0.9


def _first_layer_sees_all(decoder: Any) -> None:
    attention = decoder.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda **given: forward(**{**given, "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("step", "change", "tensor"),
    [
        ("_quantise", _absmax_doubled, "NF4 hidden/model.layers.1"),
        ("_adapted", _lora_unscaled, "plain hidden/model.layers.2"),
        ("_decoder", _other_theta, "plain hidden/model.layers.0"),
        ("_decoder", _first_layer_sees_all, "plain hidden/model.layers.0"),
    ],
    ids=["absmax", "LoRA scale", "theta", "mask"],
)
def test_a_bug_in_one_layer_is_found_there(step: str, change: Any, tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _patched(monkeypatch, step, change)
    found = first_wrong("WHOLE-TORCH", MODEL_EAGER())
    assert found.tensor == tensor


def causal(dtype: torch.dtype = torch.bfloat16, **further: Any) -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, initializer_range=0.15, **further)).to(dtype)


def classes(**further: Any) -> Any:
    torch.manual_seed(0)
    given = {"pad_token_id": 0, "num_labels": 5, "initializer_range": 0.15, **further}
    return Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_key_value_heads=2, **given)).to(torch.bfloat16)


def qlora(nested: bool = True) -> Any:
    """A classifier with NF4, its scales quantised too, and LoRA on two projections."""
    model = classes()
    for path, layer in [(path, layer) for path, layer in model.model.named_modules() if isinstance(layer, nn.Linear)]:
        made: Any = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, torch.bfloat16, nested, "nf4")
        made.load_state_dict(layer.state_dict())
        model.model.set_submodule(path, made.to(torch.bfloat16).to("cpu"))
    config = LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "o_proj"], task_type="SEQ_CLS")
    model = get_peft_model(model, config)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.1)
    return model


@pytest.mark.parametrize(
    ("make", "declared"),
    [(lambda: causal(torch.float32), {}), (causal, {}), (lambda: causal(tie_word_embeddings=True), {}), (classes, STORED), (qlora, STORED)],
    ids=["float32", "bfloat16", "tied", "classes", "QLoRA"],
)
def test_a_model_holds_on_its_own_weights(make: Any, declared: dict[str, str]) -> None:
    found = check_model(make, declared=declared)
    trained = [name for name, value in make().named_parameters() if value.requires_grad]
    assert sum(one.tensor.startswith("gradient/") for one in found.comparisons) == len(trained)


def _second_detached() -> Any:
    model = causal()
    forward = model.model.layers[1].forward
    model.model.layers[1].forward = lambda hidden, **given: forward(hidden.detach(), **given)
    return model


def _scale_of_lora() -> Any:
    model = qlora()
    model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj").scaling["default"] *= 2
    return model


def _unnormed_queries() -> Any:
    model = causal()
    model.model.layers[1].self_attn.q_norm.forward = lambda queries: queries
    return model


def _scaled() -> Any:
    model = causal()
    model.model.layers[2].self_attn.scaling = 1 / 32
    return model


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (_scaled, "hidden/model.layers.2"),
        (_unnormed_queries, "hidden/model.layers.1"),
        (_scale_of_lora, "hidden/model.layers.1"),
        (_second_detached, "gradient/model.layers.0."),
    ],
)
def test_the_first_wrong_layer_of_a_model_is_named(make: Any, first: str) -> None:
    with pytest.raises(AssertionError, match=rf"{first}\S* is the first to leave its noise"):
        check_model(make, declared=STORED if make is _scale_of_lora else {})


class Own(nn.Module):
    """Other names, and logits alone."""

    def __init__(self) -> None:
        super().__init__()
        inner = causal()
        self.config, self.blocks, self.out = inner.config, inner.model.layers, inner.lm_head
        self.rest = inner.model
        self.rest.layers = nn.ModuleList()
        self.rest.config = None

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        """Logits [batch, seq, vocab]."""
        del attention_mask, labels
        hidden, places = self.rest.embed_tokens(input_ids), torch.arange(input_ids.shape[1])[None]
        turned = self.rest.rotary_emb(hidden, places)
        for block in self.blocks:
            hidden = block(hidden, position_embeddings=turned, position_ids=places)
        return (self.out(self.rest.norm(hidden)),)


MAP = {"blocks.*": "model.layers.*", "rest": "model", "out": "lm_head"}


def test_other_names_are_mapped() -> None:
    assert check_model(Own, names=MAP).held


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Own, {}, "has neither lm_head nor score.weight; the nearest is"),
        (Own, {"names": {**MAP, "block.*": "x"}}, r"names: there is no 'block\.\*'; expected the beginning"),
        (Own, {"names": {"out": "lm_head", "rest": "model"}}, r"has no parameter model\.layers\.0\."),
        (Own, {"names": {**MAP, "out": "rest.norm"}}, "has neither lm_head"),
        (lambda: classes(pad_token_id=None), {}, "no pad_token_id"),
        (lambda: causal(torch.float16), {}, "is torch.float16; expected one of bfloat16, float32"),
        (lambda: causal(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), {}, "rope_parameters"),
        (lambda: nn.Linear(2, 2), {}, r"has no \.config of transformers"),
        (lambda: 3, {}, "gives a int; expected a torch.nn.Module"),
    ],
)
def test_what_cannot_be_held_is_said_by_name(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(make, **options)


def test_a_shape_that_does_not_fit_is_named() -> None:
    model = causal()
    model.config.intermediate_size = 96
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight has the shape \[128, 64\]; expected \[96, 64\]"):
        check_model(model)


def test_the_command_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert DOORS["vet-model"].first == ("vet-model",)
    assert main(["vet-model", f"{EXAMPLE}:scaled", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["first"] == "hidden/model.layers.2"
    assert main(["vet-model", f"{EXAMPLE}:Wrapped", "--names", str(EXAMPLE.with_name("names.json"))]) == 0


def test_a_pooled_row_is_that_of_the_mask() -> None:
    hidden, mask = torch.arange(12.0).reshape(2, 3, 2), torch.tensor([[True, True, False], [True, True, True]])
    for how, rows in {"first": [0, 0], "last": [1, 2]}.items():
        expected = np.stack([hidden[index, row].numpy() for index, row in enumerate(rows)])
        assert np.array_equal(classifiers.pooled(hidden, mask, how).numpy(), expected)
