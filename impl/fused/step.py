"""Optimiser steps through the hand-written layers, on a GPU as replays of captured CUDA graphs."""

from dataclasses import dataclass
from typing import Any

import torch

from impl import validation
from impl.classifier import Classifier
from impl.fused.model import FusedClassifier, Outcome
from impl.fused.packing import Packed, pack
from impl.trainer import Batch, Trainer, _MicroResult

BETAS, EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class _Captured:
    """A graph, the tensors that it reads and what it gives."""

    graph: Any
    packed: Packed
    outcome: Outcome


class FusedTrainer(Trainer):
    """A `Trainer` whose micro-batches run through `FusedClassifier`; on a GPU each number of tokens (a multiple of 256) is captured once.

    After the first steps nothing is allocated on the device. `longest` is the most tokens that a sample may have.
    """

    def __init__(self, classifier: Classifier, *, longest: int, **settings: Any) -> None:
        super().__init__(classifier, **settings)
        self.model = FusedClassifier(classifier, longest, self.class_weights, self.multi_label)
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None
        self._masters = self.optimiser.flat()
        self._gradient = torch.zeros_like(self._masters)
        self._parameters_are_views()

    def _micro_batch(self, index: int, part: Batch) -> _MicroResult:
        """The mean loss and gradient of a micro-batch."""
        del index
        self._check(part)
        packed = pack(part, self.micro_batch)
        outcome = self._replayed(packed) if packed.input_ids.is_cuda else self._computed(packed)
        logits = outcome.logits[: len(part.labels)]
        validation.require_finite("logits", logits)
        return _MicroResult(len(part.labels), outcome.loss.clone(), self._correct(logits, part.labels), self._gradient.clone())

    def _check(self, part: Batch) -> None:
        """The values that the captured graph cannot check."""
        classes = self.classifier.adaptation.classes
        validation.require_below("input_ids", part.input_ids, self.model.embedding.shape[0], "tokens of the vocabulary")
        validation.require_rows("mask", part.mask)
        if not self.multi_label:
            validation.require_below("labels", part.labels, classes, "classes")
        longest = int(part.mask.sum(dim=1).max())
        if longest > self.model.longest:
            raise ValueError(f"a sample of {longest} tokens; this trainer was made for at most {self.model.longest}")

    def _computed(self, packed: Packed) -> Outcome:
        self._masters_from_parameters()
        self.model.factors.refresh(self._masters)
        outcome = self.model.loss_and_gradients(packed)
        self.model.factors.gradient(self._gradient)
        return outcome

    def _parameters_are_views(self) -> None:
        """The trainable parameters become views of one vector, which every step then reads and writes as it is."""
        for name, view in self.optimiser.split(self._masters).items():
            self.optimiser.parameters[name].data = view

    def _masters_from_parameters(self) -> None:
        """Nothing to do while the parameters are views; a caller that put other tensors in their place is heard."""
        start = self._masters.data_ptr()
        first = next(iter(self.optimiser.parameters.values()))
        if first.data_ptr() != start:
            self._masters.copy_(self.optimiser.flat())
            self._parameters_are_views()

    def _replayed(self, packed: Packed) -> Outcome:
        tokens = len(packed.input_ids)
        if tokens not in self._graphs:
            self._graphs[tokens] = self._capture(packed)
        captured = self._graphs[tokens]
        self._masters_from_parameters()
        for into, value in zip(captured.packed.tensors(), packed.tensors(), strict=True):
            into.copy_(value)
        captured.graph.replay()
        return captured.outcome

    def _capture(self, packed: Packed) -> _Captured:
        """Runs once to compile and to choose algorithms, then captures."""
        fixed = Packed(*(tensor.clone() for tensor in packed.tensors()))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), validation.unchecked():
            self._computed(fixed)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with validation.unchecked(), torch.cuda.graph(graph, pool=self._pool):
            outcome = self._computed(fixed)
        self._pool = self._pool or graph.pool()
        return _Captured(graph, fixed, outcome)
