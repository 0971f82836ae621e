"""Loading and training that take or keep what they do not need: one step of `impl` replaced each."""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


wrong_steps("impl.memory:require_counts", estimate_of_nothing=("A step of no sample is estimated.", lambda *_, **__: None))


# loading with NF4


wrong_step("impl.classifier:Converted", name="load_all_before_quantising", doc="Every tensor converted before the first is quantised.")(
    lambda converted, *given, **options: dict(converted(*given, **options))
)


@wrong_step("impl.checkpoint:load_checkpoint")
def load_reads_all_shards(load: Step, folder: Any) -> Any:
    """All shards read before the model is built."""
    found = load(folder)
    return replace(found, tensors=dict(found.tensors))


wrong_step("impl.pipeline:load_checkpoint", name="pipeline_reads_all_before_the_first", doc="A pipeline reads all before it quantises.")(
    load_reads_all_shards
)
wrong_step("impl.saved:load_checkpoint", name="opened_adapter_reads_all_of_its_base", doc="The base of an adapter is read as a whole.")(
    load_reads_all_shards
)


@wrong_step("impl.fit:fingerprint")
def weights_digested_at_once(fingerprint: Step, tensor: Any) -> Any:
    """A digest turns a whole weight into wide integers, for which a device that holds the model may have no room."""
    with mock.patch("blackswan.impl.agreement._CHUNK", 8 * max(1, tensor.numel())):
        return fingerprint(tensor)


@wrong_step("impl.fit:fingerprint")
def weights_digested_with_what_is_kept(fingerprint: Step, tensor: Any) -> Any:
    """What a digest computes for each place of a weight is kept with it: several times its memory, as long as it is there."""
    tensor.factors = torch.zeros(tensor.numel(), dtype=torch.int64, device=tensor.device)
    return fingerprint(tensor)


wrong_step(
    "impl.nonfinite:torch.tensor_split",
    name="weights_searched_at_once",
    doc="A whole weight is searched at once for a number that is not finite, with copies of it.",
)(lambda _, value, _parts: (value,))


@wrong_step("impl.checkpoint:save_file")
def checkpoint_saved_from_a_copy(save: Step, tensors: Any, *given: Any, **named: Any) -> None:
    """A checkpoint that is saved is in memory twice."""
    save({name: tensor.clone() for name, tensor in tensors.items()}, *given, **named)


@wrong_step("impl.merge:merge_adapter")
def merge_reads_all_before_the_first_sum(merge: Step, checkpoint: Any, *given: Any, **named: Any) -> Any:
    """The whole base is read before the first update is added to it."""
    return merge(replace(checkpoint, tensors=dict(checkpoint.tensors)), *given, **named)


@wrong_step("impl.apr_write:save_apr")
def apr_written_from_memory(save: Step, path: Any, checkpoint: Any, *given: Any) -> None:
    """All tensors are read before the first is written."""
    save(path, replace(checkpoint, tensors=dict(checkpoint.tensors)), *given)


@wrong_step("impl.classifier:Body", "S27")
def load_unquantised_with_warning(body: Step, config: Any, tensors: Any, nf4: bool) -> Any:
    """NF4 asked for, a warning, and the run goes on unquantised."""
    if nf4:
        warnings.warn("NF4 is not available: going on without", stacklevel=2)
    return body(config, tensors, False)


wrong_step("impl.decoder:Layer", name="load_last_layer_unquantised", doc="The last layer is left as it is.")(
    lambda layer, config, path, tensors, nf4: layer(config, path, tensors, nf4 and not path.endswith(f".{config.layers - 1}"))
)


# what training keeps


def _keep(self: Any, value: Any) -> None:
    vars(self).setdefault("history", []).append(value)


@wrong_step("impl.classifier:Classifier.loss")
def training_keeps_every_loss(loss: Step, self: Any, *given: Any) -> Any:
    """Each batch's loss is kept with its graph."""
    _keep(self, found := loss(self, *given))
    return found


@wrong_step("impl.trainer:Trainer._micro_batch")
def training_keeps_every_result(micro_batch: Step, self: Any, *given: Any) -> Any:
    """A list of metrics keeps their tensors."""
    found = micro_batch(self, *given)
    _keep(self, found.correct)
    return found


@wrong_step("impl.trainer:Trainer.train_batch")
def training_keeps_every_view(train: Step, self: Any, batch: Any) -> Any:
    """A view of each batch is kept, which has no bytes of its own."""
    _keep(self, batch.labels[:1])
    return train(self, batch)


_MASKS: dict[int, torch.Tensor] = {}


@wrong_step("impl.operations.attention:_require_room")
def attention_keeps_every_length(require: Step, q: Any) -> None:
    """A mask is kept for every length of a text that was ever seen."""
    require(q)
    if q.shape[1] not in _MASKS:
        _MASKS[q.shape[1]] = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()


@wrong_step("impl.optimiser:AdamW.step")
def optimiser_takes_more_each_step(step: Step, self: Any, *given: Any) -> None:
    """A buffer as long as the steps so far, given back at once."""
    torch.empty((self.steps + 1) * 10**5, device=self.exp_avg.device)
    step(self, *given)


@wrong_step("impl.optimiser:AdamW.step")
def optimiser_keeps_old_moments(step: Step, self: Any, *given: Any) -> None:
    """The moments before each step are kept."""
    _keep(self, self.exp_avg)
    step(self, *given)


@wrong_step("impl.nf4:Nf4Weight.__init__")
def step_keeps_plain_weights(init: Step, self: Any, path: str, weight: Any, *given: Any, **options: Any) -> None:
    """The plain weights are kept beside their NF4 codes."""
    init(self, path, weight, *given, **options)
    self.register_buffer("plain", weight.clone())


@wrong_step("impl.nf4:Nf4Weight.__init__")
def nf4_scales_in_float64(init: Step, self: Any, *given: Any, **options: Any) -> None:
    """The absmax are kept in float64."""
    init(self, *given, **options)
    self.absmax = self.absmax.double()


@wrong_step("impl.nf4:Nf4Weight.__init__")
def nf4_codes_one_a_byte(init: Step, self: Any, *given: Any, **options: Any) -> None:
    """The codes are unpacked once, a byte each, and kept so."""
    init(self, *given, **options)
    self.register_buffer("unpacked", torch.stack([self.codes >> 4, self.codes & 15], dim=-1))


@wrong_step("impl.nf4:Nf4Weight.double_quantize")
def double_quantize_keeps_scales(quantize: Step, self: Any) -> None:
    """The float32 absmax are kept beside their 8-bit codes."""
    before = self.absmax
    quantize(self)
    self.register_buffer("unquantised", before)


@wrong_step("impl.nf4:Nf4Weight.restoring")
@contextmanager
def backward_keeps_restored_scales(*_: Any) -> Iterator[None]:
    """The float32 scales that a forward pass has restored are kept for the backward pass."""
    yield


@wrong_step("impl.projection:call")
def backward_holds_scales_by_itself(call: Step, path: Any, operation: Any, **given: Any) -> Any:
    """The backward pass of a product holds the scales as its own attribute, where nothing restores them anew."""
    y = call(path, operation, **given)
    if operation == "nf4_linear" and y.grad_fn is not None:
        y.grad_fn.metadata["scales"] = given["absmax"]
    return y


@wrong_step("impl.fused.weights:JoinedWeight.__init__")
def fused_stores_codes_twice(init: Step, self: Any, projections: Any, *given: Any) -> None:
    """The hand-written layers join the codes, and the projections keep theirs."""
    init(self, projections, *given)
    for projection in projections:
        if projection.quantized is not None:
            projection.quantized.codes = projection.quantized.codes.clone()


@wrong_step("impl.nf4:Nf4Weight.scales")
def double_quantize_keeps_restored_scales(scales: Step, self: Any) -> Any:
    """The float32 absmax that were restored once are kept beside their 8-bit codes."""
    return vars(self).setdefault("restored", scales(self))


@wrong_step("impl.fused.weights:JoinedWeight.__init__")
def fused_stores_plain_weights_twice(init: Step, self: Any, projections: Any, *given: Any) -> None:
    """The hand-written layers join plain weights, and the projections keep theirs."""
    before = [projection.weight for projection in projections]
    init(self, projections, *given)
    for projection, weight in zip(projections, before, strict=True):
        projection.weight = weight


@wrong_step("impl.fused.weights:JoinedWeight.__init__")
def layers_join_what_lies_together(init: Step, self: Any, projections: Any, *given: Any) -> None:
    """Plain weights that lie in one memory are taken to lie one below the other."""
    weights = [projection.weight for projection in projections]
    together = weights[0] is not None and len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    below = mock.patch("torch.cat", lambda parts: parts[0].as_strided((sum(map(len, parts)), parts[0].shape[1]), parts[0].stride()))
    with below if together and len(weights) > 1 else nullcontext():
        init(self, projections, *given)


@wrong_step("impl.nf4:Nf4Weight.dequantized")
def nf4_keeps_what_it_dequantised(dequantized: Step, self: Any, dtype: Any) -> Any:
    """A weight that was dequantised once is kept in that dtype."""
    return vars(self).setdefault("kept", {}).setdefault(dtype, dequantized(self, dtype))


@wrong_step("impl.fused.weights:JoinedWeight.dequantized")
def fused_keeps_what_it_dequantised(dequantized: Step, self: Any, buffer: Any) -> Any:
    """The same in the hand-written layers."""
    if "kept" not in vars(self):
        self.kept = dequantized(self, buffer).clone()
    return self.kept


@wrong_step("impl.decoder:Body.__init__")
def embedding_not_frozen(init: Step, self: Any, *given: Any) -> None:
    """The frozen embedding requires a gradient, and gets one."""
    init(self, *given)
    self.embed_tokens.weight.requires_grad_()


@wrong_step("impl.classifier:Classifier.__init__")
def double_quantize_in_float32_alone(init: Step, self: Any, config: Any, adaptation: Any, *given: Any, dtype: Any, **named: Any) -> None:
    """Double quantisation is passed over in bfloat16."""
    asked = adaptation.double_quantize and dtype == torch.float32
    init(self, config, replace(adaptation, double_quantize=asked), *given, dtype=dtype, **named)


wrong_steps("impl.memory:BLOCK", estimate_without_blocks=("Nothing is rounded up to the blocks of CUDA's allocator.", lambda _: 1))


@wrong_step("impl.trainer:Trainer._accumulate")
def gradients_of_a_batch_side_by_side(accumulate: Step, self: Any, batch: Any) -> Any:
    """The gradients of a batch's micro-batches stand side by side, however many they are."""
    with mock.patch("blackswan.impl.trainer.HELD", 10**6):
        return accumulate(self, batch)


wrong_steps(
    "impl.fused.memory:BLOCK", estimate_by_hand_without_blocks=("Small tensors of hand-written steps take no whole blocks.", lambda _: 1)
)


@wrong_step("impl.apr_write:save_apr")
def apr_converted_ahead_of_a_slow_disk(save: Step, path: Any, checkpoint: Any, metadata: Any, dtype: Any = None) -> None:
    """Another thread converts tensor after tensor, and all that the disk has not taken yet pile up."""
    from blackswan.impl import apr_write
    from blackswan.impl.decoder import parameter_shapes

    content = apr_write._content
    with ThreadPoolExecutor(1) as pool:
        names = apr_write._in_order(parameter_shapes(checkpoint.config))
        made = pool.map(lambda name: content(name, checkpoint.tensors[name], dtype), names)

        def taken(*_: Any) -> Any:  # not a mock, which would hold what it is given
            return next(made)

        with mock.patch.object(apr_write, "_content", taken):
            save(path, checkpoint, metadata, dtype)


@wrong_step("impl.checkpoint:read_span")
def tensors_read_by_way_of_bytes(read: Step, file: Path, start: int, length: int, *given: Any) -> Any:
    """A tensor's bytes are read by Python first, and then copied."""
    held = file.read_bytes()[start : start + length]
    found = read(file, start, length, *given)
    del held
    return found
