"""Memory: weights read one at a time, and an estimate that counts what a step allocates."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from blackswan.impl import checkpoint, dispatch, kernels
from blackswan.impl.allocations import BLOCK, Allocations
from blackswan.impl.checkpoint import load_checkpoint, save_checkpoint
from blackswan.impl.classifier import Adaptation, Classifier, initial_trainable
from blackswan.impl.commands.common import memory_of_a_step
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.decoder import parameter_shapes, random_tensors, require_tensors
from blackswan.impl.fused.memory import estimate_fused
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.memory import WORKSPACE_HOPPER, Estimate, estimate
from blackswan.impl.trainer import HELD, Batch
from blackswan.impl.validation import unchecked

CONFIG = DecoderConfig("qwen2", 40, 32, 48, 3, 4, 2, 8, 1e-6, 1e4, True, 128)
ADAPTATION = Adaptation(5, 4, 8.0, nf4=True)


def test_headers_are_checked_before_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "model", CONFIG, random_tensors(CONFIG, 0))
    monkeypatch.setattr(checkpoint.StoredTensors, "__getitem__", lambda _, name: pytest.fail(f"{name} was read"))
    loaded = load_checkpoint(tmp_path / "model")
    assert loaded.tensors.keys() == parameter_shapes(CONFIG).keys()
    require_tensors(parameter_shapes(CONFIG), loaded.tensors, "here")


@pytest.mark.parametrize("change", ["replaced", "truncated", "removed"])
def test_a_file_that_changes_while_it_is_loaded_is_refused(tmp_path: Path, change: str) -> None:
    save_checkpoint(tmp_path / "model", CONFIG, random_tensors(CONFIG, 0))
    loaded = load_checkpoint(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    if change == "replaced":
        save_file(random_tensors(CONFIG, 1), path)
    elif change == "truncated":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        path.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors: changed since its header was read"):
        dict(loaded.tensors)


def test_a_tensor_that_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG, 0)
    save_checkpoint(tmp_path / "model", CONFIG, tensors)
    read = load_checkpoint(tmp_path / "model").tensors["model.norm.weight"]
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(bytes(len(path.read_bytes())))
    assert torch.equal(read, tensors["model.norm.weight"])


@pytest.mark.parametrize("chosen", [estimate, estimate_fused])
def test_memory_does_not_grow_with_the_number_of_micro_batches(chosen: Callable[..., Estimate]) -> None:
    few, many, double = (chosen(CONFIG, ADAPTATION, 2, 8, torch.float32, accumulation=count).total for count in (HELD + 1, 60, 120))
    batches = 2 * 8 * 9 * 60  # token ids and mask of sixty more micro-batches, which are on the device from the start
    assert many - few < batches + 2 * BLOCK
    assert double - many == pytest.approx(batches + 2 * 8 * 60, abs=2 * BLOCK)  # and the labels


def test_nothing_is_allocated_for_an_estimate() -> None:
    large = DecoderConfig("llama", 150_000, 8192, 28_672, 2, 64, 8, 128, 1e-6, 1e4, True, 4096)
    with Allocations("cpu", block=1) as allocations:
        found = estimate(large, Adaptation(2, 8, 16.0), 16, 512, torch.bfloat16, multi_label=True)
    assert found.total > 10 * 2**30
    assert allocations.peak < 50 * 2**20


def test_counts_below_one_are_refused() -> None:
    for name in ("batch", "seq", "accumulation"):
        given = {"batch": 1, "seq": 1, "accumulation": 1, name: 0}
        with pytest.raises(ValueError, match=f"{name} is 0"):
            estimate(CONFIG, ADAPTATION, given["batch"], given["seq"], torch.float32, accumulation=given["accumulation"])


def test_a_host_without_triton_is_estimated_with_the_operations_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What either saves on a GPU is held to what was measured there, in test_memory_benchmark."""
    pytest.importorskip("triton")

    def activations() -> int:
        return estimate(CONFIG, ADAPTATION, 8, 32, torch.bfloat16).parts["activations"]

    by_triton = activations()
    with dispatch.backend("torch"):
        by_torch = activations()
    monkeypatch.setattr(kernels, "missing", lambda: "no Triton here")
    assert by_triton < by_torch == activations()


def fused_step(config: DecoderConfig, adaptation: Adaptation, shape: tuple[int, int], accumulation: int) -> Allocations:
    """What a real step of the hand-written layers on the CPU allocates, weights included, with an address for every tensor."""
    base, trainable = random_tensors(config, 0), initial_trainable(config, adaptation, 0)
    with Allocations("cpu") as allocations:
        classifier = Classifier(config, adaptation, {name: value.clone() for name, value in base.items()}, trainable, dtype=torch.float32)
        trainer = FusedTrainer(classifier, longest=shape[1], total_steps=None, micro_batch=shape[0], learning_rate=1e-3)
        trainer._bind()
        trainer.model  # noqa: B018  its first mention joins the weights
        rows = accumulation * shape[0]
        ids, labels = torch.zeros((rows, shape[1]), dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        batch = Batch(ids, torch.ones((rows, shape[1]), dtype=torch.bool), labels)
        if accumulation == 1:
            packed = trainer._packed(batch)
            del batch, ids, labels
            with torch.no_grad():
                trainer._whole_step(packed)
        else:
            with unchecked():  # the results are not computed
                trainer.accumulate(batch)
                trainer.apply()
    return allocations


@pytest.mark.parametrize(
    ("family", "nf4", "targets", "pooling", "accumulation"),
    [("qwen2", True, "q_v", "last", 1), ("qwen3", False, "all", "mean", 1), ("llama", True, "all", "first", 7)],
)
def test_the_estimate_of_the_hand_written_layers_is_what_their_step_allocates(
    family: str, nf4: bool, targets: str, pooling: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    for name in ("attention", "nf4_dequantize", "rms_norm", "rope", "swiglu"):  # what they compute takes minutes and is not looked at
        monkeypatch.setattr(f"blackswan.impl.kernels.{name}.launch", lambda *_, **__: None)
    config = DecoderConfig(family, 64, 64, 128, 3, 4, 2, 16, 1e-6, 1e4, True, 128)
    adaptation = Adaptation(3, 4, 8.0, targets, pooling, nf4)
    found = estimate_fused(config, adaptation, 6, 100, torch.float32, accumulation=accumulation)
    peak = fused_step(config, adaptation, (6, 100), accumulation).peak
    assert found.total - found.parts["library_workspace"] == pytest.approx(peak, rel=0.002)


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_is_estimated_by_its_own_largest_step(fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blackswan.impl.fused.step.backend_of", lambda *_: (fused, None))
    asked: list[tuple[int, int, bool]] = []

    def noted(_: object, __: object, batch: int, seq: int, *___: object, accumulation: int, multi_label: bool, **____: object) -> Estimate:
        asked.append((batch, accumulation, multi_label))
        return Estimate({}, seq, 0)

    monkeypatch.setattr("blackswan.impl.fused.memory.estimate_fused" if fused else "blackswan.impl.memory.estimate", noted)
    save_checkpoint(tmp_path / "model", CONFIG, random_tensors(CONFIG, 0))
    settings = ClassifyConfig(batch_size=4, accumulation_steps=3, multi_label=True)
    for samples in (100, 12, 7, 3):
        assert memory_of_a_step(tmp_path / "model", settings, samples, 17, "cpu").total == 17
    assert asked == [(4, 3, True), (4, 3, True), (4, 2, True), (3, 1, True)]


def test_the_workspace_of_the_library_is_counted_on_cuda_only() -> None:
    assert estimate(CONFIG, ADAPTATION, 1, 2, torch.float32).parts["library_workspace"] == 2 * WORKSPACE_HOPPER
    assert "library_workspace" not in estimate(CONFIG, ADAPTATION, 1, 2, torch.float32, device="cpu").parts


def test_the_table_names_every_part() -> None:
    table = Estimate({"lora": 2**20, "moments": 3 * 2**20}, 4 * 2**20, 2**20).table()
    assert [line.split() for line in table.splitlines()] == [
        ["moments", "3.00", "MiB"],
        ["lora", "1.00", "MiB"],
        ["total", "at", "the", "peak", "4.00", "MiB"],
    ]


def test_allocations_belong_to_their_part_until_they_are_gone() -> None:
    with Allocations("cpu", block=1) as allocations:
        with allocations.part("first"):
            first = torch.zeros(10)
        second = torch.zeros(100)
        view = second[:50]
        del second
        assert dict(allocations.parts) == {"first": 40, "working": 400}
        allocations.assign(first, "other", only="working")
        assert allocations.parts["first"] == 40
        allocations.assign(first, "other")
        del view
    assert (allocations.total, allocations.peak) == (40, 440)
    assert dict(allocations.largest) == {"first": 40, "working": 400, "other": 40}
