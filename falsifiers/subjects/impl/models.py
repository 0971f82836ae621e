"""Whole classifiers as `impl` computes them: hidden states, logits, loss and gradients, and the calls of a block."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF, signatures
from blackswan.falsifiers.numeric.rounding import dithered, moved, nearest
from blackswan.falsifiers.numeric.whole_model import Stored, WholeModel
from blackswan.falsifiers.subjects.conversion import adaptation_of, config_of, to_numpy
from blackswan.falsifiers.subjects.doors.models import ModelOutputs, Rounded
from blackswan.falsifiers.subjects.implementation import traced
from blackswan.falsifiers.subjects.protocol import Lacks, TracedCall
from blackswan.impl import dispatch, kernels
from blackswan.impl.classifier import Classifier
from blackswan.impl.fused.step import why_not
from blackswan.impl.tensors import LazyTensors
from blackswan.impl.trainer import Batch

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class _Tensors(LazyTensors):
    """The stored arrays as tensors of their own."""

    def __init__(self, stored: Stored, *, trainable: bool) -> None:
        self._stored = stored
        self._shapes = {name: shape for name, shape in stored.shapes.items() if (name in stored.trainable) is trainable}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return self._shapes

    def __getitem__(self, name: str) -> Tensor:
        """A copy; KeyError for a name that is not there."""
        value = self._stored[name]
        if value.dtype.kind != "f":  # NumPy does not count bfloat16 among the floats, and torch does not read it
            return torch.tensor(value.view(np.int16)).view(torch.bfloat16)
        return torch.tensor(value)


class Models:
    """Whole classifiers: see the protocol Model."""

    def __init__(self, device: torch.device, backend: str | None) -> None:
        self._device, self._backend = device, backend
        if backend == "fused" and (reason := why_not(torch.bfloat16, device)):
            raise Lacks(reason)
        if backend == "triton" and (reason := kernels.why_not()):
            raise Lacks(reason)

    def outputs(self, whole: WholeModel, dtype: str, rounded: Rounded | None = None) -> ModelOutputs:
        """Computes by the backend; in float64, and under rounding, by torch, which alone has both."""
        classifier, batch = self._built(whole, dtype)
        exact = dtype == "float64" or rounded is not None
        if self._backend == "fused" and not exact:
            return _fused(classifier, batch, whole)
        with self._by("torch" if exact else self._backend):
            return _dispatched(classifier, batch, whole, rounded)

    def calls(self, whole: WholeModel, dtype: str, block: str) -> list[TracedCall]:
        """The calls of a block; none by the hand-written layers."""
        if self._backend == "fused":
            return []
        classifier, batch = self._built(whole, dtype)
        with self._by(self._backend), dispatch.recording() as calls:
            classifier.loss(classifier(batch.input_ids, batch.mask), batch.labels).backward()  # type: ignore[no-untyped-call]  # torch
        return [traced(call) for call in calls if call.path.startswith(f"{block}.")]

    def _by(self, backend: str | None) -> AbstractContextManager[None]:
        return nullcontext() if backend in (None, "fused") else dispatch.backend(backend)

    def _built(self, whole: WholeModel, dtype: str) -> tuple[Classifier, Batch]:
        stored = whole.parameters()
        base, trainable = (_Tensors(stored, trainable=kind) for kind in (False, True))
        classifier = Classifier(
            config_of(whole.scalars), adaptation_of(whole.scalars), base, trainable, dtype=DTYPES[dtype], device=self._device
        )
        return classifier, Batch(*(torch.tensor(whole.inputs[name], device=self._device) for name in ("input_ids", "mask", "labels")))


def _dispatched(classifier: Classifier, batch: Batch, whole: WholeModel, rounded: Rounded | None) -> ModelOutputs:
    """Computes by the model's own modules and automatic differentiation."""
    paths = {"model.embed_tokens": "model.embed_tokens", "model.norm": "model.norm"}
    paths |= {f"{block}.mlp_residual": block for block in whole.blocks}
    states: dict[str, Tensor] = {}
    rounding = rounded and _Rounding.asked(rounded, whole.seed, batch.labels.device)

    def keep(path: str, operation: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        result = rounding(operation, function, arguments) if rounding else function(**arguments)
        if path in paths:
            states[paths[path]] = result.detach()
        return result

    with dispatch.wrapping(keep):
        logits = classifier(batch.input_ids, batch.mask)
        loss = classifier.loss(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
    return _answered(states, logits, loss, {name: _gradient(value) for name, value in classifier.trainable_parameters().items()})


def _answered(states: Mapping[str, Tensor], logits: Tensor, loss: Tensor, gradients: Mapping[str, Tensor]) -> ModelOutputs:
    hidden, slopes = ({name: to_numpy(value) for name, value in given.items()} for given in (states, gradients))
    return ModelOutputs(hidden, to_numpy(logits), to_numpy(loss), slopes)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _fused(classifier: Classifier, batch: Batch, whole: WholeModel) -> ModelOutputs:
    """Computes by the hand-written layers, which pack the real tokens; the places of padding are zero."""
    from blackswan.impl.fused.model import FusedClassifier  # imports Triton, which need not be installed
    from blackswan.impl.fused.packing import pack

    model, total = FusedClassifier(classifier, longest=whole.seq), int(batch.mask.sum())
    trainable = classifier.trainable_parameters()
    masters = torch.cat([value.detach().flatten() for value in trainable.values()])
    model.factors.refresh(masters)
    with _states(model) as states:
        outcome = model.loss_and_gradients(pack(batch, len(batch.labels), total))
    model.factors.gradient(flat := torch.zeros_like(masters))
    parts = torch.split(flat, [value.numel() for value in trainable.values()])
    hidden = {name: _spread(value[:total], batch.mask) for name, value in zip(_names(whole), states, strict=True)}
    gradients = {name: part.view_as(trainable[name]) for name, part in zip(trainable, parts, strict=True)}
    return _answered(hidden, outcome.logits, outcome.loss, gradients)


def _names(whole: WholeModel) -> list[str]:
    return ["model.embed_tokens", *whole.blocks, "model.norm"]


@contextmanager
def _states(model: Any) -> Iterator[list[Tensor]]:
    """The stream before the first layer and after each, then its last norm, as the layers hand it on inside the block."""
    states: list[Tensor] = []

    def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
        def changed(stream: Any, *arguments: Any, **options: Any) -> Any:
            if not states:
                states.append(stream.x.clone())
            kept, after = forward(stream, *arguments, **options)
            states.append(after.x.clone())
            if options["last"]:
                states.append(after.y.clone())
            return kept, after

        return changed

    for layer in model.layers:
        layer.forward = watched(layer.forward)
    try:
        yield states
    finally:
        for layer in model.layers:
            del layer.forward


def _spread(packed: Tensor, mask: Tensor) -> Tensor:
    """Packed tokens [tokens, hidden] at their places, [batch, seq, hidden]."""
    places = packed.new_zeros((*mask.shape, packed.shape[1]))
    places[mask] = packed
    return places


class _Rounding:
    """Rounds operations of `impl` in float32 by the rule by which `numeric.precision.rounded_table` rounds those of the reference.

    Inputs and arriving gradients are rounded, and in a replay moved by a unit roundoff of the dtype that intermediates are held in; results
    and leaving gradients are rounded, in a replay stochastically.
    """

    def __init__(self, dtype: str, generator: torch.Generator | None) -> None:
        self.dtype, self.generator = DTYPES[dtype], generator

    @classmethod
    def asked(cls, rounded: Rounded, seed: int, device: torch.device) -> "_Rounding":
        """The rounding of a run of the model of that seed."""
        number = None if rounded.replay is None else 2 * seed + 1000 * (1 + rounded.replay)
        return cls(rounded.dtype, None if number is None else torch.Generator(device).manual_seed(number))

    def __call__(self, operation: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """The function's result."""
        signature = signatures()[operation]
        step = UNIT_ROUNDOFF["bfloat16" if signature.intermediates == "storage" and self.dtype == torch.bfloat16 else "float32"]
        exact = {name for name, spec in signature.inputs.items() if spec.dtype == "float32"}
        given = {
            name: _Pass.apply(value, lambda t: self._moved(t, step), self._rounded)  # type: ignore[no-untyped-call]  # torch
            if isinstance(value, Tensor) and value.is_floating_point() and name not in exact
            else value
            for name, value in arguments.items()
        }
        result = function(**given)
        if not isinstance(result, Tensor) or next(iter(signature.outputs.values())).dtype == "float32":
            return result
        return _Pass.apply(result, self._rounded, lambda t: self._moved(t, step))  # type: ignore[no-untyped-call]  # torch

    def _rounded(self, value: Tensor) -> Tensor:
        shifted = value if self.generator is None else dithered(value, UNIT_ROUNDOFF["bfloat16"], self.generator)
        return nearest(shifted, self.dtype)

    def _moved(self, value: Tensor, step: float) -> Tensor:
        rounded = nearest(value, self.dtype)
        return rounded if self.generator is None else moved(rounded, step, self.generator)


class _Pass(torch.autograd.Function):
    """One function of the value on the way forward, another of its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        """The value after `forward`."""
        ctx.back = backward
        return forward(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient after `backward`."""
        return ctx.back(gradients[0]), None, None
