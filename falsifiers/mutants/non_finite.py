"""Wrong searches for where a value that is not finite comes from: one step of `impl` replaced each."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Callable[..., Any]


wrong_step("impl.nonfinite:_bad", name="origin_of_nan_only", doc="Infinities are not found.")(
    lambda _, value: value.is_floating_point() and bool(value.isnan().any())
)


@wrong_step("impl.nonfinite:spoiled_parameter")
def origin_looks_at_each_memory_once(spoiled: Step, model: Any) -> Any:
    """Only the first of several parameters in one memory is searched."""
    first = dict[int, str]()
    for name, value in model.named_parameters():
        first.setdefault(value.untyped_storage().data_ptr(), name)
    own = [(name, value) for name, value in model.named_parameters() if name in first.values()]
    return spoiled(SimpleNamespace(named_parameters=lambda: own, named_buffers=model.named_buffers))


wrong_step("impl.nonfinite:_bad", name="origin_of_float32_alone", doc="Numbers of a model in bfloat16 are not looked at.")(
    lambda bad, value: value.dtype == torch.float32 and bad(value)
)


@wrong_step("impl.nonfinite:spoiled_parameter")
def origin_passes_over_factors(spoiled: Step, model: torch.nn.Module) -> Any:
    """The factors that are trained beside a weight are not looked at."""
    others = [(name, value) for name, value in model.named_parameters() if "lora" not in name]
    with mock.patch.object(torch.nn.Module, "named_parameters", return_value=others):
        return spoiled(model)


@wrong_step("impl.nonfinite:spoiled_parameter")
def origin_passes_over_buffers(spoiled: Step, model: torch.nn.Module) -> Any:
    """The scales of weights in NF4 are not looked at."""
    with mock.patch.object(torch.nn.Module, "named_buffers", return_value=()):
        return spoiled(model)


@wrong_step("impl.nonfinite:spoiled_parameter")
def origin_passes_over_single_numbers(spoiled: Step, model: torch.nn.Module) -> Any:
    """The offset of scales that are quantised in turn is a number by itself, and is not looked at."""
    buffers = [(name, value) for name, value in model.named_buffers() if value.dim()]
    with mock.patch.object(torch.nn.Module, "named_buffers", return_value=buffers):
        return spoiled(model)


wrong_step("impl.nonfinite:_described", name="origin_counts_positive_infinities", doc="Negative infinities are not counted.")(
    lambda described, value: described(value.clamp(min=torch.finfo(value.dtype).min))
)
wrong_step("impl.nonfinite:origin", name="origin_without_class_weights", doc="The loss is searched as if classes had no weights.")(
    lambda origin, classifier, batch, _=None: origin(classifier, batch)
)


@wrong_step("impl.nonfinite:origin_of")
def origin_of_a_search_that_fails(origin: Step, *given: Any) -> Any:
    """All is said to be finite where the search for what is not has failed."""
    with suppress(RuntimeError):
        return origin(*given)
    return None


@wrong_step("impl.nonfinite:torch.tensor_split")
def origin_of_the_first_part(split: Step, *given: Any) -> Any:
    """A parameter is searched in parts, and only the first part is looked at."""
    return split(*given)[:1]


wrong_step("impl.nonfinite:_own", name="origin_of_forward_only", doc="Gradients are not looked at.")(
    lambda _, _path, _operation, _name, value: value
)


@wrong_step("impl.nonfinite:_own")
def origin_looks_at_shared_gradients(own: Step, *given: Any) -> Any:
    """The gradient that is looked at is a tensor's of all its readers, and goes on being looked at when the search is over."""
    with mock.patch.object(torch.Tensor, "view_as", lambda value, _: value):
        return own(*given)


@wrong_step("impl.nonfinite:_watched")
def origin_names_the_logits(_: Step, path: str, operation: str, function: Step, arguments: Mapping[str, Any]) -> Any:
    """Only the logits are looked at."""
    from blackswan.impl.nonfinite import _bad, _Found

    result = function(**arguments)
    if path == "score" and _bad(result):
        raise _Found(f"{path} ({operation}): not finite")
    return result


wrong_step("impl.nonfinite:torch.autograd.grad", name="origin_leaves_gradients", doc="Asking leaves gradients behind for the next step.")(
    lambda _, loss, inputs: loss.backward(inputs=inputs)
)
wrong_step("impl.optimiser:AdamW.flat_gradient", name="training_swallows_bad_gradients", doc="NaN gradients become zeros.")(
    lambda flat, self: torch.nan_to_num(flat(self), nan=0.0, posinf=0.0, neginf=0.0)
)


@wrong_step("impl.validation:require_finite_norm")
def training_steps_on_bad_gradients(*_: Any) -> None:
    """A step is made whatever the norm of its gradients."""


@wrong_step("impl.nonfinite:_described")
def origin_counts_in_one_part(described: Step, value: torch.Tensor) -> str:
    """Only the first part of a tensor with numbers that are not finite is counted."""
    from blackswan.impl.nonfinite import _PART, _bad

    return str(described(next(part for part in torch.split(value.detach().flatten(), _PART) if _bad(part))))


@wrong_step("impl.nonfinite:_described")
def origin_counts_what_is_not_there(_: Step, value: torch.Tensor) -> str:
    """NaN and infinities are both counted where one kind is there."""
    return f"{int(value.isnan().sum())} NaN and {int(value.isinf().sum())} infinite of {value.numel()}"


wrong_step("impl.nonfinite:torch.enable_grad", name="origin_needs_gradients", doc="Nothing is found where gradients are switched off.")(
    nullcontext
)


@wrong_step("impl.nonfinite:_watched")
def origin_passes_over_inputs(_: Step, path: str, operation: str, function: Step, arguments: Mapping[str, Any]) -> Any:
    """A call is blamed for what it was given from outside."""
    from blackswan.impl.nonfinite import _bad, _described, _Found, _own

    result = function(**{name: _own(path, operation, name, value) for name, value in arguments.items()})
    for value in result if isinstance(result, tuple) else (result,):
        if _bad(value):
            raise _Found(f"{path} ({operation}): {_described(value)}, from finite inputs")
    return result
