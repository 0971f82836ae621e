"""Memory: weights read one at a time, and an estimate that counts what a step allocates."""

import json
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from blackswan.impl import checkpoint, dispatch, kernels
from blackswan.impl.allocations import BLOCK, Allocations
from blackswan.impl.architecture import to_huggingface
from blackswan.impl.checkpoint import load_checkpoint, save_checkpoint
from blackswan.impl.classifier import Adaptation, Classifier, base_shapes, initial_trainable, trainable_shapes
from blackswan.impl.commands.common import memory_of_a_step
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.decoder import Decoder, parameter_shapes, random_tensors, require_tensors
from blackswan.impl.fused.memory import estimate_fused
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.memory import WORKSPACE_HOPPER, Estimate, estimate
from blackswan.impl.tensors import Converted, LazyTensors, Shapes
from blackswan.impl.trainer import HELD, Batch, Trainer
from blackswan.impl.validation import unchecked

CONFIG = DecoderConfig("qwen2", 40, 32, 48, 3, 4, 2, 8, 1e-6, 1e4, True, 128)
UNTIED = DecoderConfig("llama", 40, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, False, 128)
ADAPTATION = Adaptation(5, 4, 8.0, nf4=True)


class Counting(LazyTensors):
    """Random tensors; fails when a second projection is read while an earlier one is still there."""

    def __init__(self, shapes: Shapes) -> None:
        self.asked: list[str] = []
        self._shapes = shapes
        self._alive: dict[str, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def shapes(self) -> Shapes:
        return self._shapes

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        alive = [other for other, storage in self._alive.items() if storage() is not None]
        assert not alive, f"{alive} are there when {name} is read"
        tensor = torch.randn(self._shapes[name])
        if name.endswith("_proj.weight"):
            self._alive[name] = weakref.ref(tensor.untyped_storage())
        return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_projection_at_a_time_is_unquantised(dtype: torch.dtype) -> None:
    Classifier(CONFIG, ADAPTATION, random_tensors(CONFIG, 0), initial_trainable(CONFIG, ADAPTATION, 0), dtype=dtype)  # imports
    tensors = Counting(parameter_shapes(UNTIED))
    Classifier(UNTIED, ADAPTATION, tensors, initial_trainable(UNTIED, ADAPTATION, 0), dtype=dtype)
    assert sorted(tensors.asked) == sorted(base_shapes(UNTIED))
    tensors = Counting(parameter_shapes(UNTIED))
    Decoder(UNTIED, tensors, dtype=dtype, nf4=True)
    assert sorted(tensors.asked) == sorted(parameter_shapes(UNTIED))


def test_the_counter_fails_for_a_loader_that_keeps_them() -> None:
    with pytest.raises(AssertionError, match="are there when"):
        dict(Counting(parameter_shapes(CONFIG)))


def test_shapes_are_enough_to_refuse() -> None:
    shapes = parameter_shapes(CONFIG)
    tensors = Counting({name: shape for name, shape in shapes.items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"no tensor 'model.norm.weight'"):
        require_tensors(shapes, tensors, "here")
    with pytest.raises(ValueError, match=r"no tensor 'model.norm.weight'"):
        Decoder(CONFIG, tensors, dtype=torch.float32)
    assert "model.embed_tokens.weight" in tensors
    assert tensors.asked == []


def test_converted_tensors_leave_out_what_they_are_told_to() -> None:
    tensors = Converted({"a": torch.ones(2), "b": torch.ones(3)}, dtype=torch.bfloat16, device="cpu", without=("b",))
    assert list(tensors) == ["a"]
    assert tensors["a"].dtype == torch.bfloat16
    assert tensors.get("b") is None
    with pytest.raises(KeyError):
        tensors["b"]


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


MEASURE = """
    import re, sys
    from pathlib import Path
    import torch
    from impl.checkpoint import load_checkpoint
    from impl.classifier import Adaptation, Classifier, initial_trainable
    from impl.operations.nf4 import nf4_quantize

    def peak():
        # Not ru_maxrss: it starts with that of the process that started this one.
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    nf4_quantize(torch.zeros(1024, 256), 64)  # the library's import
    before = peak()
    stored = load_checkpoint(Path(sys.argv[1]))
    adaptation = Adaptation(2, 1, 2.0, nf4=True)
    for tensors in (stored.tensors, lambda: dict(stored.tensors)):
        base = tensors() if callable(tensors) else tensors
        Classifier(stored.config, adaptation, base, initial_trainable(stored.config, adaptation, 0), dtype=torch.float32)
        print(peak() - before)
"""


def test_the_process_stays_small_while_it_loads_a_large_model(tmp_path: Path) -> None:
    """Peak resident memory of a process of its own: far below the model's float32 size, which is read from four shards."""
    config = DecoderConfig("llama", 64, 256, 1024, 14, 4, 4, 64, 1e-6, 1e4, True, 128)
    names = list(parameter_shapes(config))
    weight_map = {name: f"model-{index % 4}.safetensors" for index, name in enumerate(names)}
    folder = tmp_path / "model"
    folder.mkdir()
    for file in set(weight_map.values()):
        save_file({name: torch.full(parameter_shapes(config)[name], 0.5) for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(to_huggingface(config)))
    # By default glibc keeps freed tensors of this size to itself, and the process is as large as if they were there.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(folder)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment).stdout
    lazily, whole = (int(line) for line in printed.split())
    size = 4 * sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values())
    assert lazily < 0.4 * size, (lazily, whole, size)
    assert whole > 0.6 * size, (lazily, whole, size)  # or the measure does not see it


def step(config: DecoderConfig, adaptation: Adaptation, dtype: torch.dtype, shape: tuple[int, int], accumulation: int) -> Allocations:
    """What a real training step on the CPU allocates, weights included."""
    base, trainable = random_tensors(config, 0), initial_trainable(config, adaptation, 0)
    base = {name: value.to(dtype) for name, value in base.items()}
    with Allocations("cpu", block=1) as allocations:
        classifier = Classifier(config, adaptation, {name: value.clone() for name, value in base.items()}, trainable, dtype=dtype)
        trainer = Trainer(classifier, total_steps=None, micro_batch=shape[0], learning_rate=1e-3)
        rows = (accumulation * shape[0], shape[1])
        batch = Batch(torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool), torch.zeros(rows[0], dtype=torch.int64))
        trainer.train_batch(batch)
    return allocations


@pytest.mark.parametrize(
    ("family", "nf4", "targets", "pooling", "dtype", "accumulation"),
    [
        ("qwen2", True, "q_v", "mean", torch.float32, 1),
        ("qwen3", False, "all", "last", torch.bfloat16, 2),
        ("llama", True, "all", "first", torch.bfloat16, 3),
        ("qwen3", True, "q_v", "last", torch.float32, 2),
        ("llama", False, "all", "mean", torch.float32, 8),
    ],
)
def test_the_estimate_is_what_a_step_allocates(
    family: str, nf4: bool, targets: str, pooling: str, dtype: torch.dtype, accumulation: int
) -> None:
    config = DecoderConfig(family, 40, 32, 48, 3, 4, 2, 8, 1e-6, 1e4, True, 128)
    adaptation = Adaptation(3, 4, 8.0, targets, pooling, nf4)
    found = estimate(config, adaptation, 6, 20, dtype, accumulation=accumulation, device="cpu")
    measured = step(config, adaptation, dtype, (6, 20), accumulation)
    assert found.total == pytest.approx(measured.peak, rel=0.01)


def test_every_sample_and_token_counts() -> None:
    small, wide, long = (estimate(CONFIG, ADAPTATION, *shape, torch.bfloat16).total for shape in ((4, 32), (8, 32), (4, 64)))
    assert wide - small > 0.4 * (small - 2 * WORKSPACE_HOPPER)
    assert long > wide - BLOCK * 100  # attention over twice the length takes more than twice


def test_accumulated_gradients_are_kept() -> None:
    one, three = (
        estimate(CONFIG, ADAPTATION, 2, 8, torch.float32, accumulation=count, device="cpu").parts["gradients"] for count in (1, 3)
    )
    trained = 4 * sum(torch.Size(shape).numel() for shape in trainable_shapes(CONFIG, ADAPTATION).values())
    assert three - one == pytest.approx(2 * trained, abs=64)  # and the losses


@pytest.mark.parametrize("chosen", [estimate, estimate_fused])
def test_memory_does_not_grow_with_the_number_of_micro_batches(chosen: Callable[..., Estimate]) -> None:
    few, many, double = (chosen(CONFIG, ADAPTATION, 2, 8, torch.float32, accumulation=count).total for count in (HELD + 1, 60, 120))
    batches = 2 * 8 * 9 * 60  # token ids and mask of sixty more micro-batches, which are on the device from the start
    assert many - few < batches + 2 * BLOCK
    assert double - many == pytest.approx(batches + 2 * 8 * 60, abs=2 * BLOCK)  # and the labels


def test_several_labels_a_sample_have_their_own_loss() -> None:
    assert estimate(CONFIG, ADAPTATION, 2, 8, torch.float32, multi_label=True).total > 0


def test_nothing_is_allocated_for_an_estimate() -> None:
    large = DecoderConfig("llama", 150_000, 8192, 28_672, 2, 64, 8, 128, 1e-6, 1e4, True, 4096)
    with Allocations("cpu", block=1) as allocations:
        found = estimate(large, Adaptation(2, 8, 16.0), 16, 512, torch.bfloat16)
    assert found.total > 10 * 2**30
    assert allocations.peak < 50 * 2**20


@pytest.mark.parametrize("name", ["batch", "seq", "accumulation"])
def test_a_count_below_one_is_refused(name: str) -> None:
    given = {"batch": 1, "seq": 1, "accumulation": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        estimate(CONFIG, ADAPTATION, given["batch"], given["seq"], torch.float32, accumulation=given["accumulation"])


def rounded(*sizes: int) -> int:
    return sum(-(-size // BLOCK) * BLOCK for size in sizes)


def cuda_layer(config: DecoderConfig, rank: int, batch: int, seq: int, chosen: str) -> int:
    """Bytes that a plain bfloat16 layer, not the first, saves on CUDA with LoRA on q and v, counted by hand."""
    tokens, hidden, wide = batch * seq, config.hidden, 4
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    lora = sum(rounded(2 * rank * hidden, 2 * rank * rows, 2 * tokens * rank) for rows in (queries, keys))  # A, B in bfloat16, x Aᵀ
    attention = rounded(*[2 * tokens * queries] * 4)  # queries, repeated keys and values, output
    attention += rounded(2 * batch * seq * seq, wide * batch * config.heads * (-(-seq // 32) * 32), tokens)  # mask, logsumexp, blind rows
    attention += rounded(8, 8)  # seed and offset of a dropout that is off
    if chosen == "triton":
        norm = rounded(2 * tokens * hidden, wide * tokens)  # input, 1/rms
        rope = 0  # positions, which the model has once
        swiglu = rounded(*[2 * tokens * config.intermediate] * 2)  # gate, up
    else:
        norm = rounded(wide * tokens * hidden, wide * hidden, wide * tokens)  # input and weight in float32, 1/rms
        rope = 2 * rounded(*[wide * tokens * config.head_dim // 2] * 2)  # cosines and sines, of queries and of keys
        swiglu = rounded(*[wide * tokens * config.intermediate] * 3)  # gate, silu(gate), up
    return 2 * norm + rounded(2 * tokens * hidden) + lora + rope + attention + swiglu


def layer_of_the_estimate() -> int:
    configs = [DecoderConfig("llama", 40, 64, 96, layers, 8, 2, 8, 1e-6, 1e4, True, 128) for layers in (3, 4)]
    fewer, more = (estimate(config, Adaptation(5, 4, 8.0), 8, 32, torch.bfloat16).parts["activations"] for config in configs)
    return more - fewer


def test_what_a_layer_saves_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    config = DecoderConfig("llama", 40, 64, 96, 3, 8, 2, 8, 1e-6, 1e4, True, 128)
    by_triton, by_torch = (cuda_layer(config, 4, 8, 32, name) for name in ("triton", "torch"))
    assert layer_of_the_estimate() == by_triton
    with dispatch.kernels("torch"):
        assert layer_of_the_estimate() == by_torch
    monkeypatch.setattr(kernels, "missing", lambda: "no Triton here")
    assert layer_of_the_estimate() == by_torch


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
    monkeypatch.setattr("blackswan.impl.fused.step.engine_of", lambda *_: (fused, None))
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
