"""Loss and gradients of a whole classifier as a subject computes them, with the hidden states on the way."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF, signatures
from blackswan.falsifiers.numeric.rounding import dithered, moved, nearest
from blackswan.falsifiers.numeric.whole_model import Stored, WholeModel
from blackswan.impl import dispatch
from blackswan.impl.classifier import Adaptation, Classifier
from blackswan.impl.config import DecoderConfig
from blackswan.impl.tensors import LazyTensors
from blackswan.impl.trainer import Batch
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_CONFIG = ("family", "vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "eps", "theta")
_ADAPTATION = ("classes", "rank", "alpha", "targets", "pooling", "nf4")


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


def run(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    """`hidden/<path>` [batch, seq, hidden], `logits`, `loss` and `gradient/<name>` of the model that the scalars describe.

    `dtype`: that of the model. `path`: torch, triton or fused; None leaves the choice to `impl`. `rounded` and `replay`: every operation's
    inputs, results and gradients under the rounding of that dtype, in one of its random replays where there is a number.
    """
    whole, classifier, batch = _built(scalars, device)
    path = scalars.get("path")
    if path == "fused":
        return _on_the_host(_fused(classifier, batch, whole))
    with nullcontext() if path is None else dispatch.kernels(path):
        return _on_the_host(_dispatched(classifier, batch, whole, scalars))


def record(scalars: Scalars, device: torch.device) -> list[dispatch.Call]:
    """The calls that the block at the path `block` makes in a forward and backward pass; none by the hand-written layers."""
    if scalars.get("path") == "fused":
        return []
    _, classifier, batch = _built(scalars, device)
    path = scalars.get("path")
    with nullcontext() if path is None else dispatch.kernels(path), dispatch.recording() as calls:
        classifier.loss(classifier(batch.input_ids, batch.mask), batch.labels).backward()  # type: ignore[no-untyped-call]  # torch
    return [call for call in calls if call.path.startswith(f"{scalars['block']}.")]


def _built(scalars: Scalars, device: torch.device) -> tuple[WholeModel, Classifier, Batch]:
    whole = WholeModel(**{field.name: scalars[field.name] for field in fields(WholeModel)})
    stored = whole.parameters()
    config = DecoderConfig(**{name: scalars[name] for name in _CONFIG}, tied=True, max_positions=2**31)
    adaptation = Adaptation(**{name: scalars[name] for name in _ADAPTATION})
    base, trainable = (_Tensors(stored, trainable=kind) for kind in (False, True))
    classifier = Classifier(config, adaptation, base, trainable, dtype=DTYPES[scalars["dtype"]], device=device)
    given = [torch.tensor(whole.inputs[name], device=device) for name in ("input_ids", "mask", "labels")]
    return whole, classifier, Batch(*given)


def _on_the_host(outputs: Mapping[str, Tensor]) -> dict[str, Array]:
    from blackswan.falsifiers.subjects.implementation import to_numpy  # which imports this module

    return {name: to_numpy(value) for name, value in outputs.items()}


def _dispatched(classifier: Classifier, batch: Batch, whole: WholeModel, scalars: Scalars) -> dict[str, Tensor]:
    """Through the model's own modules and automatic differentiation."""
    paths = {"model.embed_tokens": "model.embed_tokens", "model.norm": "model.norm"}
    paths |= {f"{block}.mlp_residual": block for block in whole.blocks}
    found: dict[str, Tensor] = {}
    rounding = _Rounding.asked(scalars, batch.labels.device)

    def keep(path: str, operation: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        result = rounding(operation, function, arguments) if rounding else function(**arguments)
        if path in paths:
            found[f"hidden/{paths[path]}"] = result.detach()
        return result

    with dispatch.wrapping(keep):
        logits = classifier(batch.input_ids, batch.mask)
        loss = classifier.loss(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
    gradients = {name: _gradient(value) for name, value in classifier.trainable_parameters().items()}
    return found | {"logits": logits, "loss": loss} | {f"gradient/{name}": value for name, value in gradients.items()}


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _fused(classifier: Classifier, batch: Batch, whole: WholeModel) -> dict[str, Tensor]:
    """Through the hand-written layers, which pack the real tokens; the places of padding are zero."""
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
    found = {f"hidden/{name}": _spread(value[:total], batch.mask) for name, value in zip(_names(whole), states, strict=True)}
    found |= {f"gradient/{name}": part.view_as(trainable[name]) for name, part in zip(trainable, parts, strict=True)}
    return found | {"logits": outcome.logits, "loss": outcome.loss}


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
    """What `numeric.precision.rounded_table` does to the reference's operations, done by the same rule to those of `impl` in float32.

    Inputs and arriving gradients are rounded, and in a replay moved by a unit roundoff of the dtype that intermediates are held in; results
    and leaving gradients are rounded, in a replay stochastically.
    """

    def __init__(self, dtype: str, generator: torch.Generator | None) -> None:
        self.dtype, self.generator = DTYPES[dtype], generator

    @classmethod
    def asked(cls, scalars: Scalars, device: torch.device) -> "_Rounding | None":
        """The rounding that the scalars ask for; None where they ask for none."""
        if scalars.get("rounded") is None:
            return None
        replay = scalars["replay"]
        seeded = None if replay is None else torch.Generator(device).manual_seed(2 * int(scalars["seed"]) + 1000 * (1 + int(replay)))
        return cls(scalars["rounded"], seeded)

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


PROCEDURES = {"whole_classifier": run}
