"""How much device memory a step of the hand-written layers needs: the step itself on tensors without content, as in `impl.memory`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from blackswan.impl import dispatch
from blackswan.impl.allocations import BLOCK, DEQUANTIZED, SAVED, WORKING, Allocations
from blackswan.impl.classifier import Adaptation
from blackswan.impl.config import DecoderConfig
from blackswan.impl.fused.packing import GRAIN, Packed
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.memory import (
    LOADING,
    META,
    Estimate,
    classifier_of_shapes,
    empty_batch,
    estimate_of,
    part_of,
    repeating,
    require_counts,
)
from blackswan.impl.tensors import with_gradients
from blackswan.impl.trainer import Batch, MicroResult
from blackswan.impl.validation import unchecked

WORKSPACES = 3
"""cuBLAS keeps one for the stream that is captured, one for the stream beside it (`impl.fused.side`) and one for the current stream."""


def estimate_fused(
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
    """What one optimiser step needs on that CUDA device over `accumulation` micro-batches of `batch` samples of `seq` tokens.

    The parts are those of `Estimate`: activations are what the blocks keep (`impl.fused.layer.Kept`), lora is the vector of all masters,
    the head's among them, and the copies that products use. Nothing is allocated. Needs Triton, and no device; one that is here says how
    large cuBLAS's workspaces are. Raises a ValueError for a count below one.
    """
    require_counts(batch=batch, seq=seq, accumulation=accumulation)
    device = torch.device(device)
    allocations = Allocations(META, BLOCK)
    with unchecked(), with_gradients(), dispatch.without_content(device), allocations:
        classifier = classifier_of_shapes(config, adaptation, dtype, allocations)
        settings = {"total_steps": None, "micro_batch": batch, "learning_rate": 1e-4, "multi_label": multi_label}
        with allocations.part("update"):
            trainer = _Step(classifier, longest=seq, **settings)
        trainer.run(allocations, accumulation)
    return estimate_of(allocations, device, WORKSPACES)


class _Step(FusedTrainer):
    """Its step on tensors without content: no graph captures it, and what each allocation is for is said."""

    def run(self, allocations: Allocations, accumulation: int) -> None:
        """Joins the weights and makes a step: the whole one of a single micro-batch, or one after several."""
        self._allocations = allocations
        with allocations.part("batch"):
            packed = self._packed()
        self._take_masters()
        self._join()
        if accumulation == 1:
            with torch.no_grad():
                self._whole_step(packed)
            return
        del packed
        with allocations.part("batch"):
            batch = empty_batch(self, (accumulation * self.micro_batch, self.longest))
        self.accumulate(repeating(batch, self.micro_batch))
        allocations.assign_all(WORKING, "gradients")
        with allocations.part("update"):
            self.apply()

    def _micro_batch(self, index: int, part: Batch) -> MicroResult:
        result = super()._micro_batch(index, part)
        self._allocations.assign(result.gradient, "gradients")
        return result

    def _packed(self, part: Batch | None = None) -> Packed:
        """The largest micro-batch, whatever is given."""
        del part
        samples = self.micro_batch
        tokens = math.ceil(samples * self.longest / GRAIN) * GRAIN
        classes = self.classifier.adaptation.classes
        labels = torch.empty((samples, classes) if self.multi_label else samples, device=META, dtype=torch.int64)
        ids, positions = (torch.empty(tokens, device=META, dtype=torch.int64) for _ in range(2))
        bounds = torch.empty(samples + 2, device=META, dtype=torch.int32)
        return Packed(
            ids, positions, bounds, labels.float() if self.multi_label else labels, torch.empty(samples, dtype=torch.float32, device=META)
        )

    def _take_masters(self) -> None:
        """Parameters become views of one vector. `_bind` finds that by addresses, and here there are none."""
        self._bind()
        for name, view in self.optimiser.split(self._masters).items():
            self.optimiser.parameters[name].data = view
        for value in self._moments:
            self._allocations.assign(value, "moments")
        self._allocations.assign(self._masters, "lora")
        self._allocations.assign(self._gradient, "gradients")
        for value in vars(self.optimiser).values():
            if isinstance(value, Tensor):
                self._allocations.assign(value, "optimiser_indices", only="update")

    def _join(self) -> None:
        with self._allocations.part(LOADING):
            model = self.model
        for name, tensor in (*self.classifier.named_parameters(), *self.classifier.named_buffers()):
            self._allocations.assign(tensor, part_of(name), only=LOADING)
        self._allocations.assign(model.factors.values, "lora")
        self._allocations.assign(model.factors.gradients, "gradients")
        for buffer in model.shared.weights.buffers.values():
            self._allocations.assign(buffer, DEQUANTIZED)
        for layer in model.layers:
            if layer.qkv.bias is not None:
                self._allocations.assign(layer.qkv.bias, "biases")
            layer.forward = self._keeping(layer.forward)  # type: ignore[method-assign]  # of this model, which goes with the step
        self._allocations.assign_all(LOADING, "optimiser_indices")

    def _keeping(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def layer(*arguments: Any, **settings: Any) -> Any:
            kept, after = forward(*arguments, **settings)
            for value in tree_leaves(list(vars(kept).values())):
                if isinstance(value, Tensor):
                    self._allocations.assign(value, SAVED, only=WORKING)
            return kept, after

        return layer

    def _move(self, gradient: Tensor, finite: Tensor) -> None:
        with self._allocations.part("update"):
            super()._move(gradient, finite)
