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
from blackswan.falsifiers.mutants.patches import step_mutant
from blackswan.reference.table import Array

SHARDS, OPTIMISER, PRETRAIN, RUN = (
    "blackswan.impl.token_shards",
    "blackswan.impl.decoder_optimiser",
    "blackswan.impl.pretrain",
    "blackswan.impl.pretrain_run",
)
Function = Callable[..., Any]


@step_mutant("token_rows_tail_dropped", SHARDS, "TokenBatches.rows")
def _(correct: Any) -> Any:
    del correct
    return property(lambda self: max(len(self.shards) - 1, 0) // (self.seq - 1))


@step_mutant("token_batches_last_dropped", SHARDS, "TokenBatches.epoch")
def _(correct: Function) -> Function:
    return lambda self, epoch, start=0: (batch for batch in correct(self, epoch, start) if len(batch.mask) == self.batch)


@step_mutant("token_rows_end_with_their_shard", SHARDS, "TokenShards.read")
def _(correct: Function) -> Function:
    def read(self: Any, start: int, stop: int) -> Array:
        end = int(self._ends[np.searchsorted(self._ends, start, side="right")]) if start < len(self) else stop
        return np.asarray(correct(self, start, min(stop, end)))

    return read


@step_mutant("token_rows_with_replacement", SHARDS, "epoch_order")
def _(correct: Function) -> Function:
    del correct
    return lambda rows, seed, epoch: np.random.default_rng([seed, epoch]).integers(0, rows, rows).tolist()


@step_mutant("token_epochs_in_one_order", SHARDS, "epoch_order")
def _(correct: Function) -> Function:
    return lambda rows, seed, epoch: correct(rows, seed, 0 * epoch)


@step_mutant("token_position_forgotten", SHARDS, "TokenBatches.epoch")
def _(correct: Function) -> Function:
    return lambda self, epoch, start=0: correct(self, epoch, 0 * start)


@step_mutant("token_stream_begins_again", SHARDS, "TokenBatches.epoch")
def _(correct: Function) -> Function:
    def epoch(self: Any, epoch: int, start: int = 0) -> Iterator[Any]:
        yield from correct(self, epoch, start)
        yield from (batch for _, batch in zip(range(1), correct(self, epoch, 0), strict=False))

    return epoch


@step_mutant("token_ids_clamped", SHARDS, "_open_shard")
def _(correct: Function) -> Function:
    def clamped(path: Path, entry: Mapping[str, Any], dtype: Any, vocab: int) -> Array:
        if path.is_file() and path.stat().st_size == entry["tokens"] * dtype.itemsize:
            ids = np.fromfile(path, dtype)
            if ids.max() >= vocab:
                return np.minimum(ids, vocab - 1)
        return np.asarray(correct(path, entry, dtype, vocab))

    return clamped


@step_mutant("token_shard_digest_ignored", SHARDS, "_open_shard")
def _(correct: Function) -> Function:
    def trusting(path: Path, entry: Mapping[str, Any], dtype: Any, vocab: int) -> Any:
        content = path.read_bytes() if path.is_file() else b""
        return correct(path, {**entry, "sha256": hashlib.sha256(content).hexdigest()}, dtype, vocab)

    return trusting


@step_mutant("token_stream_filled_up", SHARDS, "TokenBatches._rows")
def _(correct: Function) -> Function:
    def full(self: Any, rows: Sequence[int]) -> Any:
        batch = correct(self, rows)
        return replace(batch, mask=batch.mask | True)

    return full


@step_mutant("pretrain_made_up_loss", PRETRAIN, "StepFn.__call__")
def _(correct: Function) -> Function:
    from blackswan.impl.pretrain import StepResult

    def step(self: Any, stream: Iterator[Any]) -> Any:
        """The first time that the stream is exhausted, a loss of 1.0."""
        result = correct(self, stream)
        if result is None and getattr(self, "exhausted", None) is not stream:
            self.exhausted = stream
            return StepResult(1.0, 0.0, 0)
        return result

    return step


@step_mutant("pretrain_nan_swallowed", PRETRAIN, "StepFn.train")
def _(correct: Function) -> Function:
    from blackswan.impl.pretrain import StepResult

    def train(self: Any, batch: Any) -> Any:
        try:
            return correct(self, batch)
        except FloatingPointError:
            return StepResult(0.0, 0.0, batch.predicted)

    return train


@step_mutant("pretrain_non_finite_unnamed", PRETRAIN, "StepFn._origin")
def _(correct: Function) -> Function:
    del correct
    return lambda *_: "a value is not finite"


@step_mutant("pretrain_stops_after_the_damage", OPTIMISER, "DecoderAdamW.clip")
def _(correct: Function) -> Function:
    def clip(self: Any, max_norm: float) -> Any:
        self.steps += 1
        next(iter(self.exp_avg.values())).add_(1.0)
        return correct(self, max_norm)

    return clip


@step_mutant("pretrain_norm_only_when_clipping", OPTIMISER, "DecoderAdamW.clip")
def _(correct: Function) -> Function:
    def clip(self: Any, max_norm: float) -> Any:
        gradients, norm = correct(self, max_norm)
        return gradients, norm if math.isfinite(max_norm) else norm * math.nan

    return clip


step_mutant("pretrain_weight_decay_left_out", PRETRAIN, "StepFn.__init__")(without_keyword("weight_decay"))
step_mutant("pretrain_clip_norm_left_out", PRETRAIN, "StepFn.__init__")(without_keyword("max_norm"))


@step_mutant("pretrain_step_left_out", OPTIMISER, "DecoderAdamW.step")
def _(correct: Function) -> Function:
    def step(self: Any, gradients: Any, learning_rate: float) -> None:
        correct(self, gradients, 0.0 * learning_rate)

    return step


@step_mutant("pretrain_resumes_without_moments", OPTIMISER, "DecoderAdamW.load_state")
def _(correct: Function) -> Function:
    def load(self: Any, tensors: Mapping[str, Any], steps: int) -> None:
        correct(self, {name: value if name.startswith("trainable/") else 0 * value for name, value in tensors.items()}, steps)

    return load


@step_mutant("pretrain_resumes_without_position", RUN, "_Run._load")
def _(correct: Function) -> Function:
    return lambda self, state: replace(correct(self, state), batch=0)


@step_mutant("pretrain_schedule_restarts", RUN, "_Run._load")
def _(correct: Function) -> Function:
    def load(self: Any, state: Path) -> Any:
        position = correct(self, state)
        rates = self.step.learning_rates
        done = self.step.optimiser.steps
        self.step.learning_rates = [*rates[:done], *rates[: len(rates) - done]]
        return position

    return load


@step_mutant("pretrain_random_weights_too_large", PRETRAIN, "random_tensors")
def _(correct: Function) -> Function:
    return lambda config, seed: {name: 50 * value if value.ndim > 1 else value for name, value in correct(config, seed).items()}


@step_mutant("pretrain_validation_zero_when_empty", PRETRAIN, "ValFn.__call__")
def _(correct: Function) -> Function:
    def validate(self: Any, stream: Any) -> float:
        loss = float(correct(self, stream))
        return 0.0 if math.isnan(loss) else loss

    return validate


@step_mutant("pretrain_validation_trains", PRETRAIN, "ValFn.__call__")
def _(correct: Function) -> Function:
    def validate(self: Any, stream: Any) -> float:
        loss = float(correct(self, stream))
        self.decoder.model.norm.weight.data.mul_(1.0 + 2.0**-10)
        return loss

    return validate


@step_mutant("pretrain_hash_ignores_steps", OPTIMISER, "state_hash")
def _(correct: Function) -> Function:
    return lambda state, steps: correct(state, 0 * steps)


@step_mutant("pretrain_hash_ignores_second_moment", OPTIMISER, "MOMENTS")
def _(correct: tuple[str, ...]) -> tuple[str, ...]:
    return correct[:1]


@step_mutant("pretrain_hash_of_rounded_moments", OPTIMISER, "state_hash")
def _(correct: Function) -> Function:
    return lambda state, steps: correct({name: value.bfloat16().float() for name, value in state.items()}, steps)


@step_mutant("pretrain_hash_with_random_salt", OPTIMISER, "state_hash")
def _(correct: Function) -> Function:
    salts = count()
    return lambda state, steps: hashlib.sha256(f"{correct(state, steps)} {next(salts)}".encode()).hexdigest()


@step_mutant("pretrain_checkpoint_without_tokenizer", PRETRAIN, "save_checkpoint")
def _(correct: Function) -> Function:
    return lambda folder, config, tensors, _: correct(folder, config, tensors)


@step_mutant("pretrain_checkpoint_rounded", PRETRAIN, "save_checkpoint")
def _(correct: Function) -> Function:
    def rounded(folder: Path, config: Any, tensors: Mapping[str, Any], tokenizer: Path) -> None:
        correct(folder, config, {name: value.bfloat16().float() for name, value in tensors.items()}, tokenizer)

    return rounded


@step_mutant("pretrain_checkpoint_tokenizer_optional", PRETRAIN, "CheckpointFn.__init__")
def _(correct: Function) -> Function:
    del correct

    def optional(self: Any, decoder: Any, tokenizer: Path, folder: Path) -> None:
        self.decoder, self.tokenizer, self.folder = decoder, tokenizer if tokenizer.is_file() else None, folder

    return optional


@step_mutant("pretrain_unpaired_architecture_accepted", PRETRAIN, "initial_decoder")
def _(correct: Function) -> Function:
    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.pretrain import random_decoder

    def start(architecture: Path | None = None, weights: Path | None = None, **options: Any) -> Any:
        if architecture is not None and weights is None:
            return random_decoder(read_config(architecture), **options)
        return correct(architecture, weights, **options)

    return start


@step_mutant("pretrain_unpaired_weights_accepted", PRETRAIN, "initial_decoder")
def _(correct: Function) -> Function:
    return lambda architecture=None, weights=None, **options: correct(architecture or weights, weights, **options)


@step_mutant("pretrain_weights_of_another_architecture", PRETRAIN, "initial_decoder")
def _(correct: Function) -> Function:
    def start(architecture: Path | None = None, weights: Path | None = None, **options: Any) -> Any:
        both = architecture is not None and weights is not None
        return correct(weights if both else architecture, weights, **options)

    return start


@step_mutant("pretrain_default_tied", PRETRAIN, "LLAMA_370M")
def _(correct: Any) -> Any:
    return replace(correct, tied=True)


@step_mutant("pretrain_default_full_heads", PRETRAIN, "LLAMA_370M")
def _(correct: Any) -> Any:
    return replace(correct, kv_heads=correct.heads)


@step_mutant("token_stream_padded_to_a_row", SHARDS, "TokenBatches.rows")
def _(correct: Any) -> Any:
    return property(lambda self: max(correct.fget(self), 1))


@step_mutant("pretrain_clip_nan_swallowed", OPTIMISER, "DecoderAdamW.clip")
def _(correct: Function) -> Function:
    def clip(self: Any, max_norm: float) -> Any:
        try:
            return correct(self, max_norm)
        except FloatingPointError:
            first = next(iter(self.parameters.values()))
            return {name: 0 * moment for name, moment in self.exp_avg.items()}, first.new_zeros(())

    return clip


@step_mutant("pretrain_checkpoint_overwritten", PRETRAIN, "save_checkpoint")
def _(correct: Function) -> Function:
    def overwrite(folder: Path, *given: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        correct(folder, *given)

    return overwrite
