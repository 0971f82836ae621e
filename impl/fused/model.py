"""A classifier's loss and gradients on packed tokens, by its own hand-written layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from blackswan.impl.classifier import Classifier, trainable_shapes
from blackswan.impl.decoder import Layer
from blackswan.impl.fused.factors import Factors
from blackswan.impl.fused.layer import FusedLayer, Kept, Stream, Tokens, groups
from blackswan.impl.fused.linear import Shared
from blackswan.impl.fused.packing import GRAIN, Packed
from blackswan.impl.fused.products import Products
from blackswan.impl.fused.side import SideStream
from blackswan.impl.fused.weights import Weights
from blackswan.impl.kernels.rms_norm import rms_norm, rms_norm_backward
from blackswan.impl.kernels.rope import rope_table
from blackswan.impl.operations.losses import binary_cross_entropy


@dataclass(frozen=True)
class Outcome:
    """Mean loss over the real samples [], logits [samples, classes], both float32 (float64 in float64)."""

    loss: Tensor
    logits: Tensor


class FusedClassifier:
    """Forward and backward pass of `classifier` over its own parameters; `longest` is the most tokens a sample may have.

    The classifier's frozen weights are joined where one product reads several; the classifier itself goes on working.
    """

    def __init__(self, classifier: Classifier, longest: int, class_weights: Tensor | None = None, multi_label: bool = False) -> None:
        body, config = classifier.model, classifier.config
        blocks = cast(Sequence[Layer], body.layers)
        self.classifier, self.longest, self.class_weights, self.multi_label = classifier, longest, class_weights, multi_label
        self.embedding, self.norm, self.eps = cast(Tensor, body.embed_tokens.weight), body.norm.weight.contiguous(), config.eps
        dtype, device = self.embedding.dtype, self.embedding.device
        joined = [group for layer in blocks for group in groups(layer)]
        self.factors = Factors(trainable_shapes(config, classifier.adaptation), joined, dtype, device)
        side = SideStream(device)
        self.shared = Shared(side, Products(), Weights(side, dtype, device))
        self.layers = [FusedLayer(layer, config, self.factors, self.shared, dtype) for layer in blocks]
        forward = [linear.weight for layer in self.layers for linear in layer.products()]
        # The input of the first block needs no gradient, so its first product has no counterpart.
        self._uses = forward + forward[:0:-1]
        self.input_norms = [layer.norm for layer in self.layers] + [self.norm]

    def tune(self, tokens: int) -> None:
        """Finds the fastest algorithms of the wide products of so many tokens; every block's are alike."""
        for linear in self.layers[0].products():
            linear.tune(tokens)

    @torch.no_grad()
    def loss_and_gradients(self, packed: Packed) -> Outcome:
        """The mean loss over the real samples; the gradients of the trainable tensors go to their slots in `factors`."""
        config = self.classifier.config
        table = rope_table(packed.positions, config.theta, config.head_dim, scaling=config.rope_scaling)
        rows = read_rows(packed.bounds, len(packed.positions), self.classifier.adaptation.pooling)
        # The tokens that fill up are a sequence as well, of less than GRAIN.
        tokens = Tokens(packed.positions, table, packed.bounds, max(self.longest, GRAIN), rows)
        self.shared.weights.begin(self._uses)
        stream, kept = self._forward(packed.input_ids, tokens)
        outcome, dy = self._head(stream.y, packed)
        dx: Tensor | None = rms_norm_backward(dy, stream.x, self.norm, stream.rstd)
        for index in reversed(range(len(self.layers))):
            assert dx is not None
            dx = self.layers[index].backward(kept.pop(), dx, tokens, needs_input=index > 0)
        self.shared.side.finish()
        return outcome

    def _forward(self, input_ids: Tensor, tokens: Tokens) -> tuple[Stream, list[Kept]]:
        x = functional.embedding(input_ids, self.embedding)
        stream, kept = Stream(x, *rms_norm(x, self.input_norms[0], self.eps)), []
        for layer, next_norm in zip(self.layers, self.input_norms[1:], strict=True):
            kept_here, stream = layer.forward(stream, tokens, next_norm, last=layer is self.layers[-1])
            kept.append(kept_here)
        return stream, kept

    def _head(self, y: Tensor, packed: Packed) -> tuple[Outcome, Tensor]:
        """Pooling, head and loss, and the gradient of y: [tokens, hidden], or [samples, hidden] where only those rows are read."""
        names = ("score.weight", "score.bias")
        with torch.enable_grad():
            hidden, weight, bias = (value.detach().requires_grad_() for value in (y, *(self.factors.value(name) for name in names)))
            pooled = hidden if self.classifier.adaptation.pooling != "mean" else mean(hidden, packed.bounds)
            logits = functional.linear(pooled, weight, bias)
            losses = self._losses(logits if logits.dtype == torch.float64 else logits.float(), packed.labels)
            # Not a product: an infinite loss of a place without a sample is none.
            loss = torch.where(packed.real > 0, losses, 0.0).sum() / packed.real.sum()
            dy, *gradients = torch.autograd.grad(loss, (hidden, weight, bias))
        for name, gradient in zip(names, gradients, strict=True):
            self.factors.slot(name).copy_(gradient)
        return Outcome(loss.detach(), logits.detach()), dy

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """One a sample."""
        if self.multi_label:
            targets = labels.to(logits.dtype)
            return binary_cross_entropy(logits, targets).mean(dim=1)
        weights = None if self.class_weights is None else self.class_weights.to(logits)
        return functional.cross_entropy(logits, labels, weight=weights, reduction="none")


def read_rows(bounds: Tensor, tokens: int, pooling: str) -> Tensor | None:
    """The row of each sample's pooled token, bounds [samples + 2] → [samples]; None where the mean of all is read.

    A place without a sample gives some token's row.
    """
    if pooling == "mean":
        return None
    return bounds[:-2].long().clamp(max=tokens - 1) if pooling == "first" else (bounds[1:-1].long() - 1).clamp(min=0)


def mean(y: Tensor, bounds: Tensor) -> Tensor:
    """The mean over each sample's tokens, in float32, rounded once: y [tokens, hidden], bounds [samples + 2] → [samples, hidden]."""
    first, after = bounds[:-2], bounds[1:-1]
    index = torch.arange(len(y), device=y.device)
    inside = (index >= first[:, None]) & (index < after[:, None])
    wide = y if y.dtype == torch.float64 else y.float()
    return (inside.to(wide.dtype) @ wide / (after - first).clamp(min=1)[:, None]).to(y.dtype)
