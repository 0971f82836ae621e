"""How much device memory a training run needs, found before any of it is allocated.

A whole optimiser step of the real trainer is run on tensors that have shapes and no content, and its allocations are counted as they come
and go: what is counted is what the implementation does, not a formula beside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blackswan.impl import dispatch
from blackswan.impl.allocations import BLOCK, DEQUANTIZED, WORKING, Allocations, kernels_of
from blackswan.impl.classifier import Adaptation, Classifier, base_shapes, trainable_shapes
from blackswan.impl.config import DecoderConfig
from blackswan.impl.tensors import LazyTensors, Shapes, with_gradients
from blackswan.impl.trainer import HELD, Batch, MicroResult, Trainer
from blackswan.impl.validation import unchecked

META, LOADING = "meta", "loading"
WORKSPACE, WORKSPACE_HOPPER = 4096 * 1024 * 2 + 16 * 1024 * 8, 4096 * 8 * 1024
"""Bytes of cuBLAS's workspace as PyTorch sets it, one for each thread and stream."""
WORKSPACES = 2
"""The forward pass has a thread and autograd has one."""
LOSSES = ("weighted_cross_entropy", "bce_with_logits")


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device. `parts` has the largest size of each part, by name; `total` is the largest sum of all at one time, and
    `resident` is what stays after the step, without the libraries' workspaces.

    Weights: embedding, norms, biases, projections (those not in NF4), nf4_codes, nf4_absmax, lora, head; quantisation is what loading
    takes on top. Optimiser: moments, optimiser_indices, gradients (of the tensors and as flat vectors, `trainer.HELD` at most), update
    (temporaries of clipping and AdamW). A pass: batch, activations (saved for backward), dequantised_weights, logits and loss, working
    (what is neither saved nor kept). library_workspace is cuBLAS's. What CUDA itself takes for a process, and what the allocator holds
    in reserve, comes on top; so does what it leaves unused of a large block, under a MiB each. On an H200 that came to 1 % at most.
    """

    parts: Mapping[str, int]
    total: int
    resident: int

    def table(self) -> str:
        """The parts, largest first, and the total, in MiB."""
        rows = [*sorted(self.parts.items(), key=lambda item: -item[1]), ("total at the peak", self.total)]
        return "\n".join(f"{name:20} {count / 2**20:12.2f} MiB" for name, count in rows)


def estimate(
    config: DecoderConfig,
    adaptation: Adaptation,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    *,
    accumulation: int = 1,
    multi_label: bool = False,
    device: torch.device | str = "cuda",
) -> Estimate:
    """What one optimiser step of `Trainer` over `accumulation` micro-batches [batch, seq] needs; base weights, activations in `dtype`.

    For a CUDA device, which need not be here, it is assumed that Triton is installed there as it is here: where it cannot be imported, or
    inside `dispatch.backend("torch")`, torch's own operations are counted, which save up to twice as much. Nothing is allocated.
    Raises a ValueError for a count below one, and for another kind of device than CPU and CUDA.
    """
    require_counts(batch=batch, seq=seq, accumulation=accumulation)
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: what its kernels allocate is not known; expected cpu or cuda")
    allocations = Allocations(META, BLOCK if device.type == "cuda" else 1)
    with unchecked(), with_gradients(), dispatch.without_content(device), allocations, kernels_of(device.type):
        classifier = classifier_of_shapes(config, adaptation, dtype, allocations)
        trainer = _trainer(classifier, batch, multi_label, allocations)
        _step(trainer, (batch, seq), accumulation, allocations)
    return estimate_of(allocations, device)  # while the trainer lives, whose tensors are those that stay


def require_counts(**counts: int) -> None:
    """Raises a ValueError that names the first count below one."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}: expected at least 1")


def estimate_of(allocations: Allocations, device: torch.device, workspaces: int = WORKSPACES) -> Estimate:
    """What was counted, and so many of the library's workspaces."""
    workspace = workspaces * _library_workspace(device)
    largest = allocations.largest | {LOADING: 0, "library_workspace": workspace}
    return Estimate({name: size for name, size in largest.items() if size}, allocations.peak + workspace, allocations.total)


class _Shapes(LazyTensors):
    """Tensors without content."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self._shapes, self._dtype = shapes, dtype

    @property
    def shapes(self) -> Shapes:
        return self._shapes

    def __getitem__(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device=META, dtype=self._dtype)


def classifier_of_shapes(config: DecoderConfig, adaptation: Adaptation, dtype: torch.dtype, allocations: Allocations) -> Classifier:
    """A classifier without content, its tensors counted by part, and what quantising takes on top as a part of its own."""
    with allocations.part(LOADING):
        base, trainable = _Shapes(base_shapes(config), dtype), _Shapes(trainable_shapes(config, adaptation), torch.float32)
        classifier = Classifier(config, adaptation, base, trainable, dtype=dtype, device=META)
    for name, tensor in (*classifier.named_parameters(), *classifier.named_buffers()):
        allocations.assign(tensor, part_of(name))
    if adaptation.nf4:
        allocations.largest["quantisation"] = allocations.peak - allocations.total
    return classifier


class _Counted(Trainer):
    """Says what the flat gradient of a micro-batch is."""

    allocations: Allocations

    def _micro_batch(self, index: int, part: Batch) -> MicroResult:
        result = super()._micro_batch(index, part)
        self.allocations.assign(result.gradient, "gradients")
        return result


def _trainer(classifier: Classifier, batch: int, multi_label: bool, allocations: Allocations) -> Trainer:
    with allocations.part("update"):
        trainer = _Counted(classifier, total_steps=None, micro_batch=batch, learning_rate=1e-4, multi_label=multi_label)
    trainer.allocations = allocations
    for name, value in vars(trainer.optimiser).items():
        if isinstance(value, Tensor):
            allocations.assign(value, "moments" if name.startswith("exp_avg") else "optimiser_indices")
    return trainer


def part_of(name: str) -> str:
    """The part of the estimate that a classifier's parameter or buffer belongs to."""
    *_, owner, kind = name.split(".")
    if owner in ("lora_A", "lora_B"):
        return "lora"
    if owner == "quantized":
        return "nf4_codes" if kind == "codes" else "nf4_absmax"
    if owner == "score":
        return "head"
    if kind == "bias":
        return "biases"
    if owner == "embed_tokens":
        return "embedding"
    return "norms" if owner.endswith("norm") else "projections"


def _step(trainer: Trainer, shape: tuple[int, int], accumulation: int, allocations: Allocations) -> None:
    for parameter in trainer.optimiser.parameters.values():
        parameter.register_post_accumulate_grad_hook(lambda moved: _is_gradient(moved, allocations))  # type: ignore[no-untyped-call]  # torch
    with allocations.part("batch"):
        batch = empty_batch(trainer, (accumulation * shape[0], shape[1]))
    with allocations.saving(), dispatch.wrapping(partial(_around, allocations)):
        trainer.accumulate(repeating(batch, shape[0]))
    allocations.assign_all(WORKING, "gradients")
    with allocations.part("update"):
        trainer.apply()


def repeating(batch: Batch, size: int) -> Batch:
    """As many of the batch's micro-batches as it takes until nothing new is kept."""
    return next(iter(batch.split((HELD + 1) * size)))


def _around(allocations: Allocations, path: str, operation: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    result = function(**arguments)
    if operation in LOSSES or path.endswith("score"):
        allocations.assign(result, "logits")
    if operation == "nf4_dequantize":
        allocations.assign(result, DEQUANTIZED)
    return result


def _is_gradient(parameter: Tensor, allocations: Allocations) -> None:
    if parameter.grad is not None:
        allocations.assign(parameter.grad, "gradients")


def empty_batch(trainer: Trainer, shape: tuple[int, int]) -> Batch:
    """A batch [samples, seq] without content."""
    classes = trainer.classifier.adaptation.classes
    several = trainer.multi_label
    labels = torch.empty((shape[0], classes) if several else shape[:1], device=META, dtype=torch.float32 if several else torch.int64)
    ids = torch.empty(shape, device=META, dtype=torch.int64)
    return Batch(ids, torch.empty(shape, device=META, dtype=torch.bool), labels)


def _library_workspace(device: torch.device) -> int:
    """Zero on the CPU; the larger of the two where the card is not there to ask."""
    if device.type != "cuda":
        return 0
    here = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return WORKSPACE_HOPPER if not here or torch.cuda.get_device_capability(device)[0] >= 9 else WORKSPACE
