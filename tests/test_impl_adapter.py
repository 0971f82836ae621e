"""Adapters and merged checkpoints against PEFT and transformers themselves, and what saving and loading refuse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.impl import folder as folders
from blackswan.impl.adapter import Adapter, load_adapter, prepare_sequence_classifier, save_adapter
from blackswan.impl.architecture import to_huggingface
from blackswan.impl.checkpoint import Checkpoint
from blackswan.impl.classifier import Adaptation, Classifier, initial_trainable
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.decoder import random_tensors
from blackswan.impl.merge import load_merged, save_merged
from blackswan.impl.pipeline import ClassifyPipeline

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
FAMILIES = {
    family: DecoderConfig(family, 40, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, tied=tied, max_positions=64)
    for family, tied in (("llama", False), ("qwen2", True), ("qwen3", False))
}
IDS = torch.tensor([[3, 5, 7, 9, 11, 2], [4, 6, 8, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
LAST = Adaptation(classes=5, rank=4, alpha=10.0, pooling="last")


def trained(config: DecoderConfig, adaptation: Adaptation = LAST, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(value.shape, generator=generator) for name, value in initial_trainable(config, adaptation, 0).items()}


def base_of(family: str) -> Checkpoint:
    config = FAMILIES[family]
    tensors = {name: tensor * (5 if tensor.ndim > 1 else 1) for name, tensor in random_tensors(config, 1).items()}
    generator = torch.Generator().manual_seed(2)
    biases = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items() if name.endswith("_proj.bias")}
    return Checkpoint(config, tensors | biases)


def written(checkpoint: Checkpoint, path: Path) -> Path:
    path.mkdir()
    save_file(dict(checkpoint.tensors), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**to_huggingface(checkpoint.config), "pad_token_id": 0}))
    return path


@torch.no_grad()
def logits(checkpoint: Checkpoint, adapter: Adapter) -> torch.Tensor:
    parts = (checkpoint.config, adapter.adaptation, checkpoint.tensors, adapter.trainable)
    return Classifier(*parts, dtype=torch.float32)(IDS, MASK)


@torch.no_grad()
def logits_of_transformers(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS, attention_mask=MASK.long()).logits


@pytest.fixture
def sequence_classifier(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.nn.Module]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="the test extra is not installed")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForSequenceClassification.from_pretrained


@pytest.fixture
def peft() -> object:
    return pytest.importorskip("peft", reason="the test extra is not installed")


@pytest.mark.parametrize(("family", "targets"), [("llama", "q_v"), ("qwen2", "all"), ("qwen3", "k_proj,down_proj")])
def test_peft_computes_our_logits(family: str, targets: str, tmp_path: Path, sequence_classifier, peft) -> None:
    base = base_of(family)
    adaptation = Adaptation(5, 4, 10.0, targets, "last")
    path, ours = written(base, tmp_path / "base"), tmp_path / "adapter"
    save_adapter(ours, base.config, adaptation, trained(base.config, adaptation), base=path, extra={})
    expected = logits(base, load_adapter(ours, base.config))
    model = sequence_classifier(path)
    prepare_sequence_classifier(model, ours)
    torch.testing.assert_close(logits_of_transformers(peft.PeftModel.from_pretrained(model, ours)), expected, rtol=1e-5, atol=1e-5)


def test_peft_alone_drops_the_head_bias_without_a_word(tmp_path: Path, sequence_classifier, peft) -> None:
    """Why there is `prepare_sequence_classifier`: should PEFT begin to load the bias, or to refuse it, this says so."""
    base = base_of("qwen2")
    path, trainable = written(base, tmp_path / "base"), trained(base.config)
    save_adapter(tmp_path / "adapter", base.config, LAST, trainable, base=path, extra={})
    model = peft.PeftModel.from_pretrained(sequence_classifier(path, num_labels=5), tmp_path / "adapter")
    expected = logits(base, load_adapter(tmp_path / "adapter", base.config)) - trainable["score.bias"]
    torch.testing.assert_close(logits_of_transformers(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("biased", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_an_adapter_that_peft_wrote_loads_here(biased: bool, dtype: torch.dtype, tmp_path: Path, sequence_classifier, peft) -> None:
    base = base_of("qwen2")
    path = written(base, tmp_path / "base")
    model = sequence_classifier(path, num_labels=3)
    if biased:
        model.score = torch.nn.Linear(base.config.hidden, 3)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype).float() * 0.25
    model.save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(weights).items()}, weights)
    found = load_adapter(tmp_path / "adapter", base.config)
    assert found.adaptation == Adaptation(3, 4, 6.0, "q_v", "last")
    assert found.base == path
    assert {tensor.dtype for tensor in found.trainable.values()} == {dtype}
    assert bool(found.trainable["score.bias"].any()) == biased
    torch.testing.assert_close(logits(base, found), logits_of_transformers(model), rtol=1e-5, atol=1e-5)


def test_an_adapter_of_all_linear_layers_loads(tmp_path: Path, sequence_classifier, peft) -> None:
    base = base_of("llama")
    model = sequence_classifier(written(base, tmp_path / "base"), num_labels=2)
    peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    assert load_adapter(tmp_path / "adapter", base.config).adaptation.targets == "all"


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_transformers_cannot_pool_otherwise(pooling: str, tmp_path: Path) -> None:
    base, adaptation = base_of("qwen2"), Adaptation(5, 4, 10.0, "q_v", pooling)
    save_adapter(tmp_path / "adapter", base.config, adaptation, trained(base.config), base=None, extra={})
    with pytest.raises(ValueError, match=f"blackswan.json: pooling is '{pooling}'"):
        prepare_sequence_classifier(torch.nn.Module(), tmp_path / "adapter")
    assert pooling in json.loads((tmp_path / "adapter" / "blackswan.json").read_text())["transformers"]


def test_only_a_sequence_classifier_can_be_prepared(tmp_path: Path) -> None:
    base = base_of("qwen2")
    save_adapter(tmp_path / "adapter", base.config, LAST, trained(base.config), base=None, extra={})
    with pytest.raises(ValueError, match="no linear layer 'score' of 32 inputs"):
        prepare_sequence_classifier(torch.nn.Linear(2, 2), tmp_path / "adapter")


@pytest.mark.parametrize(("family", "nf4"), [("llama", False), ("qwen2", True), ("qwen3", False)])
def test_merged_logits_here_and_in_transformers(family: str, nf4: bool, tmp_path: Path, sequence_classifier) -> None:
    transformers = pytest.importorskip("transformers")
    base = base_of(family)
    adaptation = Adaptation(5, 4, 10.0, "all", "last", nf4)
    adapter = Adapter(adaptation, trained(base.config, adaptation), extra={"max_seq_len": 6})
    save_merged(tmp_path / "merged", base, adapter, source=written(base, tmp_path / "base"))
    expected = logits(base, adapter)
    checkpoint, head = load_merged(tmp_path / "merged")
    assert head.extra == {"max_seq_len": 6}
    torch.testing.assert_close(logits(checkpoint, head), expected, rtol=1e-5, atol=2e-5)
    model = sequence_classifier(tmp_path / "merged")
    prepare_sequence_classifier(model, tmp_path / "merged")
    torch.testing.assert_close(logits_of_transformers(model), expected, rtol=1e-5, atol=2e-5)
    language_model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs = dict(language_model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(theirs, checkpoint.tensors["model.layers.1.mlp.up_proj.weight"])


def test_a_save_replaces_nothing_but_an_adapter(tmp_path: Path) -> None:
    config = FAMILIES["qwen2"]
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is no adapter"):
        save_adapter(tmp_path / "documents", config, LAST, trained(config), base=None, extra={})
    assert (tmp_path / "documents" / "thesis.txt").read_text() == "years of work"


def test_folders_are_replaced_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    for text in ("old", "new"):
        with folders.whole_folder(tmp_path / "folder", replace=True) as partial:
            (partial / "file").write_text(text)
    assert (tmp_path / "folder" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_tensors_that_are_not_the_adaptations_are_not_saved(tmp_path: Path) -> None:
    config, trainable = FAMILIES["qwen2"], trained(FAMILIES["qwen2"])
    del trainable["score.bias"]
    with pytest.raises(ValueError, match=r"no tensor 'score\.bias'"):
        save_adapter(tmp_path / "best", config, LAST, trainable, base=None, extra={})
    assert not (tmp_path / "best").exists()


def test_a_head_without_updates_is_no_adapter_of_peft(tmp_path: Path) -> None:
    config, head_only = FAMILIES["qwen2"], Adaptation(5, 1, 1.0, "", "last")
    with pytest.raises(ValueError, match="no targets"):
        save_adapter(tmp_path / "best", config, head_only, trained(config, head_only), base=None, extra={})


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, DecoderConfig]:
    """An adapter, and the architecture of its base."""
    config = FAMILIES["qwen2"]
    save_adapter(tmp_path / "best", config, LAST, trained(config), base=None, extra={"step": 2})
    return tmp_path / "best", config


def test_a_pickled_adapter_is_pointed_out(saved: tuple[Path, DecoderConfig]) -> None:
    path, config = saved
    shutil.move(path / "adapter_model.safetensors", path / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"convert the \.bin file"):
        load_adapter(path, config)


def test_another_base_of_the_same_architecture_is_named(tmp_path: Path) -> None:
    """CKPT-MERGE-RUN asks it of an adapter that is opened."""
    shutil.copytree(CHECKPOINT, tmp_path / "base")
    pipeline = ClassifyPipeline.from_pretrained(tmp_path / "base", ClassifyConfig(num_classes=2, lora_rank=2, max_seq_len=8))
    pipeline.merge(tmp_path / "merged")
    name = "model.layers.1.mlp.up_proj.weight"
    for folder in ("base", "merged"):
        tensors = load_file(tmp_path / folder / "model.safetensors")
        save_file({**tensors, name: -tensors[name]}, tmp_path / folder / "model.safetensors")
    for ask in (lambda: pipeline.merge(tmp_path / "again"), lambda: ClassifyPipeline.from_saved(tmp_path / "merged")):
        with pytest.raises(ValueError, match=rf"tensor '{name}' is not the one that .* was trained on"):
            ask()
