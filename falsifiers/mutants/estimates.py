"""Wrong estimates of memory, and what is said of them: one step of `impl` replaced each."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl import allocations, dispatch, kernels
from blackswan.impl.memory import WORKSPACE, WORKSPACE_HOPPER

Step = Callable[..., Any]


_kept: dict[Any, Any] = {}


def _without(*parts: str) -> Step:
    """An estimate without these parts, in its total as well."""

    def wrong(estimate: Step, *given: Any, **options: Any) -> Any:
        found = estimate(*given, **options)
        left = {part: count for part, count in found.parts.items() if part not in parts}
        return replace(found, parts=left, total=found.total - sum(found.parts.values()) + sum(left.values()))

    return wrong


def _of_other(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Step:
    """An estimate of another training step than the one asked for."""

    def wrong(estimate: Step, *given: Any, **options: Any) -> Any:
        asked = inspect.signature(estimate).bind(*given, **options).arguments
        return estimate(**{**asked, **change(asked)})

    return wrong


wrong_steps(
    "impl.memory:estimate",
    estimate_without_scales=("NF4 without its absmax.", _without("nf4_absmax"), "S30"),
    estimate_without_lora=("LoRA and head left out.", _without("lora", "head"), "S30"),
    estimate_without_optimiser=("Moments, gradients and their temporaries left out.", _without("moments", "gradients", "update"), "S30"),
    estimate_without_activations=("Tensors that are saved for the backward pass are left out.", _without("activations", "working")),
    estimate_of_one_sample=("A batch of one, whatever the batch.", _of_other(lambda _: {"batch": 1})),
    estimate_of_one_micro_batch=("One micro-batch, however many a step has.", _of_other(lambda _: {"accumulation": 1})),
    estimate_always_in_bfloat16=("bfloat16 whatever the dtype.", _of_other(lambda _: {"dtype": torch.bfloat16})),
    estimate_always_quantised=(
        "NF4 whether or not it was asked for.",
        _of_other(lambda asked: {"adaptation": replace(asked["adaptation"], nf4=True)}),
    ),
    estimate_without_double_quantize=(
        "Four bytes an absmax whether or not they are quantised in turn.",
        _of_other(lambda asked: {"adaptation": replace(asked["adaptation"], double_quantize=False)}),
    ),
)


@wrong_step("impl.commands.common:memory_of_a_step")
def estimate_without_the_last_micro_batch(estimate: Any, model: Any, config: Any, samples: int, *given: Any) -> Any:
    """Micro-batches that are not full are no part of a step."""
    return estimate(model, config, max(config.batch_size, samples // config.batch_size * config.batch_size), *given)


@wrong_step("impl.fused.memory:estimate_fused")
def memory_of_one_pass_by_hand(estimate: Step, *given: Any, **options: Any) -> Any:
    """A step of the hand-written layers is estimated for one micro-batch."""
    return estimate(*given, **{**options, "accumulation": 1})


@wrong_step("impl.fused.step:backend_of")
def memory_by_differentiation(*_: Any) -> Any:
    """The memory of a step on a card is that of automatic differentiation, whatever runs there."""
    return False, None


@wrong_step("impl.memory:classifier_of_shapes")
def estimate_of_quantising_nothing(classifier: Any, *given: Any) -> Any:
    """The estimate lacks the part for the memory that quantising takes on top."""
    made = classifier(*given)
    given[-1].largest.pop("quantisation", None)
    return made


@wrong_step("impl.allocations:Allocations._run")
def estimate_by_schemas(run: Any, self: Any, func: Any, args: Any, kwargs: Any, *given: Any) -> Any:
    """Operations whose schema says nothing of an alias are counted as ones that allocate, as a view that torch calls unsafe."""
    fresh = not any(result.alias_info for result in func._schema.returns)
    key = (func, allocations._form(args), allocations._form(tuple(kwargs.items())))
    result = run(self, func, args, kwargs, *given)
    if fresh and isinstance(result, torch.Tensor) and result.is_meta and result.untyped_storage().nbytes() == result.nbytes:
        self._known[key] = allocations._form(result)
    return result


@wrong_step("impl.allocations:_CUDA")
def estimate_of_fused_attention(kernels: Any) -> Any:
    """Attention is fused in float32 too."""
    attention = kernels[functional.scaled_dot_product_attention]

    def fused(*inputs: Any, **options: Any) -> Any:
        return attention(*(each.bfloat16() if each.is_floating_point() else each for each in inputs), **options).to(inputs[0].dtype)

    return {**kernels, functional.scaled_dot_product_attention: fused}


@wrong_step("impl.allocations:_CUDA")
def estimate_of_norms_that_keep_nothing(kernels: Any) -> Any:
    """A norm's input and 1/rms are not kept for the backward pass where torch's own operations run."""
    norm = kernels[functional.rms_norm]

    def forgetful(*inputs: Any, **options: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
            return norm(*inputs, **options)

    return {**kernels, functional.rms_norm: forgetful}


@wrong_step("impl.memory:repeating")
def estimate_stops_before_joining(_: Step, batch: Any, size: int) -> Any:
    """The estimate ends one micro-batch before gradients are averaged on the way."""
    from blackswan.impl.trainer import HELD

    return next(iter(batch.split(HELD * size)))


wrong_step("impl.memory:with_gradients", name="estimate_without_gradients", doc="Where gradients are switched off nothing is estimated.")(
    lambda _: nullcontext()
)


@wrong_step("impl.memory:empty_batch")
def estimate_of_labels_in_the_default_dtype(batch_of: Step, trainer: Any, shape: Any) -> Any:
    """Several labels a sample take the memory of torch's default dtype."""
    batch = batch_of(trainer, shape)
    return replace(batch, labels=torch.empty(batch.labels.shape, device="meta")) if trainer.multi_label else batch


@wrong_step("impl.memory:estimate")
def estimate_calls_weights_activations(estimate: Step, *given: Any, **options: Any) -> Any:
    """Dequantised weights counted as saved activations."""
    found = estimate(*given, **options)
    parts = dict(found.parts)
    parts["activations"] += parts.pop("dequantised_weights", 0)
    return replace(found, parts=parts)


def _from_few_layers(estimate: Step, config: Any, *given: Any, **options: Any) -> Any:
    """Each further layer adds to the peak what the third one does."""
    if config.layers <= 3:
        return estimate(config, *given, **options)
    fewer, more = (estimate(replace(config, layers=layers), *given, **options) for layers in (2, 3))

    def grown(before: Any, after: Any) -> Any:
        return after + (config.layers - 3) * (after - before)

    parts = {name: grown(fewer.parts.get(name, 0), size) for name, size in more.parts.items()}
    return replace(more, parts=parts, total=grown(fewer.total, more.total), resident=grown(fewer.resident, more.resident))


wrong_step("impl.memory:estimate", name="estimate_from_few_layers", doc="A deep model is estimated from two and three layers.")(
    _from_few_layers
)
wrong_step(
    "impl.fused.memory:estimate_fused", name="estimate_by_hand_from_few_layers", doc="A deep model by hand is estimated from few layers."
)(_from_few_layers)
wrong_step("impl.memory:_library_workspace", name="estimate_smaller_workspace", doc="A GPU that is not here gets the smaller workspace.")(
    lambda right, device: right(device) // 8
)


@wrong_step("impl.memory:estimate")
def estimate_of_any_device(estimate: Step, *given: Any, **options: Any) -> Any:
    """A device whose kernels are not known is estimated as a CPU."""
    known = torch.device(options["device"]).type in ("cpu", "cuda")
    return estimate(*given, **{**options, "device": options["device"] if known else "cpu"})


@wrong_step("impl.fused.memory:_Step.run")
def estimate_of_one_fused_micro_batch(run: Step, self: Any, allocations: Any, accumulation: int) -> None:
    """A step of the hand-written layers is estimated for one micro-batch, however many are accumulated."""
    del accumulation
    run(self, allocations, 1)


@wrong_step("impl.fused.memory:_Step._packed")
def estimate_rounds_up_every_sample(packed: Step, self: Any, part: Any) -> Any:
    """Each sample takes a whole number of grains, where packing rounds up their sum."""
    from blackswan.impl.fused.packing import GRAIN

    longest = self.longest
    self.longest = -(-longest // GRAIN) * GRAIN
    try:
        return packed(self, part)
    finally:
        self.longest = longest


@wrong_step("impl.fused.memory:_Step._packed")
def estimate_of_whole_grains(packed: Step, self: Any, part: Any = None) -> Any:
    """Tokens beyond the last whole grain are not counted."""
    from blackswan.impl.fused.packing import GRAIN

    found, tokens = packed(self, part), self.micro_batch * self.longest // GRAIN * GRAIN
    return replace(found, input_ids=found.input_ids[:tokens], positions=found.positions[:tokens])


@wrong_step("impl.fused.memory:_Step._packed")
def estimate_of_one_fused_sample(packed: Step, self: Any, part: Any = None) -> Any:
    """A micro-batch of the hand-written layers is counted with the tokens of one sample."""
    found = packed(self, part)
    tokens = -(-self.longest // 16) * 16
    return replace(found, input_ids=found.input_ids[:tokens], positions=found.positions[:tokens])


wrong_step(
    "impl.fused.memory:WORKSPACES", name="estimate_of_one_fused_stream", doc="Counts cuBLAS's workspace of the captured stream alone."
)(lambda _: 1)


def _by_capability(device: torch.device) -> int:
    return WORKSPACE_HOPPER if torch.cuda.get_device_capability(device)[0] >= 9 else WORKSPACE


wrong_steps(
    "impl.memory:_library_workspace",
    estimate_without_workspaces=("The workspaces of libraries are not counted.", lambda *_: 0),
    estimate_of_the_current_card=(
        "The card that is current is asked, whichever is meant.",
        lambda right, device: right(torch.device(device.type)),
    ),
    estimate_asks_an_absent_card=(
        "A card beyond those of this host is asked, which ends an estimate for another host.",
        lambda right, device: _by_capability(device) if device.type == "cuda" and torch.cuda.is_available() else right(device),
    ),
    estimate_without_numbered_cards=(
        "A device with a number has no workspaces.",
        lambda right, device: right(device) if device.index is None else 0,
    ),
)


@wrong_step("impl.commands.common:memory_of_a_step")
def memory_of_a_step_in_float32(right: Step, model: Any, config: Any, *given: Any) -> Any:
    """A run's memory is estimated in float32, whatever its dtype."""
    return right(model, replace(config, dtype="float32"), *given)


@wrong_step("impl.memory:_trainer")
def memory_of_one_label(make: Step, classifier: Any, batch: int, _: bool, allocations: Any) -> Any:
    """A step's memory is estimated for one label a sample."""
    return make(classifier, batch, False, allocations)


@wrong_step("impl.commands.common:memory_of_a_step")
def memory_of_a_step_of_any_length(right: Step, model: Any, config: Any, samples: int, _: int, device: Any) -> Any:
    """A run's memory is estimated for texts as long as they may be, and not as they are."""
    return right(model, config, samples, config.max_seq_len, device)


@wrong_step("impl.kernels.rope:_quarter_turns")
def estimate_counts_constants_once(make: Step, *given: Any) -> Any:
    """Constants without content are kept too, so that the first estimate of a process alone counts them."""
    return _kept.setdefault(given, make(*given))


@wrong_step("impl.dispatch:without_content")
@contextmanager
def estimate_by_kernels_whatever_is_chosen(without: Any, device: Any) -> Iterator[None]:
    """Triton's kernels are counted inside a block that chose torch's operations, too."""
    with dispatch.backend("auto"), without(device):
        yield


@wrong_step("impl.dispatch:without_content")
@contextmanager
def estimate_by_kernels_with_a_card(without: Any, device: Any) -> Iterator[None]:
    """Triton's kernels are counted where a card is here alone."""
    with nullcontext() if kernels.why_not() is None else dispatch.backend("torch"), without(device):
        yield


@wrong_step("impl.operations.attention:_require_room")
def room_of_the_host_for_every_device(require: Step, q: torch.Tensor) -> None:
    """The memory that a step needs elsewhere, or in an estimate, has to fit the host's."""
    require(q if q.is_cpu else SimpleNamespace(shape=q.shape, is_cpu=True))


@wrong_step("impl.dispatch:describe_backend")
def kernels_missed_where_torch_was_chosen(describe: Step, device: torch.device) -> Any:
    """Who chose torch is told why Triton's kernels are not used."""
    said, why = describe(device), kernels.why_not()
    return f"torch ({why})" if said == "torch" and device.type == "cuda" and why else said


@wrong_step("impl.dispatch:describe_backend")
def kernels_missed_on_the_cpu(describe: Step, device: torch.device) -> Any:
    """On a CPU, which is never given Triton's kernels, it is said why they are not used."""
    said, why = describe(device), kernels.why_not()
    return f"torch ({why})" if said == "torch" and device.type == "cpu" and why else said


@wrong_step("impl.fused.memory:_Step._take_masters")
def estimate_by_hand_without_moments(take: Any, self: Any) -> None:
    """The moments of hand-written steps are counted as the optimiser's work."""
    assign = self._allocations.assign

    def but_moments(tensor: Any, part: str, **named: Any) -> None:
        if part != "moments":
            assign(tensor, part, **named)

    with mock.patch.object(self._allocations, "assign", but_moments):
        take(self)


wrong_steps(
    "impl.commands.train:memory_of_a_step",
    memory_reserved_of_what_stays=(
        "A run reserves what stays after a step, and fails at the step's peak.",
        lambda right, *given: replace(right(*given), total=right(*given).resident),
    ),
    memory_reserved_for_the_longest_allowed=(
        "A run on short texts is refused for the memory that the longest ones allowed would take.",
        lambda right, model, config, samples, _, device: right(model, config, samples, config.max_seq_len, device),
    ),
    memory_reserved_for_whole_steps=(
        "A run on few samples is refused for the memory of a step that has all of its batches.",
        lambda right, model, config, _, *given: right(model, config, config.batch_size * config.accumulation_steps, *given),
    ),
)
wrong_steps(
    "impl.fused.memory:estimate_fused",
    estimate_by_hand_of_the_current_card=(
        "A step by hand is estimated with the workspaces of the current card, whichever it will run on.",
        lambda right, *given, **named: right(*given, **{**named, "device": "cuda"}),
    ),
)
wrong_steps(
    "impl.allocations:_CUDA_COMPOSED",
    estimate_of_softmax_without_its_product=(
        "The product that softmax's backward pass makes on a card is not counted, and long texts in float32 run out of memory.",
        lambda composed: {key: value for key, value in composed.items() if key != torch.ops.aten._softmax_backward_data.default},
    ),
)


@wrong_step("impl.memory:require_counts")
def estimate_of_less_than_nothing(require: Step, **counts: int) -> None:
    """Only a count of zero is refused, and a negative one is estimated or fails elsewhere."""
    require(**{name: abs(count) for name, count in counts.items()})


@wrong_step("impl.memory:classifier_of_shapes")
def estimate_of_quantising_all_beside(make: Step, config: Any, adaptation: Any, dtype: Any, allocations: Any) -> Any:
    """The estimate gives all memory of loading as the part that quantising takes on top."""
    made = make(config, adaptation, dtype, allocations)
    if adaptation.nf4:
        allocations.largest["quantisation"] = allocations.peak
    return made


@wrong_step("impl.fused.memory:_Step._join")
def estimate_by_hand_without_rooms(join: Step, self: Any) -> None:
    """The memory that the hand-written layers dequantise weights in is no part of its own."""
    with mock.patch("blackswan.impl.fused.memory.DEQUANTIZED", "optimiser_indices"):
        join(self)


def _of_few(empty_batch: Step, trainer: Any, shape: tuple[int, int]) -> Any:
    """The batch of so many micro-batches as are computed before nothing new is kept."""
    from blackswan.impl.trainer import HELD

    return empty_batch(trainer, (min(shape[0], (HELD + 1) * trainer.micro_batch), shape[1]))


wrong_steps(
    "impl.memory:empty_batch",
    estimate_of_few_micro_batches_at_once=(
        "Of a step's micro-batches, all on the device at once, those computed alone are counted.",
        _of_few,
    ),
)
wrong_steps(
    "impl.fused.memory:empty_batch",
    estimate_by_hand_of_few_micro_batches_at_once=("By hand those micro-batches alone are counted that are computed.", _of_few),
)
