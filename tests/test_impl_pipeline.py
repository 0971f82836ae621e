"""The pipeline's entry points: one constructor path, steps, gradient vector, several labels, prediction, adapters and merging."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.impl.checkpoint import read_config, save_checkpoint
from blackswan.impl.commands.predict import predictions
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.corpus import Sample, load_corpus
from blackswan.impl.decoder import random_tensors
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.samples import tokenize
from blackswan.impl.trainer import BatchResult

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


def test_the_same_settings_give_the_same_pipeline() -> None:
    assert_same(weights(pipeline()), weights(pipeline()))
    assert not torch.equal(weights(pipeline())["score.weight"], weights(pipeline(seed=1))["score.weight"])


def test_a_pipeline_of_a_checkpoint_has_its_weights_and_its_tokens() -> None:
    used = ClassifyPipeline.from_pretrained(CHECKPOINT, replace(CONFIG, num_classes=5))
    assert used.architecture == read_config(CHECKPOINT)
    assert used.encode(["ls -l", ""]) == [used.tokens.encode("ls -l"), [used.tokens.fill]]
    assert str(CHECKPOINT / "tokenizer.json") in used.summary()


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


def test_accumulating_and_applying_is_a_batch() -> None:
    whole, parts = pipeline(), pipeline()
    expected = whole.train_batch(SAMPLES)
    for start in (0, 2, 4):
        parts.accumulate(SAMPLES[start : start + 2])
    assert parts.trainer.accumulated == 5
    applied = parts.apply()
    assert (applied.total, applied.correct) == (5, expected.correct)
    assert math.isclose(applied.loss, expected.loss, rel_tol=1e-6)
    assert math.isclose(applied.gradient_norm or 0.0, expected.gradient_norm or 1.0, rel_tol=1e-4)
    assert parts.trainer.accumulated == 0


def test_raw_and_tokenised_samples_are_alike() -> None:
    raw, tokenised = pipeline(), pipeline()
    assert raw.train_batch(SAMPLES) == tokenised.train_batch(tokenize(SAMPLES, tokenised.tokens, 3))
    assert raw.train_step(SAMPLES[0]) == tokenised.train_step(tokenize(SAMPLES[:1], tokenised.tokens, 3))
    assert_same(weights(raw), weights(tokenised))


def test_a_gradient_vector_goes_out_and_in() -> None:
    direct, through = pipeline(), pipeline()
    result = direct.train_batch(SAMPLES)
    through.accumulate(SAMPLES)
    vector = through.gradient_vector()
    assert math.isclose(float(vector.norm()), result.gradient_norm or 0.0, rel_tol=1e-6)
    before = weights(through)
    for wrong in (vector[:-1], torch.cat([vector, vector[:1]]), vector[None], vector[:0]):
        with pytest.raises(ValueError, match=rf"trainable parameters|{len(vector)}"):
            through.apply_gradient_vector(wrong)
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        through.apply_gradient_vector(vector * math.nan)
    assert_same(weights(through), before)
    assert through.apply_gradient_vector(vector) == result
    assert_same(weights(through), weights(direct))


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
    used.accumulate(SAMPLES[:1])
    with pytest.raises(RuntimeError, match="1 accumulated samples wait"):
        used.train_batch(SAMPLES)
    used.trainer.discard()
    used.train_batch(SAMPLES)
    with pytest.raises(ValueError, match=r"labels are torch\.float32 .*; expected one class a sample"):
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
    assert used.class_weights == pytest.approx((1.5, 0.75, 0.75))
    used.train_batch(SAMPLES)
    again = ClassifyPipeline.from_adapter(tmp_path / "run" / "last")
    assert again.config.class_weights == used.class_weights


def test_several_labels_a_sample() -> None:
    used = pipeline(multi_label=True)
    used.learning_rate = 0.1
    losses = [used.train_batch(SEVERAL).loss for _ in range(80)]
    found = used.evaluate(SEVERAL)
    assert losses[-1] < 0.1 * losses[0]
    assert (found.accuracy, [score.f1 for score in found.per_class]) == (1.0, [1.0] * 3)
    assert found.confusion == ((3, 0, 0, 2), (3, 0, 0, 2), (2, 0, 0, 3))
    assert used.predict([sample.text for sample in SEVERAL]) == [sample.label for sample in SEVERAL]
    probabilities = used.probabilities(["rm -rf"])
    assert probabilities.shape == (1, 3)
    assert probabilities[0, 1] > 0.5 > probabilities[0, 0]


@pytest.mark.parametrize(("several", "logits", "expected"), [(True, [0.0, -2e-8, 2e-8], [(0, 0, 1)]), (False, [-40.0, 0.0, 1e-8], [2])])
def test_classes_are_the_logits_where_probabilities_are_rounded(
    several: bool, logits: list[float], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = pipeline(multi_label=several)
    monkeypatch.setattr(used, "_logits", lambda _: torch.tensor([logits]))
    (answer,) = map(json.loads, predictions(used, ["a"]))
    assert used.predict(["a"]) == expected == [tuple(answer["labels"]) if several else answer["label"]]
    assert used.answers(["a"])[1].tolist() == [answer["probabilities"]]


def test_evaluation_counts_and_changes_nothing() -> None:
    used = pipeline()
    for _ in range(5):
        used.train_batch(SAMPLES)
    used.accumulate(SAMPLES[:2])
    before, vector, rate = weights(used), used.gradient_vector(), used.learning_rate
    found = used.evaluate(SAMPLES)
    predicted = used.predict([sample.text for sample in SAMPLES])
    assert [sum(row) for row in found.confusion] == [1, 2, 2]
    for true, row in enumerate(found.confusion):
        expected = [sum(p == j for p, s in zip(predicted, SAMPLES, strict=True) if s.label == true) for j in range(3)]
        assert list(row) == expected
    assert found.accuracy == sum(row[i] for i, row in enumerate(found.confusion)) / 5
    alone = [used.forward_only([sample]).loss for sample in SAMPLES]
    assert found.loss == pytest.approx(sum(alone) / 5, rel=1e-5)
    assert used.forward_only([]).accuracy == 0.0
    result = used.forward_only(SAMPLES, probabilities=True)
    assert result.probabilities is not None
    torch.testing.assert_close(result.probabilities, used.probabilities([sample.text for sample in SAMPLES]))
    assert_same(weights(used), before)
    assert torch.equal(used.gradient_vector(), vector)
    assert used.learning_rate == rate
    with pytest.raises(ValueError, match="no samples"):
        used.evaluate([])


def test_scores_of_classes_without_samples_or_claims_are_zero() -> None:
    used = pipeline()
    found = used.evaluate([Sample("a", 0), Sample("b", 0)])
    claimed = [sum(row[j] for row in found.confusion) for j in range(3)]
    for score, count in list(zip(found.per_class, claimed, strict=True))[1:]:
        assert (score.support, score.recall, score.precision, score.f1) == (0, 0.0, 0.0, 0.0)
        assert count >= 0


def test_an_adapter_gives_the_pipeline_again(tmp_path: Path) -> None:
    used = ClassifyPipeline.from_pretrained(CHECKPOINT, replace(CONFIG, num_classes=5, quantize_nf4=True, pooling="last"))
    corpus = load_corpus(CORPUS_HELDOUT, 5)[:8]
    used.train_batch(corpus)
    used.save(tmp_path / "adapter")
    again = ClassifyPipeline.from_adapter(tmp_path / "adapter")
    assert (again.config, again.source) == (used.config, CHECKPOINT.resolve())
    assert_same(weights(again), weights(used))
    assert again.evaluate(corpus) == used.evaluate(corpus)
    assert_same(weights(ClassifyPipeline.from_adapter(tmp_path / "adapter", CHECKPOINT)), weights(used))


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
    del stored["digest"]
    stored["extra"]["settings"]["epochs"] = 0
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"blackswan\.json: epochs is 0"):
        ClassifyPipeline.from_adapter(tmp_path / "adapter")
    del stored["extra"]["random_architecture"]
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="no base_model_name_or_path; say on which checkpoint"):
        ClassifyPipeline.from_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("nf4", [False, True])
def test_the_merged_model_answers_as_the_pipeline(tmp_path: Path, nf4: bool) -> None:
    used = ClassifyPipeline.from_pretrained(CHECKPOINT, replace(CONFIG, num_classes=5, quantize_nf4=nf4, learning_rate=5e-2))
    corpus = load_corpus(CORPUS_HELDOUT, 5)[:8]
    texts = [sample.text for sample in corpus]
    before = used.probabilities(texts)
    for _ in range(3):
        used.train_batch(corpus)
    used.class_weights = (0.5, 0.5, 1.0, 1.5, 1.5)
    used.start(None)
    used.merge(tmp_path / "merged")
    merged = ClassifyPipeline.from_saved(tmp_path / "merged")
    assert float((used.probabilities(texts) - before).abs().max()) > 0.05
    torch.testing.assert_close(merged.probabilities(texts), used.probabilities(texts), rtol=1e-4, atol=1e-5)
    assert merged.predict(texts) == used.predict(texts)
    one, other = merged.evaluate(corpus), used.evaluate(corpus)
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert one.confusion == other.confusion
    assert merged.config == replace(used.config, quantize_nf4=False, class_weights=used.class_weights)
    assert "merged into the base weights" in merged.summary()


def test_a_merged_model_of_random_weights_keeps_their_tokens(tmp_path: Path) -> None:
    used = pipeline(multi_label=True, quantize_nf4=True, pooling="last")
    used.train_batch(SEVERAL)
    used.merge(tmp_path / "merged")
    merged = ClassifyPipeline.from_merged(tmp_path / "merged")
    texts = [sample.text for sample in SEVERAL]
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


@pytest.mark.parametrize("content", [3, [], {"family": "qwen3"}, {"hidden": "wide"}])
def test_a_damaged_random_architecture_is_refused(content: Any, tmp_path: Path) -> None:
    pipeline().save(tmp_path / "adapter")
    path = tmp_path / "adapter" / "blackswan.json"
    stored = json.loads(path.read_text())
    stored["extra"]["random_architecture"] = content
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"blackswan\.json: random_architecture is no architecture"):
        ClassifyPipeline.from_adapter(tmp_path / "adapter")


def test_the_summary_counts_what_is_trained() -> None:
    text = pipeline().summary()
    assert f"{2 * (16 + 16) + 2 * (16 + 8) + 3 * 16 + 3} trainable" in text
    for word in ("qwen3", "random weights", "cpu", "UTF-8 bytes", "rank 2, alpha 4, on q_proj, v_proj", "3 classes, mean pooling"):
        assert word in text


def test_a_result_without_samples_has_accuracy_zero() -> None:
    assert BatchResult(math.nan, 0, 0).accuracy == 0.0
    assert pipeline().predict([]) == []
    assert pipeline().probabilities([]).shape == (0, 3)


def test_a_model_that_computes_nonsense_gives_no_answer() -> None:
    used = pipeline()
    with torch.no_grad():
        used.classifier.score.bias[1] = math.nan
    for answer in (used.probabilities, used.predict):
        with pytest.raises((FloatingPointError, ValueError), match=r"logits\[0, 1\] is nan"):
            answer(["ls"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e5])
def test_what_is_not_finite_is_not_merged(bad: float, tmp_path: Path) -> None:
    tensors = {name: value.half() for name, value in random_tensors(ARCHITECTURE, 0).items()}
    name = "model.layers.0.mlp.up_proj.weight" if not math.isfinite(bad) else "model.layers.0.self_attn.q_proj.weight"
    if not math.isfinite(bad):
        tensors[name][0, 0] = bad
    save_checkpoint(tmp_path / "model", ARCHITECTURE, tensors, CHECKPOINT / "tokenizer.json")
    used = pipeline()
    used.source, used.base_checksums = tmp_path / "model", {}
    with torch.no_grad():
        for parameter in used.classifier.trainable_parameters().values():
            parameter.fill_(math.sqrt(bad) if math.isfinite(bad) else 0.1)
    with pytest.raises(ValueError, match=f"{name}: NaN or infinity where torch.float16 holds the merged weight"):
        used.merge(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
