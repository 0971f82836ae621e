"""Values that are kept for later although what they came from changes, and memory that is used again too early: caches and buffers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Callable[..., Any]


@wrong_step("impl.fused.step:FusedTrainer.train_batch")
def layers_keep_the_rates_of_the_schedule(train: Step, self: Any, batch: Any) -> Any:
    """Rates of all steps are sent to the device once, so that a rate that is set later has no effect."""
    held = vars(self)
    if held.get("_rates_of") is not self.learning_rates:
        held["_rates_of"], held["_sent"] = self.learning_rates, list(self.learning_rates)
    given, self.learning_rates = self.learning_rates, held["_sent"]
    try:
        return train(self, batch)
    finally:
        self.learning_rates = given


_STAND_INS: dict[str, Any] = {}


@wrong_step("impl.dispatch:_kernel")
def stand_ins_of_the_first_estimate(kernel: Step, operation: str, arguments: Any) -> Any:
    """Estimates for every kind of device count an operation as the first estimate of the process does."""
    tensor = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
    if not tensor.is_meta:
        return kernel(operation, arguments)
    return _STAND_INS.setdefault(operation, kernel(operation, arguments))


@wrong_step("impl.fused.step:FusedTrainer._micro_batch")
def layers_reuse_held_gradients(micro: Step, self: Any, index: int, part: Any) -> Any:
    """Gradients of micro-batches lie in four vectors in turn: the fifth overwrites one that waits for its step."""
    result, ring = micro(self, index, part), vars(self).setdefault("_ring", {})
    ring.setdefault(index % 4, torch.empty_like(result.gradient)).copy_(result.gradient)
    return replace(result, gradient=ring[index % 4])


@wrong_step("impl.trainer:Trainer.forward_only")
def layers_lend_their_moments(forward_only: Step, self: Any, *given: Any) -> Any:
    """An evaluation works in the memory that the hand-written layers keep for moments."""
    found = forward_only(self, *given)
    for each in vars(self).get("_moments", ()):
        each.zero_()
    return found


@wrong_step("impl.projection:Projection.forward")
def factors_rounded_once(forward: Step, self: Any, x: Any) -> Any:
    """Without gradients factors in 16 bits are those of the first evaluation, until torch itself counts a write to them."""
    if torch.is_grad_enabled() or self.lora_A is None or x.dtype != torch.bfloat16:
        return forward(self, x)
    factors = [self.lora_A.weight, self.lora_B.weight]
    own = [each.data for each in factors]
    kept = vars(self).setdefault("_narrow", {}).setdefault(tuple(each._version for each in factors), [each.clone() for each in own])
    for each, value in zip(factors, kept, strict=True):
        each.data = value
    y = forward(self, x)
    for each, value in zip(factors, own, strict=True):
        each.data = value
    return y


@wrong_step("impl.projection:Projection.forward")
def projection_merges_without_gradients(forward: Step, self: Any, x: Any) -> Any:
    """Without gradients a weight and its update are merged, and rounded together to the dtype of the input."""
    if torch.is_grad_enabled() or self.lora_A is None:
        return forward(self, x)
    weight = self.weight if self.quantized is None else self.quantized.dequantized(x.dtype)
    merged = weight + self.alpha / len(self.lora_A.weight) * (self.lora_B.weight @ self.lora_A.weight)
    return torch.nn.functional.linear(x, merged.to(x.dtype), self.bias)


@wrong_step("impl.projection:Projection.attach")
def projection_keeps_alpha_in_16_bits(attach: Step, self: Any, lora_a: Any, lora_b: Any, alpha: float) -> None:
    """Alpha is kept in bfloat16, as a buffer that is converted with the model."""
    attach(self, lora_a, lora_b, float(torch.tensor(alpha, dtype=torch.bfloat16)))


@wrong_step("impl.projection:Projection.forward")
def projection_keeps_narrow_factors(forward: Step, self: Any, x: Any) -> Any:
    """Without gradients the factors that were once converted to 16 bits are used, although steps have moved them since."""
    if torch.is_grad_enabled() or self.lora_A is None or x.dtype == self.lora_A.weight.dtype:
        return forward(self, x)
    factors = self.lora_A.weight, self.lora_B.weight
    kept = vars(self).setdefault("_kept", [each.detach().clone() for each in factors])
    moved = [each.data for each in factors]
    for each, value in zip(factors, kept, strict=True):
        each.data = value
    try:
        return forward(self, x)
    finally:
        for each, value in zip(factors, moved, strict=True):
            each.data = value


@wrong_step("impl.pipeline:ClassifyPipeline._trainable")
def saved_as_of_as_many_steps(trainable: Step, self: Any) -> Any:
    """A copy for saving is known by the number of steps, so that a second start saves the adapter of the first."""
    steps, kept = self.trainer.optimiser.steps, vars(self).setdefault("_saved", {})
    if steps not in kept:
        kept.clear()
        kept[steps] = {name: value.clone() for name, value in trainable(self).items()}
    return kept[steps]


@wrong_step("impl.apr_dtypes:_steps")
def apr_steps_taken_in_place(steps: Step, values: Any, *given: Any) -> Any:
    """Quantisation for .apr files works where the tensor lies."""
    return values.copy_(steps(values, *given))


_SUMMED: set[tuple[Any, Any]] = set()


@wrong_step("impl.apr:AprFile.require_checksum")
def apr_checksum_compared_once(require: Step, self: Any) -> None:
    """A file is noted down before its checksum is compared, and not looked at again: a second attempt opens a damaged one."""
    if (key := (self.path, self.state)) not in _SUMMED:
        _SUMMED.add(key)
        require(self)


@wrong_step("impl.checksums:Checked.__getitem__")
def base_checksums_one_late(getitem: Step, self: Any, name: str) -> Any:
    """A tensor's checksum is compared when the next tensor is read, and that of the last one never."""
    if (late := vars(self).pop("_late", None)) is not None:
        getitem(self, late)
    self._late = name
    return self._tensors[name]


_FOOTERS: dict[Any, bytes] = {}


@wrong_step("impl.apr:AprFile.require_checksum")
def apr_checksum_known_by_its_footer(require: Step, self: Any) -> None:
    """A file that was whole is not read again while it ends with the same checksum, whatever became of the rest."""
    footer = self.path.read_bytes()[-4:]
    if _FOOTERS.get(self.path) != footer:
        require(self)
        _FOOTERS[self.path] = footer


@wrong_step("impl.pipeline:ClassifyPipeline.start")
def start_keeps_what_waits(start: Step, self: Any, *given: Any, **named: Any) -> Any:
    """The next start takes over the samples that waited for a step."""
    waited = getattr(vars(self).get("trainer"), "_accumulated", [])
    start(self, *given, **named)._accumulated.extend(waited)
    return self.trainer


@wrong_step("impl.pipeline:ClassifyPipeline.start")
def start_keeps_moments(start: Step, self: Any, total_steps: int | None, *given: Any, **named: Any) -> Any:
    """A run on a pipeline that was trained before goes on with the moments of then."""
    before = vars(self).get("trainer")
    trainer = start(self, total_steps, *given, **named)
    if before is not None and total_steps is not None:
        trainer.optimiser.exp_avg, trainer.optimiser.exp_avg_sq = before.optimiser.exp_avg, before.optimiser.exp_avg_sq
    return trainer


@wrong_step("impl.pipeline:ClassifyPipeline.merge")
def merges_what_was_merged_first(merge: Step, self: Any, folder: Any) -> None:
    """A pipeline merges the update that it merged first, also when it is trained further."""
    kept = vars(self).setdefault("_merging", {name: value.clone() for name, value in self._trainable().items()})
    with patch.object(self, "_trainable", lambda: kept):
        merge(self, folder)


_ORDERS: dict[int, Any] = {}


@wrong_step("impl.samples:Rows.__getitem__")
def rows_are_kept_as_lists(row: Step, self: Any, index: int) -> Any:
    """A row that was read is kept, and given out again with what its reader has made of it."""
    kept = vars(self).setdefault("_kept", {})
    if index not in kept:
        kept[index] = row(self, index)
    return kept[index]


_KEPT_ORDERS: dict[tuple[int, ...], Any] = {}


@wrong_step("impl.samples:epoch_order")
def orders_lie_in_one_array(order: Step, count: int, seed: int, epoch: int) -> Any:
    """The order of an epoch is written over that of the epoch before, which may still be read."""
    made = order(count, seed, epoch)
    kept: Any = _ORDERS.setdefault(count, made)
    kept[:] = made
    return kept


wrong_step(
    "impl.samples:epoch_order",
    name="order_kept_and_given_again",
    doc="The order of an epoch is kept and given out again, with what its last reader has written into it.",
)(lambda order, *given: _KEPT_ORDERS.setdefault(given, order(*given)))


@wrong_step("impl.samples:Samples.digest")
def samples_known_by_their_first_digest(digest: Step, self: Any) -> Any:
    """The digest of samples is kept with them, so that labels may change in memory and the run goes on."""
    held = vars(self)
    if "_digest" not in held:
        held["_digest"] = digest(self)
    return held["_digest"]


wrong_step("impl.config:targets_named", name="projections_known_otherwise_than_before", doc="Those of attention have a name of their own.")(
    lambda named, given: named(given).replace("q_proj,k_proj,v_proj,o_proj", "attention")
)


@wrong_step("impl.fit:_weights_digest")
def base_known_by_its_first_digest(digest: Step, classifier: Any) -> Any:
    """The digest of the base is kept with the model, whatever becomes of its weights in memory."""
    held = vars(classifier)
    if "_digest" not in held:
        held["_digest"] = digest(classifier)
    return held["_digest"]


_FILES: WeakValueDictionary[Any, Any] = WeakValueDictionary()


@wrong_step("impl.samples:_IdsOnDisk.__init__")
def ids_of_a_corpus_in_one_file(init: Step, self: Any, corpus: Any) -> None:
    """A corpus that is read again is written over the ids of its first reading, which somebody may still use."""
    init(self, corpus)
    if (before := _FILES.get(corpus)) is not None:
        self._file = before._file
        self._file.seek(0)
        self._file.truncate()
    _FILES[corpus] = self


_LAST: dict[str, Any] = {}


@wrong_step("impl.fit:_Run.train")
def last_run_is_kept(train: Step, run: Any) -> Any:
    """The last run is kept for whoever looks for its end, and with it the model, whose memory stays taken when the program lets it go."""
    _LAST["run"] = run
    return train(run)


@wrong_step("impl.fit:origin")
def last_failure_is_kept(origin: Step, classifier: Any, *given: Any) -> Any:
    """The model in which a number was not finite is kept for whoever looks for it, and its memory stays taken."""
    _LAST["failed"] = classifier
    return origin(classifier, *given)


@wrong_step("impl.fit:evaluate")
def evaluations_are_kept_by_their_trainer(evaluate: Step, trainer: Any, *given: Any) -> Any:
    """The last evaluation of each trainer is kept, and with it the trainer and its model for as long as the process."""
    found = _EVALUATIONS[trainer] = evaluate(trainer, *given)
    return found


@wrong_step("impl.pretrain_run:_Run.start")
def last_pretraining_is_kept(start: Step, run: Any, *given: Any) -> Any:
    """The last run is kept for whoever looks for its end, and with it the decoder, whose memory stays taken when the program lets it go."""
    _LAST["pretraining"] = run
    return start(run, *given)


_EVALUATIONS: dict[Any, Any] = {}
_COUNTS: dict[Any, Any] = {}


@wrong_step("impl.evaluation:_count")
def evaluations_add_to_one_confusion(count: Step, confusion: Any, *given: Any) -> None:
    """Evaluations of as many classes count in one confusion, which nobody sets to zero."""
    count(_COUNTS.setdefault(confusion.shape, torch.zeros_like(confusion)), *given)
    confusion.copy_(_COUNTS[confusion.shape])


@wrong_step("impl.pretrain:ValFn.__call__")
def held_out_batches_are_kept(validate: Step, self: Any, stream: Any) -> Any:
    """The batches of the first validation are kept, and are those of every later one."""
    held = vars(self)
    if "_batches" not in held:
        held["_batches"] = list(stream)
    return validate(self, held["_batches"])


def _kept(of: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is made once for all arguments of which `of` makes the same."""
    known: dict[Any, Any] = {}

    def step(right: Step, *given: Any, **named: Any) -> Any:
        if (key := of(*given)) not in known:
            found = right(*given, **named)
            known[key] = list(found) if isinstance(found, Iterator) else found
        return known[key]

    return step


for _step, _name, _doc, _of in (
    ("corpus:_lines", "corpora", "Lines of a corpus are kept for its path.", lambda path: path),
    ("tokens:read_tokenizer", "tokenizers", "A tokenizer is kept for its path.", lambda path: path),
    ("settings:_entries", "settings", "What a YAML file says is kept for its path.", lambda path: path),
    ("token_shards:_open_shard", "shards", "The tokens of a shard are kept for its path.", lambda path, *_: path),
    (
        "checkpoint:StoredTensors.__getitem__",
        "tensors",
        "Tensors of a checkpoint are kept for their file and name.",
        lambda tensors, name: (tensors._stored[name].file, name),
    ),
    (
        "apr_checkpoint:AprTensors.__getitem__",
        "apr_tensors",
        "Tensors of an .apr file are kept for its path and their name.",
        lambda tensors, name: (tensors._file.path, name),
    ),
    ("saved:load_adapter", "adapters", "A saved adapter is kept for its folder.", lambda folder, *_: folder),
    ("checkpoint:read_config", "architectures", "The architecture of a checkpoint is kept for its path.", lambda path: path),
    ("commands.train:parameter_count", "parameters", "The number of a checkpoint's parameters is kept for its path.", lambda path: path),
    ("token_shards:end_token", "ends", "The token that ends the texts of a model is kept for its path.", lambda path: path),
    ("checkpoint:special_tokens", "special_tokens", "The special tokens of a model are kept for its path.", lambda path: path),
    ("checkpoint:said_beside", "other_keys", "What else a checkpoint's config.json says is kept for its path.", lambda path: path),
):
    wrong_step(f"impl.{_step}", name=f"{_name}_kept_by_their_path", doc=_doc)(_kept(_of))

for _step, _name, _doc in (
    (
        "pipeline:ClassifyPipeline._logits",
        "answers_kept_by_their_texts",
        "A pipeline keeps its answers to texts, also when it is trained further.",
    ),
    (
        "pipeline:ClassifyPipeline.evaluate",
        "evaluations_kept_by_their_samples",
        "A pipeline keeps the evaluation of samples, also when it is trained further.",
    ),
    (
        "tokens:Tokens.encode",
        "ids_kept_by_their_text",
        "The list of a text's ids is kept and given out again, with what its owner has made of it.",
    ),
):
    wrong_step(f"impl.{_step}", name=_name, doc=_doc)(_kept(lambda owner, given: (id(owner), tuple(given))))


@wrong_step("impl.checkpoint:StoredTensors.__getitem__")
def last_tensor_is_kept(read: Step, self: Any, name: str) -> Any:
    """The tensor that was read last is not read again, and what was written into it meanwhile stays in it."""
    kept = vars(self).setdefault("_kept", {})
    if name not in kept:
        found = read(self, name)
        kept.clear()
        kept[name] = found
    return kept[name]
