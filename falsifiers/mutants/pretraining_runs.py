"""Wrong pre-training runs: one step of `impl` replaced, in the stream of tokens, the run, its validation, checkpoints or state."""

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.reference.table import Array

Step = Callable[..., Any]


@wrong_step("impl.token_shards:TokenBatches.rows")
def token_rows_tail_dropped(_: Step, self: Any) -> int:
    """The last tokens of the stream that fill no row are left out."""
    return int(max(len(self.shards) - 1, 0) // (self.seq - 1))


@wrong_step("impl.token_shards:TokenBatches.epoch")
def token_batches_last_dropped(correct: Step, self: Any, *given: Any) -> Any:
    """The last batch is left out where it is not full."""
    return (batch for batch in correct(self, *given) if len(batch.mask) == self.batch)


@wrong_step("impl.token_shards:TokenShards.read")
def token_rows_end_with_their_shard(correct: Step, self: Any, start: int, stop: int) -> Any:
    """A row that crosses the border of two shards is cut there."""
    end = int(self._ends[np.searchsorted(self._ends, start, side="right")]) if start < len(self) else stop
    return correct(self, start, min(stop, end))


wrong_step("impl.token_shards:epoch_order", name="token_rows_with_replacement", doc="Rows drawn at random with replacement.")(
    lambda _, rows, seed, epoch: np.random.default_rng([seed, epoch]).integers(0, rows, rows).tolist()
)
wrong_step("impl.token_shards:epoch_order", name="token_epochs_in_one_order", doc="The same order in every epoch.")(
    lambda correct, rows, seed, epoch: correct(rows, seed, 0 * epoch)
)
wrong_step("impl.token_shards:TokenBatches.epoch", name="token_position_forgotten", doc="A resumed epoch starts at its first batch.")(
    lambda correct, self, epoch, start=0: correct(self, epoch, 0 * start)
)


@wrong_step("impl.token_shards:TokenBatches.epoch", "S11")
def token_stream_begins_again(correct: Step, self: Any, epoch: int, start: int = 0) -> Iterator[Any]:
    """An exhausted stream goes on with its first batch."""
    yield from correct(self, epoch, start)
    yield from (batch for _, batch in zip(range(1), correct(self, epoch, 0), strict=False))


@wrong_step("impl.token_shards:_open_shard")
def token_ids_clamped(correct: Step, path: Path, entry: Any, dtype: Any, vocab: int) -> Any:
    """An id outside the vocabulary becomes the last one."""
    if path.is_file() and path.stat().st_size == entry["tokens"] * dtype.itemsize:
        ids: Array = np.fromfile(path, dtype)
        if ids.max() >= vocab:
            return np.minimum(ids, vocab - 1)
    return correct(path, entry, dtype, vocab)


@wrong_step("impl.token_shards:_open_shard")
def token_shard_digest_ignored(correct: Step, path: Path, entry: Any, *given: Any) -> Any:
    """A changed shard is read as if nothing had happened."""
    content = path.read_bytes() if path.is_file() else b""
    return correct(path, {**entry, "sha256": hashlib.sha256(content).hexdigest()}, *given)


@wrong_step("impl.token_shards:TokenBatches._rows", "S11")
def token_stream_filled_up(correct: Step, *given: Any) -> Any:
    """The padding of the last row counts as tokens."""
    batch = correct(*given)
    return replace(batch, mask=batch.mask | True)


@wrong_step("impl.pretrain:StepFn.__call__", "S11")
def pretrain_made_up_loss(correct: Step, self: Any, stream: Any) -> Any:
    """An exhausted stream is answered with a loss of 1.0."""
    from blackswan.impl.pretrain import StepResult

    result = correct(self, stream)
    if result is None and getattr(self, "exhausted", None) is not stream:  # the first time: a run asks until there is no answer
        self.exhausted = stream
        return StepResult(1.0, 0.0, 0)
    return result


@wrong_step("impl.pretrain:StepFn.train", "S9")
def pretrain_nan_swallowed(correct: Step, self: Any, batch: Any) -> Any:
    """A step that is not finite is left out and reported as a loss of 0."""
    from blackswan.impl.pretrain import StepResult

    try:
        return correct(self, batch)
    except FloatingPointError:
        return StepResult(0.0, 0.0, batch.predicted)


wrong_step("impl.pretrain:StepFn._origin", name="pretrain_non_finite_unnamed", doc="The error does not say where the value came from.")(
    lambda *_: "a value is not finite"
)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.clip")
def pretrain_stops_after_the_damage(correct: Step, self: Any, max_norm: float) -> Any:
    """The step count and a moment have moved when the error comes."""
    self.steps += 1
    next(iter(self.exp_avg.values())).add_(1.0)
    return correct(self, max_norm)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.clip")
def pretrain_norm_only_when_clipping(correct: Step, self: Any, max_norm: float) -> Any:
    """Without clipping the norm is not computed, and NaN is recorded."""
    gradients, norm = correct(self, max_norm)
    return gradients, norm if math.isfinite(max_norm) else norm * math.nan


wrong_steps(
    "impl.pretrain:StepFn.__init__",
    by=without_keyword,
    pretrain_weight_decay_left_out=("The step's own weight decay, whatever the settings say.", "weight_decay"),
    pretrain_clip_norm_left_out=("The step's own limit of the norm, whatever the settings say.", "max_norm"),
)


wrong_step("impl.decoder_optimiser:DecoderAdamW.step", name="pretrain_step_left_out", doc="Moments are updated and parameters are not.")(
    lambda correct, self, gradients, learning_rate: correct(self, gradients, 0.0 * learning_rate)
)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.load_state")
def pretrain_resumes_without_moments(correct: Step, self: Any, tensors: Any, steps: int) -> None:
    """Moments are zero after a resume."""
    correct(self, {name: value if name.startswith("trainable/") else 0 * value for name, value in tensors.items()}, steps)


@wrong_step("impl.pretrain_run:_Run._load")
def pretrain_resumes_without_position(correct: Step, *given: Any) -> Any:
    """A resumed run repeats its epoch from the first batch."""
    return replace(correct(*given), batch=0)


@wrong_step("impl.pretrain_run:_Run.save_when_due")
def pretrain_saves_every_step(_: Step, self: Any, step: Any) -> None:
    """The state is written after every step, however seldom it was asked for."""
    from blackswan.impl.pretrain_run import _Position

    self._save(_Position(step.epoch, step.step - step.epoch * len(self.train)))


wrong_steps(
    "impl.pretrain_run:_Run.save_when_due",
    pretrain_saves_by_the_epoch=(
        "The steps between two states are counted anew in each epoch.",
        lambda save, self, made: (
            save(self, made) if (made.step - made.epoch * len(self.train)) % (self.settings.save_every or 1) == 0 else None
        ),
    ),
    pretrain_saves_seldom=(
        "The state is written half as often as was asked for.",
        lambda save, self, made: save(self, made) if made.step % (2 * (self.settings.save_every or 1)) == 0 else None,
    ),
)
wrong_steps(
    "impl.pretrain:StepFn.__init__",
    pretrain_whole_batches=(
        "A batch is computed at once, whatever a micro-batch is, and takes the memory.",
        lambda start, self, decoder, **given: start(self, decoder, **{**given, "micro_batch": 2**20}),
    ),
)
wrong_steps(
    "impl.pretrain:ValFn.__init__",
    pretrain_validates_whole_batches=(
        "A batch of held-out tokens is computed at once, whatever a micro-batch is.",
        lambda start, self, decoder, _: start(self, decoder, 2**20),
    ),
)


@wrong_step("impl.pretrain_run:_Run.record")
def pretrain_records_the_rate_before(record: Step, self: Any, *given: Any) -> Any:
    """A step is said to have had the rate of the one before it."""
    made = record(self, *given)
    return replace(made, learning_rate=self.step.learning_rates[max(made.step - 2, 0)])


@wrong_step("impl.pretrain_run:_Run.end")
def pretrain_state_before_checkpoint(correct: Step, self: Any, epoch: int) -> Any:
    """The state says that an epoch is done before its checkpoint is written."""
    from blackswan.impl.pretrain_run import _Position

    self._save(_Position(epoch + 1, 0))
    return correct(self, epoch)


@wrong_step("impl.pretrain_run:_Run._load")
def pretrain_schedule_restarts(correct: Step, self: Any, state: Path) -> Any:
    """The learning-rate schedule starts anew after a resume."""
    position = correct(self, state)
    rates, done = self.step.learning_rates, self.step.optimiser.steps
    self.step.learning_rates = [*rates[:done], *rates[: len(rates) - done]]
    return position


wrong_step("impl.pretrain:random_tensors", name="pretrain_random_weights_too_large", doc="Random matrices N(0, 1) instead of N(0, 0.02²).")(
    lambda correct, *given: {name: 50 * value if value.ndim > 1 else value for name, value in correct(*given).items()}
)


@wrong_step("impl.pretrain:ValFn.__call__", "S11")
def pretrain_validation_zero_when_empty(correct: Step, *given: Any) -> float:
    """A loss of 0 where there is nothing to average."""
    loss = float(correct(*given))
    return 0.0 if math.isnan(loss) else loss


@wrong_step("impl.pretrain:ValFn.__call__", "S13")
def pretrain_validation_trains(correct: Step, self: Any, stream: Any) -> Any:
    """Validation leaves a parameter changed."""
    loss = correct(self, stream)
    self.decoder.model.norm.weight.data.mul_(1.0 + 2.0**-10)
    return loss


wrong_step("impl.decoder_optimiser:state_hash", name="pretrain_hash_ignores_steps", doc="The step count is not part of the hash.")(
    lambda correct, state, steps: correct(state, 0 * steps)
)
wrong_step(
    "impl.decoder_optimiser:state_hash", name="pretrain_hash_ignores_second_moment", doc="The second moment is not part of the hash."
)(lambda correct, state, steps: correct({name: value for name, value in state.items() if not name.startswith("exp_avg_sq/")}, steps))
wrong_step("impl.decoder_optimiser:state_hash", name="pretrain_hash_of_rounded_moments", doc="The hash of moments rounded to bfloat16.")(
    lambda correct, state, steps: correct({name: value.bfloat16().float() for name, value in state.items()}, steps)
)
wrong_step("impl.decoder_optimiser:state_hash", name="pretrain_hash_with_random_salt", doc="Another hash each time.")(
    lambda correct, *given: hashlib.sha256(f"{correct(*given)} {time.perf_counter_ns()}".encode()).hexdigest()
)
wrong_step("impl.pretrain:save_checkpoint", name="pretrain_checkpoint_without_tokenizer", doc="Weights and architecture only.")(
    lambda correct, folder, config, tensors, _: correct(folder, config, tensors)
)


@wrong_step("impl.pretrain:save_checkpoint")
def pretrain_checkpoint_rounded(correct: Step, folder: Path, config: Any, tensors: Any, tokenizer: Path) -> None:
    """Weights rounded to bfloat16 on their way to the file."""
    correct(folder, config, {name: value.bfloat16().float() for name, value in tensors.items()}, tokenizer)


@wrong_step("impl.pretrain:CheckpointFn.__init__")
def pretrain_checkpoint_tokenizer_optional(_: Step, self: Any, decoder: Any, tokenizer: Path, folder: Path) -> None:
    """A tokenizer that is not there is done without."""
    self.decoder, self.tokenizer, self.folder = decoder, tokenizer if tokenizer.is_file() else None, folder


@wrong_step("impl.pretrain:_decoder")
def pretrain_in_the_stored_dtype(correct: Step, config: Any, tensors: Any, device: Any) -> Any:
    """Parameters are trained in the dtype of the file."""
    return correct(config, tensors, device).to(next(iter(tensors.values())).dtype)


@wrong_step("impl.pretrain:initial_decoder")
def pretrain_unpaired_architecture_accepted(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """Random weights for an architecture without weights."""
    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.pretrain import random_decoder

    if architecture is not None and weights is None:
        return random_decoder(read_config(architecture), **options)
    return correct(architecture, weights, **options)


@wrong_step("impl.pretrain:initial_decoder")
def pretrain_unpaired_weights_accepted(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """Weights without an architecture bring their own."""
    return correct(architecture or weights, weights, **options)


@wrong_step("impl.pretrain:initial_decoder")
def pretrain_weights_of_another_architecture(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """The architecture that is given is not looked at."""
    both = architecture is not None and weights is not None
    return correct(weights if both else architecture, weights, **options)


wrong_step("impl.pretrain:LLAMA_370M", name="pretrain_default_tied", doc="The default ties its embeddings: 322 million parameters.")(
    lambda correct: replace(correct, tied=True)
)


@wrong_step("impl.pretrain:LLAMA_370M")
def pretrain_default_full_heads(correct: Any) -> Any:
    """The default has as many key heads as query heads: 411 million parameters."""
    return replace(correct, kv_heads=correct.heads)


@wrong_step("impl.token_shards:TokenBatches.rows")
def token_stream_padded_to_a_row(rows: Step, self: Any) -> int:
    """A stream of one token gives a row, of padding."""
    return max(int(rows(self)), 1)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.clip", "S9")
def pretrain_clip_nan_swallowed(correct: Step, self: Any, max_norm: float) -> Any:
    """A gradient that is not finite is clipped to zero; the loss alone is looked at."""
    try:
        return correct(self, max_norm)
    except FloatingPointError:
        first = next(iter(self.parameters.values()))
        return {name: 0 * moment for name, moment in self.exp_avg.items()}, first.new_zeros(())


@wrong_step("impl.pretrain:save_checkpoint")
def pretrain_checkpoint_overwritten(correct: Step, folder: Path, *given: Any) -> None:
    """A checkpoint that exists is written over."""
    shutil.rmtree(folder, ignore_errors=True)
    correct(folder, *given)


def _otherwise(**values: Any) -> Any:
    """Settings in the place of those that the options give."""
    return lambda settings, options: replace(settings(options), **values)


wrong_steps(
    "impl.commands.pretrain:_settings",
    pretrain_command_of_another_rate=("The learning rate is the default, whatever the option.", _otherwise(learning_rate=3e-4)),
    pretrain_command_without_clipping=("The gradient is not clipped.", _otherwise(gradient_clip_norm=None)),
    pretrain_command_of_one_epoch=("One epoch, whatever the option.", _otherwise(epochs=1)),
    pretrain_command_of_another_schedule=("The rate falls as a cosine, whatever the option.", _otherwise(schedule="cosine")),
)


@wrong_step("impl.commands.pretrain:_decoder")
def pretrain_command_starts_at_random(decoder: Any, options: Any) -> Any:
    """Random weights where those of a checkpoint were given."""
    options.random = True
    return decoder(options)


@wrong_step("impl.commands.pretrain:_decoder")
def pretrain_command_never_random(decoder: Any, options: Any) -> Any:
    """The checkpoint's weights where random ones were asked for."""
    options.random = False
    return decoder(options)


wrong_steps(
    "impl.decoder:_random_tensor",
    random_weights_wider=(
        "Random matrices N(0, 0.03²).",
        lambda draw, name, shape, generator: draw(name, shape, generator) * (1.5 if len(shape) > 1 else 1.0),
    ),
    random_biases_of_one=("Random biases are one, as norms are.", lambda draw, name, *given: draw(name.removesuffix(".bias"), *given)),
    random_layers_alike=(
        "All random matrices begin with the same numbers.",
        lambda draw, name, shape, generator: draw(name, shape, generator.manual_seed(generator.initial_seed())),
    ),
)


wrong_step(
    "impl.pretrain:LLAMA_370M", name="pretrain_default_of_another_llama", doc="The default has the ε of the first Llama, θ of the third."
)(lambda default: replace(default, eps=1e-6, theta=5e5))


@wrong_step("impl.decoder_optimiser:DecoderAdamW.__init__", "P36")
def pretrain_in_any_dtype(_: Step, self: Any, decoder: Any, weight_decay: float) -> None:
    """Parameters in half precision are trained as they are, and of NF4 weights none."""
    decoder.requires_grad_(True)
    self.parameters, self.weight_decay, self.steps = dict(decoder.named_parameters()), weight_decay, 0
    self.exp_avg, self.exp_avg_sq = ({name: torch.zeros_like(value) for name, value in self.parameters.items()} for _ in range(2))


@wrong_step("impl.__main__:_run")
def pretrain_tokenizer_in_the_model(right: Step, run: Step, options: Any, name: str) -> Any:
    """The tokenizer of an .apr file is looked for inside it."""
    from blackswan.impl import checkpoint

    inside = options.command == "pretrain"
    with mock.patch.object(checkpoint, "belonging", lambda model, name: model / name) if inside else nullcontext():
        return right(run, options, name)


wrong_steps("impl.commands.pretrain:_Shown.INTERVAL", pretrain_shows_the_first_step=("No step but the first is shown.", lambda _: 10**9))
wrong_steps(
    "impl.commands.pretrain:_Shown.epoch",
    pretrain_shows_losses_that_are_none=(
        "Without held-out tokens there is a held-out loss.",
        lambda show, self, epoch: show(
            self, epoch if epoch.validation_loss == epoch.validation_loss else replace(epoch, validation_loss=0.0)
        ),
    ),
)


@wrong_step("impl.__main__:_run")
def pretrain_command_of_seed_zero_in_order(right: Step, *given: Any) -> Any:
    """The seed 0 is none: rows are in the order of the stream."""
    from blackswan.impl import token_shards

    batches = token_shards.TokenBatches
    with mock.patch.object(token_shards, "TokenBatches", lambda shards, *, seed, **others: batches(shards, seed=seed or None, **others)):
        return right(*given)
