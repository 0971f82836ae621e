"""Language-model pre-training: the step, validation and checkpoint functions, and where a decoder to train comes from."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blackswan.impl import validation
from blackswan.impl.checkpoint import TOKENIZER, load_checkpoint, read_config, save_checkpoint
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import Decoder, parameter_count, parameter_shapes, random_tensors
from blackswan.impl.decoder_optimiser import DecoderAdamW
from blackswan.impl.dispatch import call, scope
from blackswan.impl.nonfinite import origin_of
from blackswan.impl.optimiser import require_not_negative
from blackswan.impl.tensors import Tensors
from blackswan.impl.token_shards import TokenBatch
from blackswan.impl.warm_up import SHAPES, Constant, small, warmed

LLAMA_370M = DecoderConfig(
    family="llama",
    vocab=50257,
    hidden=1024,
    intermediate=2816,
    layers=24,
    heads=16,
    kv_heads=4,
    head_dim=64,
    eps=1e-5,
    theta=10000.0,
    tied=False,
    max_positions=2048,
)
"""What is trained where neither an architecture nor weights are given: 373,509,120 parameters."""


@dataclass(frozen=True)
class StepResult:
    """Mean loss of a batch before the step, over the tokens predicted, and the gradient's global norm before clipping."""

    loss: float
    gradient_norm: float
    tokens: int


class StepFn:
    """Optimiser steps on all parameters of a decoder: mean loss over the tokens predicted, clip by the global norm, AdamW.

    A batch is worked off in micro-batches of `micro_batch` rows, each weighted by the tokens that it predicts. The rate of each of the
    `total_steps` steps is the schedule's.

    Raises a ValueError for a learning rate or a weight decay below 0 or not finite, and for a micro_batch below 1.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        total_steps: int,
        micro_batch: int,
        learning_rate: float,
        warmup_fraction: float = 0.06,
        schedule: str = "cosine",
        weight_decay: float = 0.1,
        max_norm: float | None = 1.0,
    ) -> None:
        self.decoder, self.micro_batch = decoder, micro_batch
        require_not_negative("learning_rate", learning_rate)
        if micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}: expected a positive integer")
        self.max_norm = math.inf if max_norm is None else max_norm
        self.optimiser = DecoderAdamW(decoder, weight_decay)
        schedule_of_run = {"total_steps": total_steps, "peak": learning_rate, "warmup_fraction": warmup_fraction, "kind": schedule}
        rates: Tensor = call("learning_rate_schedule", "learning_rate_schedule", **schedule_of_run)
        self.learning_rates: list[float] = rates.tolist()

    def __call__(self, stream: Iterator[TokenBatch]) -> StepResult | None:
        """One step on the next batch; None where the stream is exhausted: the epoch is over, and nothing has changed."""
        batch = next(stream, None)
        return None if batch is None else self.train(batch)

    def train(self, batch: TokenBatch) -> StepResult:
        """One step on a batch.

        Raises a ValueError for a batch that predicts nothing and an id outside the vocabulary, an IndexError after the last step of the
        schedule, and a FloatingPointError that says where the first value that is not finite came from; nothing has changed then.
        """
        if self.optimiser.steps >= len(self.learning_rates):
            raise IndexError(f"the schedule ends after {len(self.learning_rates)} steps")
        if batch.predicted == 0:
            raise ValueError("no row of the batch has two neighbouring tokens: there is no next token to predict")
        batch = batch.to(self.optimiser.device)
        try:
            with scope(f"steps.{self.optimiser.steps}"):
                return self._step(batch)
        except FloatingPointError as error:
            where = self._origin(batch) or error
            raise FloatingPointError(f"step {self.optimiser.steps + 1}: {where}; nothing was changed") from None
        finally:
            self.optimiser.zero_gradients()

    def _origin(self, batch: TokenBatch) -> str | None:
        for _, part in _predicting(batch, self.micro_batch):
            loss = partial(self.decoder.loss, part.input_ids, part.mask)
            where = origin_of(self.decoder, loss, list(self.optimiser.parameters.values()))
            if where is not None:
                return where
        return None

    def _step(self, batch: TokenBatch) -> StepResult:
        self.optimiser.zero_gradients()
        total, loss = batch.predicted, 0.0
        for index, (first, part) in enumerate(_predicting(batch, self.micro_batch)):
            with scope(f"micro.{index}"), validation.counted_from(first):
                mean = self.decoder.loss(part.input_ids, part.mask)
            share = part.predicted / total
            (mean * share).backward()  # type: ignore[no-untyped-call]  # torch
            loss += float(mean.detach()) * share
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        clipped, norm = self.optimiser.clip(self.max_norm)
        self.optimiser.step(clipped, self.learning_rates[self.optimiser.steps])
        return StepResult(loss, float(norm), total)


class ValFn:
    """Mean held-out loss of a decoder. It changes nothing."""

    def __init__(self, decoder: Decoder, micro_batch: int) -> None:
        self.decoder, self.micro_batch = decoder, micro_batch

    @torch.no_grad()
    def __call__(self, stream: Iterable[TokenBatch]) -> float:
        """The mean over all tokens predicted, whatever batch they are in; NaN where there is nothing to average."""
        losses, counts = [], []
        device = next(self.decoder.parameters()).device
        for batch in stream:
            for first, part in _predicting(batch.to(device), self.micro_batch):
                with validation.counted_from(first):
                    losses.append(float(self.decoder.loss(part.input_ids, part.mask)))
                counts.append(part.predicted)
        return math.fsum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts) if counts else math.nan


class CheckpointFn:
    """Writes checkpoints under a folder: weights, architecture, `special_tokens` and tokenizer, what it takes to use the model elsewhere.

    Raises a FileNotFoundError where the tokenizer is not there, before the first step rather than after the last.
    """

    def __init__(self, decoder: Decoder, tokenizer: Path, folder: Path, special: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.is_file():
            raise FileNotFoundError(
                f"{tokenizer}: no such file; a checkpoint without its {TOKENIZER} cannot be used, name the one of the data"
            )
        self.decoder, self.tokenizer, self.folder, self.special = decoder, tokenizer, folder, special

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after a step."""
        return self.folder / f"step-{step:08d}"

    def __call__(self, step: int) -> Path:
        """Writes the checkpoint, whole or not at all, and returns its folder. Raises a FileExistsError where it exists."""
        save_checkpoint(self.path(step), self.decoder.config, dict(self.decoder.named_parameters()), self.tokenizer, self.special)
        return self.path(step)


def initial_decoder(
    architecture: Path | None = None, weights: Path | None = None, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Decoder:
    """The decoder that a run starts from, in float32: architecture and weights of checkpoints, or neither and LLAMA_370M at random.

    A checkpoint is a Hugging Face folder or an .apr file, whose quantised tensors are taken as the numbers that they stand for.

    Raises a ValueError where only one of them is given, for an encoder, and where the weights are not those of the architecture; and what
    `load_checkpoint` raises.
    """
    if (architecture is None) != (weights is None):
        given, missing = ("an architecture", "weights") if weights is None else ("weights", "an architecture")
        raise ValueError(
            f"{given} ({architecture or weights}) without {missing}: give both, they must match, or neither, for random weights of "
            f"the default ({parameter_count(LLAMA_370M):,} parameters)"
        )
    if architecture is None or weights is None:
        return random_decoder(LLAMA_370M, seed=seed, device=device)
    config = read_config(architecture)
    checkpoint = load_checkpoint(weights)
    if config != checkpoint.config:
        raise ValueError(f"{weights} and {architecture} differ in {_difference(checkpoint.config, config)}; which is meant?")
    return _decoder(config, checkpoint.tensors, torch.device(device))


def random_decoder(config: DecoderConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> Decoder:
    """A decoder with random weights in float32, for an architecture of one's own."""
    return _decoder(config, random_tensors(config, seed), torch.device(device))


def _decoder(config: DecoderConfig, tensors: Tensors, device: torch.device) -> Decoder:
    make = partial(Decoder, dtype=torch.float32, device=device)
    return warmed(device, partial(_rehearse, config, make), partial(make, config, tensors))


def _rehearse(config: DecoderConfig, make: Callable[..., Decoder]) -> None:
    """A step in the widths of the decoder, on two layers with constants for weights."""
    shape = small(config)
    decoder = make(shape, Constant(parameter_shapes(shape), torch.float32, torch.device("cpu")))
    step = StepFn(decoder, total_steps=len(SHAPES), micro_batch=max(size for size, _ in SHAPES), learning_rate=1e-4)
    for rows in SHAPES:
        ids = torch.zeros(rows, dtype=torch.int64, device="cpu")
        step.train(TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool)))


def _predicting(batch: TokenBatch, size: int) -> Iterator[tuple[int, TokenBatch]]:
    """The micro-batches that have a token to predict, with the place of their first row: a row of one token has none."""
    return ((index * size, part) for index, part in enumerate(batch.split(size)) if part.predicted)


def _difference(one: DecoderConfig, other: DecoderConfig) -> str:
    values: Mapping[str, object] = vars(other)
    return ", ".join(f"{name} ({value!r}, {values[name]!r})" for name, value in vars(one).items() if value != values[name])
