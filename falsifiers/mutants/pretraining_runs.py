"""Wrong pre-training runs: one step of `impl` replaced, in the stream of tokens, the run, its validation, checkpoints or state."""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.registry import step_mutant, wrong_step
from blackswan.reference.table import Array

Step = Callable[..., Any]


SHARDS, OPTIMISER, PRETRAIN = "blackswan.impl.token_shards", "blackswan.impl.decoder_optimiser", "blackswan.impl.pretrain"
_of_shards, _of_optimiser, _of_pretrain = (partial(wrong_step, module) for module in (SHARDS, OPTIMISER, PRETRAIN))
_of_run = partial(wrong_step, "blackswan.impl.pretrain_run")


@step_mutant(SHARDS, "TokenBatches.rows", "own")
def token_rows_tail_dropped(correct: Any) -> Any:
    """The last tokens of the stream that fill no row are left out."""
    del correct
    return property(lambda self: max(len(self.shards) - 1, 0) // (self.seq - 1))


@_of_shards("TokenBatches.epoch", "own")
def token_batches_last_dropped(correct: Step, self: Any, *given: Any) -> Any:
    """The last batch is left out where it is not full."""
    return (batch for batch in correct(self, *given) if len(batch.mask) == self.batch)


@_of_shards("TokenShards.read", "own")
def token_rows_end_with_their_shard(correct: Step, self: Any, start: int, stop: int) -> Any:
    """A row that crosses the border of two shards is cut there."""
    end = int(self._ends[np.searchsorted(self._ends, start, side="right")]) if start < len(self) else stop
    return correct(self, start, min(stop, end))


@_of_shards("epoch_order", "own")
def token_rows_with_replacement(_: Step, rows: int, seed: int, epoch: int) -> Any:
    """Rows drawn at random with replacement."""
    return np.random.default_rng([seed, epoch]).integers(0, rows, rows).tolist()


@_of_shards("epoch_order", "own")
def token_epochs_in_one_order(correct: Step, rows: int, seed: int, epoch: int) -> Any:
    """The same order in every epoch."""
    return correct(rows, seed, 0 * epoch)


@_of_shards("TokenBatches.epoch", "own")
def token_position_forgotten(correct: Step, self: Any, epoch: int, start: int = 0) -> Any:
    """A resumed epoch starts at its first batch."""
    return correct(self, epoch, 0 * start)


@_of_shards("TokenBatches.epoch", "S11")
def token_stream_begins_again(correct: Step, self: Any, epoch: int, start: int = 0) -> Iterator[Any]:
    """An exhausted stream goes on with its first batch."""
    yield from correct(self, epoch, start)
    yield from (batch for _, batch in zip(range(1), correct(self, epoch, 0), strict=False))


@_of_shards("_open_shard", "own")
def token_ids_clamped(correct: Step, path: Path, entry: Any, dtype: Any, vocab: int) -> Any:
    """An id outside the vocabulary becomes the last one."""
    if path.is_file() and path.stat().st_size == entry["tokens"] * dtype.itemsize:
        ids: Array = np.fromfile(path, dtype)
        if ids.max() >= vocab:
            return np.minimum(ids, vocab - 1)
    return correct(path, entry, dtype, vocab)


@_of_shards("_open_shard", "own")
def token_shard_digest_ignored(correct: Step, path: Path, entry: Any, *given: Any) -> Any:
    """A changed shard is read as if nothing had happened."""
    content = path.read_bytes() if path.is_file() else b""
    return correct(path, {**entry, "sha256": hashlib.sha256(content).hexdigest()}, *given)


@_of_shards("TokenBatches._rows", "S11")
def token_stream_filled_up(correct: Step, *given: Any) -> Any:
    """The padding of the last row counts as tokens."""
    batch = correct(*given)
    return replace(batch, mask=batch.mask | True)


@_of_pretrain("StepFn.__call__", "S11")
def pretrain_made_up_loss(correct: Step, self: Any, stream: Any) -> Any:
    """An exhausted stream is answered with a loss of 1.0."""
    from blackswan.impl.pretrain import StepResult

    result = correct(self, stream)
    if result is None and getattr(self, "exhausted", None) is not stream:  # the first time: a run asks until there is no answer
        self.exhausted = stream
        return StepResult(1.0, 0.0, 0)
    return result


@_of_pretrain("StepFn.train", "S9")
def pretrain_nan_swallowed(correct: Step, self: Any, batch: Any) -> Any:
    """A step that is not finite is left out and reported as a loss of 0."""
    from blackswan.impl.pretrain import StepResult

    try:
        return correct(self, batch)
    except FloatingPointError:
        return StepResult(0.0, 0.0, batch.predicted)


@_of_pretrain("StepFn._origin", "own")
def pretrain_non_finite_unnamed(*_: Any) -> str:
    """The error does not say where the value came from."""
    return "a value is not finite"


@_of_optimiser("DecoderAdamW.clip", "own")
def pretrain_stops_after_the_damage(correct: Step, self: Any, max_norm: float) -> Any:
    """The step count and a moment have moved when the error comes."""
    self.steps += 1
    next(iter(self.exp_avg.values())).add_(1.0)
    return correct(self, max_norm)


@_of_optimiser("DecoderAdamW.clip", "own")
def pretrain_norm_only_when_clipping(correct: Step, self: Any, max_norm: float) -> Any:
    """Without clipping the norm is not computed, and NaN is recorded."""
    gradients, norm = correct(self, max_norm)
    return gradients, norm if math.isfinite(max_norm) else norm * math.nan


for _name, _doc, _keyword in (
    ("pretrain_weight_decay_left_out", "The step's own weight decay, whatever the settings say.", "weight_decay"),
    ("pretrain_clip_norm_left_out", "The step's own limit of the norm, whatever the settings say.", "max_norm"),
):
    step_mutant(PRETRAIN, "StepFn.__init__", "own", name=_name, doc=_doc)(without_keyword(_keyword))


@_of_optimiser("DecoderAdamW.step", "own")
def pretrain_step_left_out(correct: Step, self: Any, gradients: Any, learning_rate: float) -> None:
    """Moments are updated and parameters are not."""
    correct(self, gradients, 0.0 * learning_rate)


@_of_optimiser("DecoderAdamW.load_state", "own")
def pretrain_resumes_without_moments(correct: Step, self: Any, tensors: Any, steps: int) -> None:
    """Moments are zero after a resume."""
    correct(self, {name: value if name.startswith("trainable/") else 0 * value for name, value in tensors.items()}, steps)


@_of_run("_Run._load", "own")
def pretrain_resumes_without_position(correct: Step, *given: Any) -> Any:
    """A resumed run repeats its epoch from the first batch."""
    return replace(correct(*given), batch=0)


@_of_run("_Run._load", "own")
def pretrain_schedule_restarts(correct: Step, self: Any, state: Path) -> Any:
    """The learning-rate schedule starts anew after a resume."""
    position = correct(self, state)
    rates, done = self.step.learning_rates, self.step.optimiser.steps
    self.step.learning_rates = [*rates[:done], *rates[: len(rates) - done]]
    return position


@_of_pretrain("random_tensors", "own")
def pretrain_random_weights_too_large(correct: Step, *given: Any) -> Any:
    """Random matrices N(0, 1) instead of N(0, 0.02²)."""
    return {name: 50 * value if value.ndim > 1 else value for name, value in correct(*given).items()}


@_of_pretrain("ValFn.__call__", "S11")
def pretrain_validation_zero_when_empty(correct: Step, *given: Any) -> float:
    """A loss of 0 where there is nothing to average."""
    loss = float(correct(*given))
    return 0.0 if math.isnan(loss) else loss


@_of_pretrain("ValFn.__call__", "S13")
def pretrain_validation_trains(correct: Step, self: Any, stream: Any) -> Any:
    """Validation leaves a parameter changed."""
    loss = correct(self, stream)
    self.decoder.model.norm.weight.data.mul_(1.0 + 2.0**-10)
    return loss


@_of_optimiser("state_hash", "own")
def pretrain_hash_ignores_steps(correct: Step, state: Any, steps: int) -> Any:
    """The step count is not part of the hash."""
    return correct(state, 0 * steps)


@step_mutant(OPTIMISER, "MOMENTS", "own")
def pretrain_hash_ignores_second_moment(correct: tuple[str, ...]) -> tuple[str, ...]:
    """The second moment is not part of the hash."""
    return correct[:1]


@_of_optimiser("state_hash", "own")
def pretrain_hash_of_rounded_moments(correct: Step, state: Any, steps: int) -> Any:
    """The hash of moments rounded to bfloat16."""
    return correct({name: value.bfloat16().float() for name, value in state.items()}, steps)


@step_mutant(OPTIMISER, "state_hash", "own")
def pretrain_hash_with_random_salt(correct: Step) -> Step:
    """Another hash each time."""
    salts = count()
    return lambda *given: hashlib.sha256(f"{correct(*given)} {next(salts)}".encode()).hexdigest()


@_of_pretrain("save_checkpoint", "own")
def pretrain_checkpoint_without_tokenizer(correct: Step, folder: Path, config: Any, tensors: Any, _: Path) -> None:
    """Weights and architecture only."""
    correct(folder, config, tensors)


@_of_pretrain("save_checkpoint", "own")
def pretrain_checkpoint_rounded(correct: Step, folder: Path, config: Any, tensors: Any, tokenizer: Path) -> None:
    """Weights rounded to bfloat16 on their way to the file."""
    correct(folder, config, {name: value.bfloat16().float() for name, value in tensors.items()}, tokenizer)


@_of_pretrain("CheckpointFn.__init__", "own")
def pretrain_checkpoint_tokenizer_optional(_: Step, self: Any, decoder: Any, tokenizer: Path, folder: Path) -> None:
    """A tokenizer that is not there is done without."""
    self.decoder, self.tokenizer, self.folder = decoder, tokenizer if tokenizer.is_file() else None, folder


@_of_pretrain("initial_decoder", "own")
def pretrain_unpaired_architecture_accepted(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """Random weights for an architecture without weights."""
    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.pretrain import random_decoder

    if architecture is not None and weights is None:
        return random_decoder(read_config(architecture), **options)
    return correct(architecture, weights, **options)


@_of_pretrain("initial_decoder", "own")
def pretrain_unpaired_weights_accepted(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """Weights without an architecture bring their own."""
    return correct(architecture or weights, weights, **options)


@_of_pretrain("initial_decoder", "own")
def pretrain_weights_of_another_architecture(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """The architecture that is given is not looked at."""
    both = architecture is not None and weights is not None
    return correct(weights if both else architecture, weights, **options)


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


@_of_optimiser("DecoderAdamW.clip", "S9")
def pretrain_clip_nan_swallowed(correct: Step, self: Any, max_norm: float) -> Any:
    """A gradient that is not finite is clipped to zero; the loss alone is looked at."""
    try:
        return correct(self, max_norm)
    except FloatingPointError:
        first = next(iter(self.parameters.values()))
        return {name: 0 * moment for name, moment in self.exp_avg.items()}, first.new_zeros(())


@_of_pretrain("save_checkpoint", "own")
def pretrain_checkpoint_overwritten(correct: Step, folder: Path, *given: Any) -> None:
    """A checkpoint that exists is written over."""
    shutil.rmtree(folder, ignore_errors=True)
    correct(folder, *given)
