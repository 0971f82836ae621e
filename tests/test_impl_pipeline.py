"""The pipeline's entry points: one constructor path, steps, gradient vector, several labels, prediction, adapters and merging."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.impl.adapter import _digest
from blackswan.impl.checkpoint import save_checkpoint
from blackswan.impl.commands.predict import predictions
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.corpus import Sample
from blackswan.impl.decoder import random_tensors
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.samples import tokenize

ARCHITECTURE = DecoderConfig("qwen3", 260, 16, 24, 1, 2, 1, 8, 1e-6, 1e4, True, 64)
CONFIG = ClassifyConfig(num_classes=3, lora_rank=2, lora_alpha=4.0, batch_size=2, max_seq_len=16, learning_rate=1e-2)
SAMPLES = [Sample("ls -l", 0), Sample("", 2), Sample("rm -rf /", 1), Sample("echo $x", 1), Sample("mkdir", 2)]
SEVERAL = [Sample("ls", (1, 0, 1)), Sample("", (0, 0, 0)), Sample("rm -rf", (0, 1, 0)), Sample("cd", (1, 1, 1)), Sample("x", (0, 0, 1))]


def pipeline(**settings: Any) -> ClassifyPipeline:
    return ClassifyPipeline.from_random(ARCHITECTURE, replace(CONFIG, **settings))


def weights(of: ClassifyPipeline) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in of.classifier.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"vocab": 256}, {}, r"UTF-8 bytes .*: the model has 256 embeddings"),
        ({}, {"max_seq_len": 65}, "max_seq_len is 65: the model was made for at most 64 positions"),
    ],
)
def test_tokens_and_lengths_must_fit_the_model(changes: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassifyPipeline.from_random(replace(ARCHITECTURE, **changes), replace(CONFIG, **settings))


def test_steps_refuse_what_they_cannot_do() -> None:
    used = pipeline()
    with pytest.raises(ValueError, match="nothing to train on"):
        used.apply()
    with pytest.raises(ValueError, match="there is no gradient"):
        used.gradient_vector()
    with pytest.raises(ValueError, match="5 samples: train_step takes one"):
        used.trainer.train_step(tokenize(SAMPLES, used.tokens, 3).batch(range(5), used.tokens))
    with pytest.raises(ValueError, match="the batch is empty"):
        used.train_batch([])
    with pytest.raises(ValueError, match="no samples"):
        used.evaluate([])
    used.accumulate(SAMPLES[:1])
    before, vector = weights(used), used.gradient_vector()
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        used.apply_gradient_vector(vector * math.nan)
    assert_same(weights(used), before)
    with pytest.raises(RuntimeError, match="1 accumulated samples wait"):
        used.train_batch(SAMPLES)
    used.trainer.discard()
    used.train_batch(SAMPLES)
    with pytest.raises(ValueError, match="samples were read with multi_label True"):
        used.train_batch(tokenize(SEVERAL, used.tokens, 3, multi_label=True))


def test_the_learning_rate_stays_until_it_is_set_and_takes_no_nonsense() -> None:
    used = pipeline()
    for _ in range(3):
        used.train_batch(SAMPLES)
    assert used.learning_rate == 1e-2
    used.learning_rate = 0.0
    before = weights(used)
    used.train_batch(SAMPLES)
    assert_same(weights(used), before)
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="learning_rate is"):
            used.learning_rate = wrong


def test_balanced_weights_need_the_training_data(tmp_path: Path) -> None:
    used = pipeline(class_weights="balanced", epochs=1, validation_fraction=0.0)
    with pytest.raises(ValueError, match="class_weights is 'balanced', which fit"):
        used.train_batch(SAMPLES)
    used.fit(SAMPLES, None, tmp_path / "run")
    assert used.class_weights == pytest.approx((5 / 3, 5 / 6, 5 / 6))
    used.train_batch(SAMPLES)
    again = ClassifyPipeline.from_adapter(tmp_path / "run" / "last")
    assert again.config.class_weights == used.class_weights


@pytest.mark.parametrize(("several", "logits", "expected"), [(True, [0.0, -2e-8, 2e-8], [(0, 0, 1)]), (False, [-40.0, 0.0, 1e-8], [2])])
def test_classes_are_the_logits_where_probabilities_are_rounded(
    several: bool, logits: list[float], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = pipeline(multi_label=several)
    monkeypatch.setattr(used, "_logits", lambda _: torch.tensor([logits]))
    (answer,) = map(json.loads, predictions(used, ["a"]))
    assert used.predict(["a"]) == expected == [tuple(answer["labels"]) if several else answer["label"]]
    assert used.answers(["a"])[1].tolist() == [answer["probabilities"]]


def test_an_adapter_on_random_weights_gives_the_pipeline_again(tmp_path: Path) -> None:
    used = pipeline(multi_label=True, quantize_nf4=True, seed=3, padding_side="left")
    used.train_batch(SEVERAL)
    used.save(tmp_path / "adapter")
    again = ClassifyPipeline.from_adapter(tmp_path / "adapter")
    assert_same(weights(again), weights(used))
    assert again.config == used.config


def test_an_adapter_without_a_base_or_with_bad_settings_is_refused(tmp_path: Path) -> None:
    pipeline().save(tmp_path / "adapter")
    path = tmp_path / "adapter" / "blackswan.json"
    stored = json.loads(path.read_text())
    stored["extra"]["settings"]["epochs"] = 0
    path.write_text(json.dumps(stored | {"digest": _digest(stored)}))
    with pytest.raises(ValueError, match=r"blackswan\.json: epochs is 0"):
        ClassifyPipeline.from_adapter(tmp_path / "adapter")
    del stored["extra"]["random_architecture"]
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="no base_model_name_or_path; say on which checkpoint"):
        ClassifyPipeline.from_adapter(tmp_path / "adapter")


def test_a_merged_model_of_random_weights_keeps_tokens_and_settings(tmp_path: Path) -> None:
    used = pipeline(quantize_nf4=True, pooling="last")
    used.train_batch(SAMPLES)
    used.class_weights = (0.5, 1.0, 1.5)
    used.merge(tmp_path / "merged")
    merged = ClassifyPipeline.from_saved(tmp_path / "merged")
    assert merged.config == replace(used.config, quantize_nf4=False, class_weights=used.class_weights)
    assert "merged into the base weights" in merged.summary()
    texts = [sample.text for sample in SAMPLES]
    torch.testing.assert_close(merged.probabilities(texts), used.probabilities(texts), rtol=1e-4, atol=1e-5)


def test_a_merged_model_is_not_trained(tmp_path: Path) -> None:
    pipeline().merge(tmp_path / "merged")
    merged = ClassifyPipeline.from_merged(tmp_path / "merged")
    attempts = (
        lambda: merged.train_batch(SAMPLES),
        lambda: merged.accumulate(SAMPLES),
        lambda: merged.fit(SAMPLES, None, tmp_path / "run"),
        lambda: merged.save(tmp_path / "adapter"),
        lambda: merged.merge(tmp_path / "again"),
    )
    for attempt in attempts:
        with pytest.raises(ValueError, match="merged is a merged model: its updates are in its weights"):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_folder_is_an_adapter_or_a_merged_model_or_refused(tmp_path: Path) -> None:
    pipeline().save(tmp_path / "adapter")
    pipeline().merge(tmp_path / "merged")
    assert not ClassifyPipeline.from_saved(tmp_path / "adapter").merged
    with pytest.raises(ValueError, match=r"weights of its own; leave the base .* out"):
        ClassifyPipeline.from_saved(tmp_path / "merged", CHECKPOINT)
    with pytest.raises(ValueError, match=r"neither an adapter .* nor a merged model .*; it is a checkpoint without a head"):
        ClassifyPipeline.from_saved(CHECKPOINT)
    with pytest.raises(ValueError, match=r"neither an adapter .* it is something else"):
        ClassifyPipeline.from_saved(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        ClassifyPipeline.from_saved(tmp_path / "nowhere")
    (tmp_path / "merged" / "head.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"head\.safetensors: no such file"):
        ClassifyPipeline.from_saved(tmp_path / "merged")


@pytest.mark.parametrize("content", [3, {"family": "qwen3"}, {"hidden": "wide"}])
def test_a_damaged_random_architecture_is_refused(content: Any, tmp_path: Path) -> None:
    pipeline().save(tmp_path / "adapter")
    path = tmp_path / "adapter" / "blackswan.json"
    stored = json.loads(path.read_text())
    stored["extra"]["random_architecture"] = content
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"blackswan\.json: random_architecture is no architecture"):
        ClassifyPipeline.from_adapter(tmp_path / "adapter")


def test_no_text_has_no_answer() -> None:
    assert pipeline().predict([]) == []
    assert pipeline().probabilities([]).shape == (0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e5])
def test_what_is_not_finite_is_not_merged(bad: float, tmp_path: Path) -> None:
    tensors = {name: value.half() for name, value in random_tensors(ARCHITECTURE, 0).items()}
    name = "model.layers.0.mlp.up_proj.weight" if not math.isfinite(bad) else "model.layers.0.self_attn.q_proj.weight"
    save_checkpoint(tmp_path / "model", ARCHITECTURE, tensors, CHECKPOINT / "tokenizer.json")
    if not math.isfinite(bad):
        tensors[name][0, 0] = bad
        with pytest.raises(ValueError, match=f"{name}: NaN or infinity in float16"):
            save_checkpoint(tmp_path / "spoiled", ARCHITECTURE, tensors)
        save_file(tensors, tmp_path / "model" / "model.safetensors")
    used = pipeline()
    used.source, used.base_checksums = tmp_path / "model", {}
    with torch.no_grad():
        for parameter in used.classifier.trainable_parameters().values():
            parameter.fill_(math.sqrt(bad) if math.isfinite(bad) else 0.1)
    with pytest.raises(ValueError, match=f"{name}: NaN or infinity where torch.float16 holds the merged weight"):
        used.merge(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
