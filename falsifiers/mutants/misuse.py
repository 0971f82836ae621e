"""Arguments that parts of the library take and should refuse."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

wrong_steps(
    "impl.trainer:Trainer.__init__",
    by=lambda given: lambda init, self, classifier, **settings: init(self, classifier, **{**settings, **given(settings)}),
    trainer_takes_any_norm=(
        "A norm that bounds nothing is none.",
        lambda settings: {"max_norm": norm if (norm := settings.get("max_norm")) is not None and norm > 0 else None},
    ),
    trainer_drops_class_weights=(
        "Class weights that stand beside several labels are dropped.",
        lambda settings: {"class_weights": None} if settings.get("multi_label") else {},
    ),
)
wrong_step("impl.trainer:Trainer._require_batch", name="trainer_takes_any_batch", doc="Tokens, mask and labels are taken in any shape.")(
    lambda *_: None
)
wrong_step("impl.group:shard", name="share_of_any_rank", doc="A rank outside of the group has the share of a rank inside.")(
    lambda shard, indices, rank, size: shard(indices, rank % size, size)
)
wrong_step("impl.samples:effective_batches", name="batches_of_nothing", doc="Batches of less than one sample have one.")(
    lambda batches, order, size: batches(order, max(size, 1))
)


wrong_steps(
    "impl.tokens:Tokens.pad", texts_of_no_batch=("No text is a batch of padding.", lambda pad, self, rows: pad(self, rows or [[0]]))
)


wrong_step("impl.pipeline:require_texts", name="one_text_is_many", doc="One text passes for several, of which each is a character.")(
    lambda *_: None
)


wrong_steps(
    "impl.config:DecoderConfig.__post_init__",
    architectures_of_infinite_theta=(
        "The base of the rotary frequencies may be infinite.",
        lambda right, self: None if self.theta == math.inf else right(self),
    ),
    architectures_of_any_heads=(
        "Heads may be shared by any number of keys.",
        lambda right, self: None if self.heads % max(self.kv_heads, 1) else right(self),
    ),
    architectures_of_more_heads=(
        "An architecture with more heads than heads of keys, of which there are several, is taken unchecked.",
        lambda right, self: None if self.heads > self.kv_heads > 1 else right(self),
    ),
)


@wrong_step("impl.tokens:Tokens.__init__")
def tokens_of_any_length(init: Any, self: Any, max_seq_len: int, padding_side: str) -> None:
    """A length below one is one, and an unknown padding side the right one."""
    init(self, max(max_seq_len, 1), padding_side if padding_side in ("left", "right") else "right")


wrong_step("impl.trainer:require_class_weights", name="trainer_takes_any_class_weights", doc="Class weights are looked at in a loss.")(
    lambda *_: None
)
wrong_step("impl.trainer:Trainer._require_step_left", name="steps_after_the_last", doc="Passes go on after the last step.")(lambda *_: None)


@wrong_step("impl.trainer:Trainer.__init__")
def no_steps_are_endless(init: Any, self: Any, classifier: Any, *, total_steps: int | None, **settings: Any) -> None:
    """A schedule of no steps has no end."""
    init(self, classifier, total_steps=total_steps or None, **settings)


@wrong_step("impl.dispatch:replaced")
def replacements_of_no_name_passed_over(replaced: Any, functions: Any) -> Any:
    """A name that is misspelt beside a right one replaces nothing: what a user puts in its place is never computed."""
    from blackswan.impl.operations import OPERATIONS

    return replaced({name: function for name, function in functions.items() if name in OPERATIONS} or functions)


@wrong_step("impl.dispatch:backend")
@contextmanager
def kernels_chosen_where_none_runs(backend: Any, choice: str) -> Iterator[None]:
    """Triton is chosen where it cannot run, and the first step ends with an error of its own."""
    with ExitStack() as stack:
        with mock.patch("blackswan.impl.kernels.why_not", return_value=None):
            stack.enter_context(backend(choice))
        yield


@wrong_step("impl.optimiser:AdamW.flat_gradient")
def head_without_a_gradient(flat: Any, optimiser: Any) -> Any:
    """A head that the loss does not depend on is stepped with a gradient of zero: its user never learns that it stays as it was."""
    import torch

    for name, parameter in optimiser.parameters.items():
        if name.startswith("score.") and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return flat(optimiser)


@wrong_step("impl.classifier:Classifier.loss")
def loss_drops_class_weights(loss: Any, self: Any, logits: Any, labels: Any, class_weights: Any = None) -> Any:
    """Class weights that stand beside several labels are dropped by the loss."""
    return loss(self, logits, labels, None if labels.is_floating_point() else class_weights)


@wrong_step("impl.classifier:require_tensors")
def factors_of_other_targets(require: Any, expected: Any, tensors: Any, source: str) -> None:
    """Trained tensors are taken for whatever targets they are."""
    if source == "decoder":
        require(expected, tensors, source)


@wrong_step("impl.operations.losses:require_class_weights")
def class_weights_looked_at_once(require: Any, weights: Any, classes: int) -> None:
    """Class weights that were accepted once are not looked at again, whatever is written to them."""
    if getattr(weights, "looked_at", None) != classes:
        require(weights, classes)
        weights.looked_at = classes


@wrong_step("impl.classifier:Classifier.trainable_parameters")
def trained_by_their_flag(_: Any, self: Any) -> Any:
    """What requires a gradient is trained and saved, and nothing else."""
    return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


@wrong_step("impl.classifier:Classifier.forward")
def masks_that_are_added_are_numbers(forward: Any, self: Any, input_ids: Any, mask: Any) -> Any:
    """A mask may be of any numbers, and those that are not zero stand for real tokens."""
    return forward(self, input_ids, mask.bool())


wrong_steps(
    "impl.trainer:require_not_negative",
    trainer_takes_any_rate=("A trainer begins at whatever rate it is given.", lambda *_: None),
)
wrong_steps(
    "impl.optimiser:require_not_negative",
    trainer_takes_any_decay=("A trainer's parameters grow by a weight decay below 0.", lambda *_: None),
)
wrong_steps(
    "impl.pretrain:require_not_negative",
    pretrain_takes_any_rate=("Pre-training begins at whatever rate it is given.", lambda *_: None),
)
wrong_steps(
    "impl.decoder_optimiser:require_not_negative",
    pretrain_takes_any_decay=("A decoder's weights grow by a weight decay below 0.", lambda *_: None),
)
wrong_step(
    "impl.validation:counted_from",
    name="errors_count_from_their_micro_batch",
    doc="An error names a sample by its place in the micro-batch that is computed with it.",
)(lambda *_: nullcontext())
