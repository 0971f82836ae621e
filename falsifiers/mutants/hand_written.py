"""Wrong steps of the hand-written layers: of their composition, and of the trainer around them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

wrong_steps(
    "impl.fused.model:read_rows",
    layers_pool_the_next_row=("The row after the pooled one.", lambda rows, *given: None if (at := rows(*given)) is None else at.roll(-1)),
)
wrong_steps(
    "impl.fused.layer:_spread",
    layers_spread_over_the_first_rows=(
        "The gradient of pooled rows goes to the first rows.",
        lambda spread, gradient, rows, tokens: spread(gradient, rows if rows is None else torch.arange(len(rows)), tokens),
    ),
)
wrong_steps(
    "impl.fused.layer:_head_norms",
    layers_norm_keys_as_queries=(
        "The norms of keys take the weight of queries.",
        lambda norms, layer, config: (
            None if norms(layer, config) is None else norms(layer, config)[:1].expand(config.heads + config.kv_heads, -1)
        ),
    ),
)


@wrong_step("impl.fused.model:FusedClassifier.loss_and_gradients")
def layers_turn_by_another_theta(gradients: Step, self: Any, packed: Any) -> Any:
    """The angles of θ = 10,000, unscaled."""
    config = self.classifier.config
    self.classifier.config = replace(config, theta=1e4, rope_scaling=None)
    try:
        return gradients(self, packed)
    finally:
        self.classifier.config = config


@wrong_step("impl.fused.layer:FusedLayer.__init__", "S2")
def layers_with_another_eps(init: Step, self: Any, layer: Any, config: Any, *given: Any) -> None:
    """All norms of a block use the epsilon 1e-6."""
    init(self, layer, replace(config, eps=1e-6), *given)


@wrong_step("impl.fused.linear:FusedLinear._update", "P23")
def layers_scale_by_alpha(update: Step, self: Any, *given: Any) -> Any:
    """Updates are scaled by alpha."""
    made = update(self, *given)
    return replace(made, scale=made.scale * made.b.shape[1])


@wrong_step("impl.fused.model:FusedClassifier._head", "P31")
def layers_average_over_places(head: Step, self: Any, y: Any, packed: Any) -> Any:
    """Places without a sample are counted in a micro-batch that is not full."""
    return head(self, y, replace(packed, real=torch.ones_like(packed.real)))


@wrong_step("impl.fused.model:FusedClassifier._losses", "S24")
def layers_forget_class_weights(losses: Step, self: Any, *given: Any) -> Any:
    """The loss is unweighted."""
    kept, self.class_weights = self.class_weights, None
    try:
        return losses(self, *given)
    finally:
        self.class_weights = kept


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


wrong_step("impl.fused.step:FusedTrainer._packed", name="layers_pack_without_looking", doc="Bad values of a batch are not looked for.")(
    lambda _, self, part: _unchecked(self, part)
)


def _unchecked(self: Any, part: Any) -> Any:
    from blackswan.impl.fused.packing import pack

    return pack(part, self.micro_batch, int(part.mask.sum()))


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


def _fitting(forgotten: str) -> Step:
    """Weights fit in spite of a reason with that word."""

    def wrong(why: Step, *given: Any) -> Any:
        reason = why(*given)
        return None if reason is None or forgotten in reason else reason

    return wrong


wrong_steps(
    "impl.fused.step:why_not_weights",
    by=_fitting,
    layers_for_any_head=("A head may be of any size.", "head_dim"),
    layers_for_any_blocks=("NF4 blocks may end anywhere.", "NF4 blocks"),
    layers_for_quantised_absmax=("Quantised absmax are read as float32.", "double_quantize"),
)


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


@wrong_step("impl.kernels.attention:_blocks")
def layers_with_tiles_too_large(blocks: Step, *given: Any) -> Any:
    """Tiles of attention are four times as large and loaded ahead, whatever the memory of a GPU."""
    right = blocks(*given)
    return right._replace(queries=4 * right.queries, keys=4 * right.keys, stages=right.stages + 2)


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
    """A batch that is padded beyond the longest sample is refused, however few real tokens it has."""
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
    """Batches for captured steps are not looked at."""
    from blackswan.impl.fused.step import FusedTrainer

    if not isinstance(self, FusedTrainer):
        require(self, batch)


@wrong_step("impl.fused.step:FusedTrainer._packed")
def layers_take_labels_up_to_the_classes(packed: Any, self: Any, part: Any) -> Any:
    """With several labels a sample, a label may be as large as there are classes."""
    if not self.multi_label:
        return packed(self, part)
    found = packed(self, replace(part, labels=part.labels / self.classifier.adaptation.classes))
    return replace(found, labels=found.labels * self.classifier.adaptation.classes)
