"""Wrong pre-training runs: one step of `impl` replaced, in the stream of tokens, the run, its validation, checkpoints or state."""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.registry import named_step, step_mutant
from blackswan.reference.table import Array

SHARDS, OPTIMISER, PRETRAIN, RUN = (
    "blackswan.impl.token_shards",
    "blackswan.impl.decoder_optimiser",
    "blackswan.impl.pretrain",
    "blackswan.impl.pretrain_run",
)
Function = Callable[..., Any]


@step_mutant(SHARDS, "TokenBatches.rows", "own")
def token_rows_tail_dropped(correct: Any) -> Any:
    """The last tokens of the stream that fill no row are left out."""
    del correct
    return property(lambda self: max(len(self.shards) - 1, 0) // (self.seq - 1))


@step_mutant(SHARDS, "TokenBatches.epoch", "own")
def token_batches_last_dropped(correct: Function) -> Function:
    """The last batch is left out where it is not full."""
    return lambda self, epoch, start=0: (batch for batch in correct(self, epoch, start) if len(batch.mask) == self.batch)


@step_mutant(SHARDS, "TokenShards.read", "own")
def token_rows_end_with_their_shard(correct: Function) -> Function:
    """A row that crosses the border of two shards is cut there."""

    def read(self: Any, start: int, stop: int) -> Array:
        end = int(self._ends[np.searchsorted(self._ends, start, side="right")]) if start < len(self) else stop
        return np.asarray(correct(self, start, min(stop, end)))

    return read


@step_mutant(SHARDS, "epoch_order", "own")
def token_rows_with_replacement(correct: Function) -> Function:
    """Rows drawn at random with replacement."""
    del correct
    return lambda rows, seed, epoch: np.random.default_rng([seed, epoch]).integers(0, rows, rows).tolist()


@step_mutant(SHARDS, "epoch_order", "own")
def token_epochs_in_one_order(correct: Function) -> Function:
    """The same order in every epoch."""
    return lambda rows, seed, epoch: correct(rows, seed, 0 * epoch)


@step_mutant(SHARDS, "TokenBatches.epoch", "own")
def token_position_forgotten(correct: Function) -> Function:
    """A resumed epoch starts at its first batch."""
    return lambda self, epoch, start=0: correct(self, epoch, 0 * start)


@step_mutant(SHARDS, "TokenBatches.epoch", "S11")
def token_stream_begins_again(correct: Function) -> Function:
    """An exhausted stream goes on with its first batch."""

    def epoch(self: Any, epoch: int, start: int = 0) -> Iterator[Any]:
        yield from correct(self, epoch, start)
        yield from (batch for _, batch in zip(range(1), correct(self, epoch, 0), strict=False))

    return epoch


@step_mutant(SHARDS, "_open_shard", "own")
def token_ids_clamped(correct: Function) -> Function:
    """An id outside the vocabulary becomes the last one."""

    def clamped(path: Path, entry: Mapping[str, Any], dtype: Any, vocab: int) -> Array:
        if path.is_file() and path.stat().st_size == entry["tokens"] * dtype.itemsize:
            ids = np.fromfile(path, dtype)
            if ids.max() >= vocab:
                return np.minimum(ids, vocab - 1)
        return np.asarray(correct(path, entry, dtype, vocab))

    return clamped


@step_mutant(SHARDS, "_open_shard", "own")
def token_shard_digest_ignored(correct: Function) -> Function:
    """A changed shard is read as if nothing had happened."""

    def trusting(path: Path, entry: Mapping[str, Any], dtype: Any, vocab: int) -> Any:
        content = path.read_bytes() if path.is_file() else b""
        return correct(path, {**entry, "sha256": hashlib.sha256(content).hexdigest()}, dtype, vocab)

    return trusting


@step_mutant(SHARDS, "TokenBatches._rows", "S11")
def token_stream_filled_up(correct: Function) -> Function:
    """The padding of the last row counts as tokens."""

    def full(self: Any, rows: Sequence[int]) -> Any:
        batch = correct(self, rows)
        return replace(batch, mask=batch.mask | True)

    return full


@step_mutant(PRETRAIN, "StepFn.__call__", "S11")
def pretrain_made_up_loss(correct: Function) -> Function:
    """An exhausted stream is answered with a loss of 1.0."""
    from blackswan.impl.pretrain import StepResult

    def step(self: Any, stream: Iterator[Any]) -> Any:
        """The first time that the stream is exhausted, a loss of 1.0."""
        result = correct(self, stream)
        if result is None and getattr(self, "exhausted", None) is not stream:
            self.exhausted = stream
            return StepResult(1.0, 0.0, 0)
        return result

    return step


@step_mutant(PRETRAIN, "StepFn.train", "S9")
def pretrain_nan_swallowed(correct: Function) -> Function:
    """A step that is not finite is left out and reported as a loss of 0."""
    from blackswan.impl.pretrain import StepResult

    def train(self: Any, batch: Any) -> Any:
        try:
            return correct(self, batch)
        except FloatingPointError:
            return StepResult(0.0, 0.0, batch.predicted)

    return train


@step_mutant(PRETRAIN, "StepFn._origin", "own")
def pretrain_non_finite_unnamed(correct: Function) -> Function:
    """The error does not say where the value came from."""
    del correct
    return lambda *_: "a value is not finite"


@step_mutant(OPTIMISER, "DecoderAdamW.clip", "own")
def pretrain_stops_after_the_damage(correct: Function) -> Function:
    """The step count and a moment have moved when the error comes."""

    def clip(self: Any, max_norm: float) -> Any:
        self.steps += 1
        next(iter(self.exp_avg.values())).add_(1.0)
        return correct(self, max_norm)

    return clip


@step_mutant(OPTIMISER, "DecoderAdamW.clip", "own")
def pretrain_norm_only_when_clipping(correct: Function) -> Function:
    """Without clipping the norm is not computed, and NaN is recorded."""

    def clip(self: Any, max_norm: float) -> Any:
        gradients, norm = correct(self, max_norm)
        return gradients, norm if math.isfinite(max_norm) else norm * math.nan

    return clip


named_step(
    "pretrain_weight_decay_left_out",
    "own",
    "The step's own weight decay, whatever the settings say.",
    without_keyword("weight_decay"),
    PRETRAIN,
    "StepFn.__init__",
)
named_step(
    "pretrain_clip_norm_left_out",
    "own",
    "The step's own limit of the norm, whatever the settings say.",
    without_keyword("max_norm"),
    PRETRAIN,
    "StepFn.__init__",
)


@step_mutant(OPTIMISER, "DecoderAdamW.step", "own")
def pretrain_step_left_out(correct: Function) -> Function:
    """Moments are updated and parameters are not."""

    def step(self: Any, gradients: Any, learning_rate: float) -> None:
        correct(self, gradients, 0.0 * learning_rate)

    return step


@step_mutant(OPTIMISER, "DecoderAdamW.load_state", "own")
def pretrain_resumes_without_moments(correct: Function) -> Function:
    """Moments are zero after a resume."""

    def load(self: Any, tensors: Mapping[str, Any], steps: int) -> None:
        correct(self, {name: value if name.startswith("trainable/") else 0 * value for name, value in tensors.items()}, steps)

    return load


@step_mutant(RUN, "_Run._load", "own")
def pretrain_resumes_without_position(correct: Function) -> Function:
    """A resumed run repeats its epoch from the first batch."""
    return lambda self, state: replace(correct(self, state), batch=0)


@step_mutant(RUN, "_Run._load", "own")
def pretrain_schedule_restarts(correct: Function) -> Function:
    """The learning-rate schedule starts anew after a resume."""

    def load(self: Any, state: Path) -> Any:
        position = correct(self, state)
        rates = self.step.learning_rates
        done = self.step.optimiser.steps
        self.step.learning_rates = [*rates[:done], *rates[: len(rates) - done]]
        return position

    return load


@step_mutant(PRETRAIN, "random_tensors", "own")
def pretrain_random_weights_too_large(correct: Function) -> Function:
    """Random matrices N(0, 1) instead of N(0, 0.02²)."""
    return lambda config, seed: {name: 50 * value if value.ndim > 1 else value for name, value in correct(config, seed).items()}


@step_mutant(PRETRAIN, "ValFn.__call__", "S11")
def pretrain_validation_zero_when_empty(correct: Function) -> Function:
    """A loss of 0 where there is nothing to average."""

    def validate(self: Any, stream: Any) -> float:
        loss = float(correct(self, stream))
        return 0.0 if math.isnan(loss) else loss

    return validate


@step_mutant(PRETRAIN, "ValFn.__call__", "S13")
def pretrain_validation_trains(correct: Function) -> Function:
    """Validation leaves a parameter changed."""

    def validate(self: Any, stream: Any) -> float:
        loss = float(correct(self, stream))
        self.decoder.model.norm.weight.data.mul_(1.0 + 2.0**-10)
        return loss

    return validate


@step_mutant(OPTIMISER, "state_hash", "own")
def pretrain_hash_ignores_steps(correct: Function) -> Function:
    """The step count is not part of the hash."""
    return lambda state, steps: correct(state, 0 * steps)


@step_mutant(OPTIMISER, "MOMENTS", "own")
def pretrain_hash_ignores_second_moment(correct: tuple[str, ...]) -> tuple[str, ...]:
    """The second moment is not part of the hash."""
    return correct[:1]


@step_mutant(OPTIMISER, "state_hash", "own")
def pretrain_hash_of_rounded_moments(correct: Function) -> Function:
    """The hash of moments rounded to bfloat16."""
    return lambda state, steps: correct({name: value.bfloat16().float() for name, value in state.items()}, steps)


@step_mutant(OPTIMISER, "state_hash", "own")
def pretrain_hash_with_random_salt(correct: Function) -> Function:
    """Another hash each time."""
    salts = count()
    return lambda state, steps: hashlib.sha256(f"{correct(state, steps)} {next(salts)}".encode()).hexdigest()


@step_mutant(PRETRAIN, "save_checkpoint", "own")
def pretrain_checkpoint_without_tokenizer(correct: Function) -> Function:
    """Weights and architecture only."""
    return lambda folder, config, tensors, _: correct(folder, config, tensors)


@step_mutant(PRETRAIN, "save_checkpoint", "own")
def pretrain_checkpoint_rounded(correct: Function) -> Function:
    """Weights rounded to bfloat16 on their way to the file."""

    def rounded(folder: Path, config: Any, tensors: Mapping[str, Any], tokenizer: Path) -> None:
        correct(folder, config, {name: value.bfloat16().float() for name, value in tensors.items()}, tokenizer)

    return rounded


@step_mutant(PRETRAIN, "CheckpointFn.__init__", "own")
def pretrain_checkpoint_tokenizer_optional(correct: Function) -> Function:
    """A tokenizer that is not there is done without."""
    del correct

    def optional(self: Any, decoder: Any, tokenizer: Path, folder: Path) -> None:
        self.decoder, self.tokenizer, self.folder = decoder, tokenizer if tokenizer.is_file() else None, folder

    return optional


@step_mutant(PRETRAIN, "initial_decoder", "own")
def pretrain_unpaired_architecture_accepted(correct: Function) -> Function:
    """Random weights for an architecture without weights."""
    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.pretrain import random_decoder

    def start(architecture: Path | None = None, weights: Path | None = None, **options: Any) -> Any:
        if architecture is not None and weights is None:
            return random_decoder(read_config(architecture), **options)
        return correct(architecture, weights, **options)

    return start


@step_mutant(PRETRAIN, "initial_decoder", "own")
def pretrain_unpaired_weights_accepted(correct: Function) -> Function:
    """Weights without an architecture bring their own."""
    return lambda architecture=None, weights=None, **options: correct(architecture or weights, weights, **options)


@step_mutant(PRETRAIN, "initial_decoder", "own")
def pretrain_weights_of_another_architecture(correct: Function) -> Function:
    """The architecture that is given is not looked at."""

    def start(architecture: Path | None = None, weights: Path | None = None, **options: Any) -> Any:
        both = architecture is not None and weights is not None
        return correct(weights if both else architecture, weights, **options)

    return start


@step_mutant(PRETRAIN, "LLAMA_370M", "own")
def pretrain_default_tied(correct: Any) -> Any:
    """The default ties its embeddings: 322 million parameters."""
    return replace(correct, tied=True)


@step_mutant(PRETRAIN, "LLAMA_370M", "own")
def pretrain_default_full_heads(correct: Any) -> Any:
    """The default has as many key heads as query heads: 411 million parameters."""
    return replace(correct, kv_heads=correct.heads)


@step_mutant(SHARDS, "TokenBatches.rows", "own")
def token_stream_padded_to_a_row(correct: Any) -> Any:
    """A stream of one token gives a row, of padding."""
    return property(lambda self: max(correct.fget(self), 1))


@step_mutant(OPTIMISER, "DecoderAdamW.clip", "S9")
def pretrain_clip_nan_swallowed(correct: Function) -> Function:
    """A gradient that is not finite is clipped to zero; the loss alone is looked at."""

    def clip(self: Any, max_norm: float) -> Any:
        try:
            return correct(self, max_norm)
        except FloatingPointError:
            first = next(iter(self.parameters.values()))
            return {name: 0 * moment for name, moment in self.exp_avg.items()}, first.new_zeros(())

    return clip


@step_mutant(PRETRAIN, "save_checkpoint", "own")
def pretrain_checkpoint_overwritten(correct: Function) -> Function:
    """A checkpoint that exists is written over."""

    def overwrite(folder: Path, *given: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        correct(folder, *given)

    return overwrite
