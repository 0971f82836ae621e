"""Optimiser steps through the hand-written layers, on a GPU as replays of captured CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from blackswan.impl import kernels, validation
from blackswan.impl.classifier import Classifier
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.fused.fitting import why_not_weights
from blackswan.impl.fused.packing import GRAIN, Packed, pack, sizes_of
from blackswan.impl.fused.side import captured_stream
from blackswan.impl.kernels.launch import on_device
from blackswan.impl.operations.losses import require_class_weights
from blackswan.impl.operations.optimisation import adamw_moved
from blackswan.impl.trainer import WEIGHTS_OF_SEVERAL, Batch, BatchResult, MicroResult, Trainer, classes_of

if TYPE_CHECKING:
    from blackswan.impl.fused.model import FusedClassifier, Outcome

BETAS, EPS = (0.9, 0.999), 1e-8


def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why steps in that dtype cannot run there through the hand-written layers; None where they can."""
    if dtype == torch.float64:
        return "its kernels have no float64"
    if device.type not in ("cpu", "cuda"):
        return "its kernels run on CUDA"
    reason = kernels.why_not()
    return "its kernels run on CUDA" if reason is None and device.type != "cuda" and not kernels.interpreted() else reason


def backend_of(config: ClassifyConfig, architecture: DecoderConfig, device: torch.device) -> tuple[bool, str | None]:
    """Whether the settings' steps run through the hand-written layers; and why not, where a GPU would have had them.

    The backend `auto` means on a GPU, where they can. Raises a ValueError where the backend `fused` was asked for and cannot run.
    """
    if config.backend == "torch":
        return False, None
    reason = why_not(getattr(torch, config.dtype), device) or why_not_weights(architecture, config.quantize_nf4, config.double_quantize)
    if config.backend == "fused" and reason:
        raise ValueError(f"backend fused: {reason}; choose backend torch")
    runs = config.backend == "fused" or (reason is None and device.type == "cuda")
    return runs, None if device.type == "cpu" else reason


class Status(NamedTuple):
    """What the host learns of a captured step, in one transfer: whether it was made, mean loss, correct samples, norm before clipping."""

    finite: float
    loss: float
    correct: float
    norm: float


@dataclass(frozen=True)
class _Captured:
    """A graph, the tensors that it reads and what it gives."""

    graph: Any
    packed: Packed
    result: Any


class FusedTrainer(Trainer):
    """A `Trainer` whose micro-batches run through `FusedClassifier`; not for float64.

    On a GPU forward pass, backward pass, clipping and AdamW are one CUDA graph, captured once for each number of tokens (a multiple of
    `packing.GRAIN`); a step whose gradient is not finite moves nothing. After the first steps nothing is allocated on the
    device, unless other class weights are set.
    Accumulated batches, and those of several workers, have a graph for their gradient and make the step as `Trainer` does.
    `longest` is the most tokens that a sample may have.

    On a GPU two such trainers must not step at one time in two threads: what they capture goes through one stream (`impl.fused.side`).
    Other threads may use the GPU meanwhile.
    """

    def __init__(self, classifier: Classifier, *, longest: int, **settings: Any) -> None:
        super().__init__(classifier, **settings)
        self.longest = longest
        self._weighed = self.class_weights  # those that were checked
        self._masters = self.optimiser.flat()
        self._gradient = torch.zeros_like(self._masters)
        self._moments = (torch.zeros_like(self._masters), torch.zeros_like(self._masters))
        self._views = self.optimiser.split(self._masters)
        self._hyper = torch.zeros(5, dtype=torch.float32, device=self._masters.device)
        self._graphs: dict[tuple[str, int], _Captured] = {}
        self._pool: Any = None

    def train_batch(self, batch: Batch) -> BatchResult:
        """One optimiser step, as `Trainer.train_batch`; in one piece where the batch is one micro-batch of a single worker."""
        whole = self.group.size == 1 and 0 < len(batch.labels) <= self.micro_batch and not self._accumulated
        if not whole:
            return super().train_batch(batch)
        self._require_batch(batch)
        self._require_step_left()
        packed = self._packed(batch)
        self._weigh()
        self._bind()
        rate, step = self.learning_rate, self.optimiser.steps + 1
        hyper = [rate, 1 - BETAS[0] ** step, 1 - BETAS[1] ** step, rate * self.optimiser.weight_decay, self.max_norm]
        self._hyper.copy_(torch.tensor(hyper, dtype=torch.float32, device="cpu"))
        numbers, logits = self._replayed("step", packed, self._whole_step)
        status = Status(*numbers.tolist())
        if not status.finite:
            validation.require_finite("logits", logits[: len(batch.labels)])
            raise FloatingPointError(f"the gradient norm is {status.norm} and the loss {status.loss}: nothing was changed")
        self.optimiser.steps += 1
        return BatchResult(status.loss, int(status.correct), len(batch.labels), status.norm)

    def _micro_batch(self, index: int, part: Batch) -> MicroResult:
        """The mean loss and gradient of a micro-batch."""
        del index
        packed = self._packed(part)
        self._weigh()
        self._bind()
        outcome = self._replayed("gradient", packed, self._computed)
        logits = outcome.logits[: len(part.labels)]
        validation.require_finite("logits", logits)
        return MicroResult(len(part.labels), outcome.loss.clone(), self._correct(logits, part.labels), self._gradient.clone())

    @cached_property
    def model(self) -> "FusedClassifier":
        """Made at the first step, when the classifier's weights are joined."""
        from blackswan.impl.fused.model import FusedClassifier  # imports Triton, which need not be installed

        return FusedClassifier(self.classifier, self.longest, self.class_weights, self.multi_label)

    def _packed(self, part: Batch) -> Packed:
        """The real tokens, after the checks of values that a graph cannot make, in one transfer."""
        sizes = sizes_of(part)
        classes, vocab = self.classifier.adaptation.classes, self.classifier.config.vocab
        if sizes.shortest == 0:
            validation.require_rows("mask", part.mask)
        if sizes.longest > self.longest:
            raise ValueError(f"a sample of {sizes.longest} tokens; this trainer was made for at most {self.longest}")
        if not 0 <= sizes.least_id <= sizes.largest_id < vocab:
            validation.require_below("input_ids", part.input_ids, vocab, "tokens of the vocabulary")
        if not 0 <= sizes.least_label <= sizes.largest_label <= (1 if self.multi_label else classes - 1):
            if self.multi_label:
                validation.require_between("labels", part.labels, 0.0, 1.0)
            validation.require_below("labels", part.labels, classes, "classes")
        return pack(part, self.micro_batch, sizes.total)

    def _computed(self, packed: Packed) -> "Outcome":
        """Loss, logits and the flat gradient of the micro-batch."""
        self.model.factors.refresh(self._masters)
        outcome = self.model.loss_and_gradients(packed)
        self.model.factors.gradient(self._gradient)
        return outcome

    def _whole_step(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Gradient, clipping by the global norm and AdamW (Loshchilov & Hutter 2019, Algorithm 2); the `Status` as a tensor [4], and the
        logits. An infinite logit of another class than the label's leaves loss and gradient finite, and yet is none to train on."""
        outcome = self._computed(packed)
        real = packed.real > 0
        hit = classes_of(outcome.logits, self.multi_label) == packed.labels
        right = hit.all(dim=-1) if self.multi_label else hit
        norm = torch.linalg.vector_norm(self._gradient)
        sound = torch.isfinite(outcome.logits).all(dim=-1) | ~real
        finite = torch.isfinite(norm) & torch.isfinite(outcome.loss) & sound.all()
        self._move(self._gradient * torch.clamp(self._hyper[4] / norm, max=1.0), finite)
        numbers = (finite, outcome.loss, (right & real).sum(), norm)
        return torch.stack([number.to(torch.float32) for number in numbers]), outcome.logits

    def _move(self, gradient: Tensor, finite: Tensor) -> None:
        """AdamW in place with the first numbers of `_hyper`; nothing moves unless `finite`."""
        rate, correction, correction_sq, decay = self._hyper[:4]
        values = (self._masters, *self._moments)
        moved = adamw_moved(self._masters, gradient, *self._moments, rate, (correction, correction_sq), decay, BETAS, EPS)
        for value, new in zip(values, moved, strict=True):
            value.copy_(torch.where(finite, new, value))

    def _weigh(self) -> None:
        """Class weights that were put in the place of others are those of the next step, for which what was captured is captured anew."""
        weights = self.class_weights
        if weights is self._weighed:
            return
        if weights is not None and self.multi_label:
            raise ValueError(WEIGHTS_OF_SEVERAL)
        if weights is not None:
            require_class_weights(weights, self.classifier.adaptation.classes)
        self.model.class_weights = self._weighed = weights
        self._graphs, self._pool = {}, None

    def _bind(self) -> None:
        """The parameters are views of one vector, and the optimiser's moments those of the graphs, whoever put others in their place."""
        held = self.optimiser.parameters
        if any(held[name].data_ptr() != view.data_ptr() for name, view in self._views.items()):
            self._masters.copy_(self.optimiser.flat())
            for name, view in self._views.items():
                held[name].data = view
        given = (self.optimiser.exp_avg, self.optimiser.exp_avg_sq)
        for own, other in zip(self._moments, given, strict=True):
            if own is not other:
                own.copy_(other)
        self.optimiser.exp_avg, self.optimiser.exp_avg_sq = self._moments

    def _replayed(self, kind: str, packed: Packed, compute: Callable[[Packed], Any]) -> Any:
        """What `compute` gives: on a GPU by a graph, whose results the next step overwrites."""
        if not self._masters.is_cuda:
            with validation.unchecked(), torch.no_grad():
                return compute(packed)
        with on_device(self._masters):
            return self._replay(self._captured((kind, len(packed.input_ids)), packed, compute), packed)

    def _captured(self, key: tuple[str, int], packed: Packed, compute: Callable[[Packed], Any]) -> _Captured:
        if key not in self._graphs:
            self._graphs[key] = self._capture(packed, compute)
        return self._graphs[key]

    def _replay(self, captured: _Captured, packed: Packed) -> Any:
        for into, value in zip(captured.packed.tensors(), packed.tensors(), strict=True):
            into.copy_(value)
        captured.graph.replay()
        return captured.result

    def _capture(self, packed: Packed, compute: Callable[[Packed], Any]) -> _Captured:
        """Captures the computation on tensors that later steps fill; nothing is computed, and no parameter changes."""
        stream = captured_stream(self._masters.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), validation.unchecked(), torch.no_grad():
            if not self._graphs:
                self._warm_up(packed)
            self.model.tune(len(packed.input_ids))
        torch.cuda.current_stream().wait_stream(stream)
        fixed = Packed(*(tensor.clone() for tensor in packed.tensors()))
        graph = torch.cuda.CUDAGraph()
        others = "thread_local"  # calls of other threads, as one that answers meanwhile or NCCL's, do not spoil it
        with validation.unchecked(), torch.no_grad(), torch.cuda.graph(graph, self._pool, stream, capture_error_mode=others):
            result = compute(fixed)
        self._pool = self._pool or graph.pool()
        return _Captured(graph, fixed, result)

    def _warm_up(self, packed: Packed) -> None:
        """One pass over few tokens compiles the kernels and makes the libraries' handles, which a capture cannot."""
        bounds = torch.full_like(packed.bounds, GRAIN)
        bounds[0] = 0
        few = Packed(packed.input_ids[:GRAIN], packed.positions[:GRAIN], bounds, packed.labels, packed.real)
        self._computed(few)
