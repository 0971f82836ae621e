"""Wrong streams of tokens: rows, batches, order and places of a pre-training run's data, and shards that are damaged."""

import hashlib
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.mutants.registry import wrong_step
from blackswan.impl.samples import epoch_order
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


@wrong_step("impl.token_shards:TokenBatch.predicted")
def pretrain_tokens_of_a_byte(_: Step, self: Any) -> int:
    """The predicted tokens of a row are counted by a byte."""
    return int(sum(((self.mask[:, :-1] & self.mask[:, 1:]).sum(dim=1) % 2**8).tolist()))


wrong_step(
    "impl.token_shards:TokenBatch.predicted", name="pretrain_tokens_of_16_bits", doc="A batch's predicted tokens are counted in 16 bits."
)(lambda _, self: int((self.mask[:, :-1] & self.mask[:, 1:]).sum()) % 2**16)
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


@wrong_step("impl.token_shards:TokenBatches._rows")
def token_rows_on_the_default_device(correct: Step, *given: Any) -> Any:
    """Rows of tokens are on torch's default device, which a notebook may make a GPU for the whole process."""
    return correct(*given).to(torch.get_default_device())


@wrong_step("impl.token_shards:TokenBatches.epoch")
def token_epochs_share_their_order(_: Step, self: Any, epoch: int, start: int = 0) -> Iterator[Any]:
    """The order of the rows is kept with the stream, so that an epoch that is read beside another one goes on in the order of that."""
    self._order = range(self.rows) if self.seed is None else epoch_order(self.rows, self.seed, epoch)
    for first in range(start * self.batch, self.rows, self.batch):
        yield self._rows(self._order[first : first + self.batch])


@wrong_step("impl.token_shards:TokenBatches.rows")
def token_stream_padded_to_a_row(rows: Step, self: Any) -> int:
    """A stream of one token gives a row, of padding."""
    return max(int(rows(self)), 1)


wrong_step("impl.token_shards:epoch_order", name="token_orders_of_the_next_seed", doc="The next epoch is that of the next seed.")(
    lambda correct, rows, seed, epoch: correct(rows, seed + epoch, 0)
)
wrong_step(
    "impl.token_shards:TokenBatches.rows", name="token_stream_of_minus_one_row", doc="A stream of no tokens has one row less than none."
)(lambda _, self: -(-(len(self.shards) - 1) // (self.seq - 1)))


@wrong_step("impl.token_shards:TokenBatches.epoch")
def token_seed_of_zero_is_none(correct: Step, self: Any, *given: Any) -> Any:
    """The seed 0 is none: rows are in the order of the stream."""
    batches = copy(self)
    batches.seed = self.seed or None
    return correct(batches, *given)


@wrong_step("impl.token_shards:TokenShards.__init__")
def token_ends_of_32_bits(correct: Step, self: Any, *given: Any) -> None:
    """The ends of the shards are counted in 32 bits."""
    correct(self, *given)
    self._ends = self._ends.astype(np.int32)


@wrong_step("impl.token_shards:_open_shard")
def token_shards_held_open(correct: Step, path: Path, entry: Any, dtype: Any, vocab: int) -> Any:
    """Every shard is mapped as long as the stream is there, and with it a file is open: a thousand shards are too many."""
    correct(path, entry, dtype, vocab)
    return np.memmap(path, dtype, "r")


@wrong_step("impl.token_shards:_is_entry")
def token_shards_by_a_detour(right: Step, entry: Any) -> Any:
    """A shard may be named by a detour, so that it can be listed twice and its tokens are trained on twice."""
    named = isinstance(entry, dict) and isinstance(entry.get("file"), str)
    return right({**entry, "file": entry["file"].removeprefix("./")} if named else entry)


@wrong_step("impl.token_shards:_open_shard")
def token_shard_of_any_length(correct: Step, path: Path, entry: Any, dtype: Any, vocab: int) -> Any:
    """A shard that is longer than the index says is read to its end."""
    there = path.stat().st_size // dtype.itemsize
    return correct(path, {**entry, "tokens": max(entry["tokens"], there)}, dtype, vocab)
