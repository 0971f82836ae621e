"""Where a NaN or an infinity came from."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blackswan.impl import dispatch
from blackswan.impl.classifier import Classifier
from blackswan.impl.trainer import Batch
from blackswan.impl.validation import unchecked

_PART = 1 << 22


class _Found(Exception):  # noqa: N818  # ends the pass at the first one
    pass


def origin(classifier: Classifier, batch: Batch, class_weights: Tensor | None = None) -> str | None:
    """The first thing that is not finite when the batch is run again, in words; None where everything is finite.

    Looks at the parameters, then at each call of the forward pass and the loss in their order, then at each call of the backward pass
    in its. The call that is named had finite inputs, or names the input that was not. Changes neither weights nor gradients.
    """

    def loss() -> Tensor:
        return classifier.loss(classifier(batch.input_ids, batch.mask), batch.labels, class_weights)

    return origin_of(classifier, loss, list(classifier.trainable_parameters().values()))


def origin_of(model: nn.Module, loss: Callable[[], Tensor], trained: Sequence[Tensor]) -> str | None:
    """`origin` for any model: `loss` runs its forward pass, `trained` are the parameters that the loss is differentiated by."""
    if (found := spoiled_parameter(model)) is not None:
        return found
    try:
        # The checks of values would stop at the logits, and not say which call they come from.
        with unchecked(), dispatch.wrapping(_watched), torch.enable_grad():
            torch.autograd.grad(loss(), trained)
    except _Found as found:
        return str(found)
    return None


def spoiled_parameter(model: nn.Module) -> str | None:
    """The first parameter or buffer that holds a NaN or an infinity, and how many, in words; None where all are finite."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, value in named:
            # In parts: the test of a whole embedding would need several times its memory.
            if any(_bad(part) for part in torch.tensor_split(value.detach().flatten(), math.ceil(value.numel() / _PART) or 1)):
                return f"{kind} {name}: {_described(value)}"
    return None


def _watched(path: str, operation: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """One call: its inputs, its outputs, and later the gradients that it passes on, held to be finite."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) and _bad(value):
            raise _Found(f"{path} ({operation}): its input {name} has {_described(value)}")
    result = function(**{name: _own(path, operation, name, value) for name, value in arguments.items()})
    for value in result if isinstance(result, tuple) else (result,):
        if _bad(value):
            raise _Found(f"{path} ({operation}): {_described(value)}, from finite inputs")
    return result


def _own(path: str, operation: str, name: str, value: Any) -> Any:
    """An alias of an input, whose gradient is this call's share alone."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    alias = value.view_as(value)

    def look(gradient: Tensor) -> None:
        if _bad(gradient):
            raise _Found(f"{path} ({operation}): the gradient of its input {name} has {_described(gradient)}, from a finite one")

    alias.register_hook(look)  # type: ignore[no-untyped-call]  # torch
    return alias


def _bad(value: Tensor) -> bool:
    return value.is_floating_point() and not bool(torch.isfinite(value).all())


def _described(value: Tensor) -> str:
    nan, infinite = int(value.isnan().sum()), int(value.isinf().sum())
    counts = [f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(counts)} of {value.numel()}"
