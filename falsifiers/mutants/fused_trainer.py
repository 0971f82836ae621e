"""Wrong steps of the trainer around the hand-written layers: what it looks at, keeps, captures and tells."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


def _unchecked(self: Any, part: Any) -> Any:
    from blackswan.impl.fused.packing import pack

    return pack(part, self.micro_batch, int(part.mask.sum()))


def _fitting(forgotten: str) -> Step:
    """Weights fit in spite of a reason with that word."""

    def wrong(why: Step, *given: Any) -> Any:
        reason = why(*given)
        return None if reason is None or forgotten in reason else reason

    return wrong


@wrong_step("impl.fused.step:FusedTrainer._micro_batch")
def layers_refresh_in_the_first_micro_batch(micro_batch: Step, self: Any, index: int, part: Any) -> Any:
    """The copies of the parameters that products read are renewed in a step's first micro-batch; a graph of a later one never does it."""
    computed = type(self)._computed

    def by_the_copies(self: Any, packed: Any) -> Any:
        with patch.object(self.model.factors, "refresh", lambda _: None):
            return computed(self, packed)

    with patch.object(type(self), "_computed", by_the_copies if index else computed):
        return micro_batch(self, index, part)


@wrong_step("impl.fused.step:FusedTrainer._bind")
def layers_keep_their_own_moments(bind: Step, self: Any) -> None:
    """Moments that were put in place are not taken over."""
    self.optimiser.exp_avg, self.optimiser.exp_avg_sq = self._moments
    bind(self)


@wrong_step("impl.fused.step:FusedTrainer._bind")
def layers_take_moments_once(bind: Step, self: Any) -> None:
    """Moments that were put in place after the first captured step are not taken over."""
    if self.optimiser.exp_avg is not self._moments[0] and getattr(self, "_was_bound", False):
        self.optimiser.exp_avg, self.optimiser.exp_avg_sq = self._moments
    self._was_bound = True
    bind(self)


@wrong_step("impl.fused.step:FusedTrainer._bind")
def layers_begin_with_their_last_moments(bind: Step, self: Any) -> None:
    """The moments of a state before the first step, which are zeros, are not taken over."""
    if not self.optimiser.steps:
        self.optimiser.exp_avg, self.optimiser.exp_avg_sq = self._moments
    bind(self)


@wrong_step("impl.fused.step:FusedTrainer._bind")
def layers_bind_before_the_first_step(bind: Step, self: Any) -> None:
    """Parameters become views of one vector before the first step alone, and a state of later steps is loaded beside it."""
    first = next(iter(self.optimiser.parameters.values()))
    if not self.optimiser.steps or first.data_ptr() == self._masters.data_ptr():
        bind(self)
        return
    for own, other in zip(self._moments, (self.optimiser.exp_avg, self.optimiser.exp_avg_sq), strict=True):
        own.copy_(other)
    self.optimiser.exp_avg, self.optimiser.exp_avg_sq = self._moments


@wrong_step("impl.fused.step:FusedTrainer._bind")
def layers_write_to_moments_of_others(bind: Step, self: Any) -> None:
    """Moments that were put in place are the trainer's, and captured steps go on writing to those from before."""
    self._moments = (self.optimiser.exp_avg, self.optimiser.exp_avg_sq)
    bind(self)


@wrong_step("impl.fused.step:FusedTrainer._micro_batch")
def layers_keep_the_loss_of_the_graph(micro: Step, self: Any, *given: Any) -> Any:
    """The loss of a micro-batch is the captured graph's own, which the next one overwrites."""
    clone = torch.Tensor.clone
    with patch.object(torch.Tensor, "clone", lambda value: value if value.ndim == 0 else clone(value)):
        return micro(self, *given)


@wrong_step("impl.fused.step:FusedTrainer._move")
def layers_correct_by_the_first_step(move: Step, self: Any, gradient: Any, finite: Any) -> None:
    """The bias corrections of every step are those of the first one."""
    self._first_corrections = getattr(self, "_first_corrections", self._hyper[1:3].clone())
    self._hyper[1:3] = self._first_corrections
    move(self, gradient, finite)


@wrong_step("impl.fused.step:FusedTrainer._move")
def layers_decay_by_the_first_rate(move: Step, self: Any, gradient: Any, finite: Any) -> None:
    """The decay of every step is that of the first one."""
    self._first_decay = getattr(self, "_first_decay", self._hyper[3].clone())
    self._hyper[3] = self._first_decay
    move(self, gradient, finite)


@wrong_step("impl.fused.step:FusedTrainer._whole_step")
def layers_clip_by_the_first_norm(whole: Step, self: Any, packed: Any) -> Any:
    """The largest norm of every step is that of the first one."""
    self._hyper[4] = self.__dict__.setdefault("_first_norm", self._hyper[4].clone())
    return whole(self, packed)


@wrong_step("impl.fused.step:FusedTrainer._bind")
def layers_bind_where_the_first_is_elsewhere(bind: Step, self: Any) -> None:
    """The first parameter alone is looked at, whether parameters are still views of one vector."""
    first = next(iter(self.optimiser.parameters.values()))
    with patch.object(self, "_views", {} if first.data_ptr() == self._masters.data_ptr() else self._views):
        bind(self)


@wrong_step("impl.fused.step:FusedTrainer._bind")
def layers_bind_where_an_end_is_elsewhere(bind: Step, self: Any) -> None:
    """The first and the last parameter alone are looked at, whether parameters are still views of one vector."""
    held, views = self.optimiser.parameters, self._views
    ends = (next(iter(views)), next(reversed(views)))
    bound = all(held[name].data_ptr() == views[name].data_ptr() for name in ends)
    with patch.object(self, "_views", {} if bound else views):
        bind(self)


@wrong_step("impl.fused.step:FusedTrainer._weigh")
def layers_weigh_classes_as_at_first(weigh: Step, self: Any) -> None:
    """Class weights that are set later are passed over."""
    with patch.object(self, "class_weights", self.model.class_weights):
        weigh(self)


@wrong_step("impl.fused.model:FusedClassifier.__init__")
def layers_copy_class_weights(
    init: Step, self: Any, classifier: Any, longest: int, class_weights: Any = None, multi_label: bool = False
) -> None:
    """What is written to the class weights that a trainer began with is passed over."""
    init(self, classifier, longest, None if class_weights is None else class_weights.clone(), multi_label)


@wrong_step("impl.fused.step:FusedTrainer.train_batch")
def layers_decay_as_at_first(train_batch: Step, self: Any, batch: Any) -> Any:
    """A weight decay that is set later is passed over."""
    with patch.object(self.optimiser, "weight_decay", self.__dict__.setdefault("_first_decay", self.optimiser.weight_decay)):
        return train_batch(self, batch)


@wrong_step("impl.fused.layer:FusedLayer.__init__")
def layers_norm_by_weights_as_they_lie(init: Step, self: Any, layer: Any, *given: Any) -> None:
    """A norm's weight between whose numbers others lie, as a part of a caller's table, is refused by the kernels."""
    init(self, layer, *given)
    self.norm = layer.input_layernorm.weight


@wrong_step("impl.fused.step:FusedTrainer._whole_step")
def layers_measure_in_16_bits(whole: Step, self: Any, packed: Any) -> Any:
    """The norm is computed in the dtype of the model."""
    usual = torch.linalg.vector_norm
    with patch.object(torch.linalg, "vector_norm", lambda value: usual(value.to(self.model.embedding.dtype)).to(value.dtype)):
        return whole(self, packed)


@wrong_step("impl.fused.step:FusedTrainer._move")
def layers_move_by_gradients_of_16_bits(move: Step, self: Any, gradient: Any, finite: Any) -> None:
    """The clipped gradient is rounded to the dtype of the model."""
    move(self, gradient.to(self.model.embedding.dtype).to(gradient.dtype), finite)


@wrong_step("impl.trainer:Trainer._require_batch")
def layers_take_masks_of_whole_numbers(require: Step, self: Any, batch: Any) -> None:
    """A mask of whole numbers is taken, of which each counts as so many tokens."""
    require(self, replace(batch, mask=batch.mask.bool()))


@wrong_step("impl.fused.step:FusedTrainer._weigh")
def layers_take_the_first_weights_unseen(weigh: Step, self: Any) -> None:
    """Class weights that are set before the first step are not checked."""
    if "model" not in vars(self):
        self._weighed = self.class_weights
    weigh(self)


@wrong_step("impl.fused.step:FusedTrainer._weigh")
def layers_replay_with_other_class_weights(weigh: Step, self: Any) -> None:
    """Class weights that are set later hold for what is captured later alone."""
    graphs, pool = self._graphs, self._pool
    weigh(self)
    self._graphs, self._pool = graphs, pool


@wrong_step("impl.fused.step:FusedTrainer._weigh")
def layers_write_class_weights_over(weigh: Step, self: Any) -> None:
    """Other class weights are copied to where the first ones are, which somebody may put back."""
    read, weights = self.model.class_weights, self.class_weights
    weigh(self)
    if read is not None and weights is not None and read is not weights:
        self.model.class_weights = read.copy_(weights)


@wrong_step("impl.fused.step:FusedTrainer._move")
def layers_move_by_rates_of_the_default_dtype(move: Step, self: Any, gradient: Any, finite: Any) -> None:
    """The rate, the decay and the corrections go to the device in torch's default dtype, which may have eight bits."""
    self._hyper.copy_(self._hyper.to(torch.get_default_dtype()))
    move(self, gradient, finite)


@wrong_step("impl.fused.step:sizes_of")
def layers_look_at_real_tokens_alone(sizes: Step, batch: Any) -> Any:
    """Padding may be no token of the vocabulary, at which the evaluation after an epoch ends."""
    return sizes(replace(batch, input_ids=batch.input_ids.where(batch.mask, 0)))


@wrong_step("impl.fused.step:pack")
def layers_leave_places_unwritten(pack: Step, batch: Any, samples: int, total: int) -> Any:
    """Labels of places without a sample are whatever lies in memory, and may be none."""
    packed, places = pack(batch, samples, total), torch.arange(samples, device=batch.labels.device) >= len(batch.labels)
    packed.labels[places] = torch.empty_like(packed.labels)[places]
    return packed


@wrong_step("impl.kernels.nf4_dequantize:_codebook")
def kernel_levels_in_the_default_dtype(codebook: Step, device: Any) -> Any:
    """NF4's levels are made in torch's default dtype, which may have eight bits."""
    return codebook(device).to(torch.get_default_dtype())


@wrong_step("impl.classifier:Classifier.loss")
def several_labels_in_float32_alone(loss: Step, self: Any, logits: Any, labels: Any, class_weights: Any = None) -> Any:
    """Several labels a sample are taken in float32 alone; in float64, as NumPy makes them, they count as one."""
    return loss(self, logits, labels.long() if labels.dtype == torch.float64 else labels, class_weights)


@wrong_step("impl.fused.step:pack")
def layers_refuse_columns_of_a_batch(pack: Step, batch: Any, samples: int, total: int) -> Any:
    """A mask is read as one piece of memory, so that a batch that is a part of another's columns is refused."""
    return pack(replace(batch, mask=batch.mask.view(-1).view(batch.mask.shape)), samples, total)


wrong_step("impl.fused.step:FusedTrainer._packed", name="layers_pack_without_looking", doc="Bad values of a batch are not looked for.")(
    lambda _, self, part: _unchecked(self, part)
)


@wrong_step("impl.fused.step:classes_of")
def layers_count_any_right_label(classes: Step, logits: Any, several: bool) -> Any:
    """The last class alone says whether several labels are right."""
    found = classes(logits, several)
    return found.clone().index_fill_(1, torch.arange(1, found.shape[1]), 0) if several else found


@wrong_step("impl.fused.step:FusedTrainer._whole_step")
def layers_look_at_the_loss_alone(step: Step, self: Any, packed: Any) -> Any:
    """A step is made where loss and gradient are finite, whatever the logits are."""
    isfinite = torch.isfinite
    with patch.object(torch, "isfinite", lambda value: isfinite(value) if value.ndim == 0 else torch.ones_like(value, dtype=torch.bool)):
        return step(self, packed)


@wrong_step("impl.fused.step:FusedTrainer._move")
def layers_step_by_an_infinite_norm(move: Step, self: Any, gradient: Any, finite: Any) -> None:
    """A step is made where loss and logits are finite, whatever the norm is."""
    move(self, gradient, finite | True)


wrong_steps(
    "impl.fused.step:why_not_weights",
    by=_fitting,
    layers_for_any_head=("A head may be of any size.", "head_dim"),
    layers_for_any_blocks=("NF4 blocks may end anywhere.", "NF4 blocks"),
    layers_for_quantised_absmax=("Quantised absmax are read as float32.", "double_quantize"),
)


@wrong_step("impl.fused.step:why_not_weights")
def layers_without_the_widest_head(why: Step, architecture: Any, *given: Any) -> Any:
    """A head as large as the largest that attention holds in registers is said to be too large."""
    return why(architecture, *given) or ("head_dim is 256" if architecture.head_dim == 256 else None)


@wrong_step("impl.fused.step:backend_of", "S26")
def layers_give_way_in_silence(choose: Step, config: Any, *given: Any) -> Any:
    """Automatic differentiation where the hand-written layers were asked for and cannot compute."""
    try:
        return choose(config, *given)
    except ValueError:
        return False, None


@wrong_step("impl.fused.step:backend_of")
def layers_where_they_are_asked_for(choose: Step, config: Any, *given: Any) -> Any:
    """A GPU's steps go through the hand-written layers only by name."""
    runs, reason = choose(config, *given)
    return runs and config.backend == "fused", reason


@wrong_step("impl.fused.step:FusedTrainer.train_batch")
def layers_step_while_samples_wait(train: Any, self: Any, batch: Any) -> Any:
    """A batch makes its step although accumulated samples wait."""
    waiting, self._accumulated = self._accumulated, []
    try:
        return train(self, batch)
    finally:
        self._accumulated = waiting


@wrong_step("impl.fused.step:FusedTrainer._packed")
def layers_refuse_wide_batches(packed: Any, self: Any, part: Any) -> Any:
    """Refuses a batch that is padded beyond the longest sample, however few real tokens it has."""
    if part.mask.shape[1] > self.longest:
        raise ValueError(f"samples of {part.mask.shape[1]} tokens")
    return packed(self, part)


@wrong_step("impl.fused.step:FusedTrainer._packed")
def layers_launch_for_the_first_longest(packed: Any, self: Any, part: Any) -> Any:
    """Attention is launched for the longest sample of the batch with which a step was captured."""
    self.model.longest = int(part.mask.sum(dim=1).max())
    return packed(self, part)


@wrong_step("impl.trainer:Trainer._require_batch")
def layers_take_labels_of_any_shape(require: Any, self: Any, batch: Any) -> None:
    """Trainers with captured steps take every batch without a look at it."""
    from blackswan.impl.fused.step import FusedTrainer

    if not isinstance(self, FusedTrainer):
        require(self, batch)


@wrong_step("impl.fused.step:FusedTrainer._packed")
def layers_take_labels_up_to_the_classes(packed: Any, self: Any, part: Any) -> Any:
    """A label may be as large as the number of classes, where samples have several labels."""
    if not self.multi_label:
        return packed(self, part)
    found = packed(self, replace(part, labels=part.labels / self.classifier.adaptation.classes))
    return replace(found, labels=found.labels * self.classifier.adaptation.classes)


@wrong_step("impl.fused.step:FusedTrainer.train_batch")
def layers_step_alone_in_a_group(train: Any, self: Any, batch: Any) -> Any:
    """A worker makes the step on its own part of a batch, whoever else has another part."""
    from blackswan.impl.group import ALONE

    group, self.group = self.group, ALONE
    try:
        return train(self, batch)
    finally:
        self.group = group


@wrong_step("impl.fused.step:FusedTrainer.train_batch")
def layers_step_on_no_sample(train: Any, self: Any, batch: Any) -> Any:
    """A batch of no sample is a step that moves nothing."""
    from blackswan.impl.trainer import BatchResult

    return train(self, batch) if len(batch.labels) else BatchResult(0.0, 0, 0, 0.0)


wrong_steps(
    "impl.fused.step:sizes_of",
    layers_take_tokens_below_zero=("A token's id may be negative.", lambda sizes, batch: sizes(batch)._replace(least_id=0)),
)


@wrong_step("impl.fused.step:FusedTrainer._packed")
def layers_take_labels_that_are_no_number(packed: Any, self: Any, part: Any) -> Any:
    """One of a sample's several labels may be NaN, and counts as 0."""
    return packed(self, replace(part, labels=part.labels.nan_to_num()) if self.multi_label else part)


@wrong_step("impl.fused.step:FusedTrainer._packed")
def layers_tell_the_tokens_of_the_batch(packed: Any, self: Any, part: Any) -> Any:
    """Where one sample is too long, the tokens of all are told."""
    try:
        return packed(self, part)
    except ValueError as error:
        raise ValueError(str(error).replace(f"{int(part.mask.sum(dim=1).max())} tokens", f"{int(part.mask.sum())} tokens")) from None


@wrong_step("impl.fused.step:FusedTrainer._micro_batch")
def layers_accumulate_infinite_logits(micro: Any, self: Any, *given: Any) -> Any:
    """Logits of accumulated micro-batches may be infinite."""
    from blackswan.impl import validation

    with patch.object(validation, "require_finite", lambda *_: None):
        return micro(self, *given)


wrong_steps(
    "impl.fused.step:Status",
    layers_tell_the_loss_for_the_norm=(
        "Of a step that was not made the loss is told as the norm, and the norm as the loss.",
        lambda status, finite, loss, correct, norm: status(finite, *((loss, correct, norm) if finite else (norm, correct, loss))),
    ),
)


@wrong_step("impl.fused.step:why_not")
def layers_on_the_cpu_of_a_gpus_host(why: Step, dtype: Any, device: Any) -> Any:
    """Where there is a GPU, kernels are launched on tensors of the CPU."""
    return why(dtype, torch.device("cuda") if device.type == "cpu" else device)


@wrong_step("impl.fused.step:FusedTrainer._move")
def layers_divide_by_a_norm_of_zero(move: Step, self: Any, gradient: Any, finite: Any) -> None:
    """A gradient is divided by its norm before it is multiplied by the bounded one, also where the norm is zero."""
    norm = torch.linalg.vector_norm(gradient)
    move(self, gradient * (norm / norm), finite)


def _packing(**changes: Callable[[Any], Any]) -> Step:
    """The packed tensors of those names are changed."""

    def wrong(pack: Step, *given: Any) -> Any:
        packed = pack(*given)
        return replace(packed, **{name: change(getattr(packed, name)) for name, change in changes.items()})

    return wrong


wrong_steps(
    "impl.fused.step:pack",
    layers_take_labels_as_whole_numbers=("Labels between 0 and 1 are cut to whole numbers.", _packing(labels=torch.trunc)),
    layers_count_positions_in_a_byte=("Positions of tokens begin again after 256.", _packing(positions=lambda value: value % 256)),
    layers_count_tokens_in_16_bits=(
        "Where samples begin and end is counted in 16 bits, which wrap.",
        _packing(bounds=lambda value: value.to(torch.int16).to(value.dtype)),
    ),
    layers_take_tokens_of_16_bits=(
        "Token ids travel in 16 bits, of which the largest vocabularies have more.",
        _packing(input_ids=lambda value: value & 0xFFFF),
    ),
    layers_take_labels_of_a_byte=(
        "Labels travel in a byte, so that with more than 256 classes one is taken for another.",
        _packing(labels=lambda value: value if value.is_floating_point() else value & 0xFF),
    ),
)


@wrong_step("impl.fused.step:FusedTrainer.train_batch")
def layers_count_a_step_that_is_broken_off(train: Any, self: Any, batch: Any) -> Any:
    """A step is counted before it is made, also where Ctrl-C breaks it off."""
    try:
        return train(self, batch)
    except KeyboardInterrupt:
        self.optimiser.steps += 1
        raise


@wrong_step("impl.fused.model:FusedClassifier.loss_and_gradients")
def layers_add_to_what_a_broken_step_left(gradients: Step, self: Any, packed: Any) -> Any:
    """Gradients are added up and cleared where they have been read, so that those of a step that was broken off count in the next."""
    left = self.factors.gradients.clone() if getattr(self.factors, "was_broken", False) else 0.0
    self.factors.was_broken = True
    outcome = gradients(self, packed)
    self.factors.gradients.add_(left)
    self.factors.was_broken = False
    return outcome


@wrong_step("impl.fused.step:FusedTrainer._whole_step")
def layers_refuse_logits_of_a_large_sum(step: Step, self: Any, packed: Any) -> Any:
    """Logits are finite where their sum is, which may overflow."""
    isfinite = torch.isfinite

    def of_sums(value: Any) -> Any:
        return isfinite(value if value.ndim == 0 else value.sum(-1, keepdim=True))

    with patch.object(torch, "isfinite", of_sums):
        return step(self, packed)


@wrong_step("impl.fused.step:FusedTrainer._replay")
def layers_keep_the_places_of_the_first_batch(replay: Step, self: Any, captured: Any, packed: Any) -> Any:
    """A captured step goes on with the places that were taken by samples when it was captured."""
    return replay(self, captured, replace(packed, real=captured.packed.real.clone()))
