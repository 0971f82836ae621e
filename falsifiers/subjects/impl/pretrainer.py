"""Pre-training as `impl` does it: token shards and their batches, runs, validation, checkpoints, the state of the optimiser."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from blackswan.falsifiers.subjects.doors import (
    Architecture,
    Parameters,
    Pretraining,
    PretrainingRecord,
    PretrainingStep,
    Session,
    StreamRows,
    Tokens,
)
from blackswan.impl import decoder_optimiser, pretrain, pretrain_run
from blackswan.impl.checkpoint import load_decoder
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import Decoder, parameter_count
from blackswan.impl.token_shards import TokenBatch, TokenBatches, TokenShards
from blackswan.impl.tokens import load_tokenizer
from blackswan.reference.table import Array

STEPS = 8
"""No check trains a decoder for longer, outside a run."""


class Pretrainer:
    """See `doors.Pretrainer`."""

    def __init__(self, device: torch.device, path: str | None) -> None:
        del path
        self._device = device

    def epoch(self, tokens: Tokens, epoch: int, start: int = 0) -> StreamRows:
        """The rows of an epoch from a batch on."""
        batches = _batches(tokens)
        found = list(batches.epoch(epoch, start))
        empty = torch.zeros(0, tokens.seq, dtype=torch.int64)
        ids, mask = torch.cat([empty, *(batch.input_ids for batch in found)]), torch.cat([empty.bool(), *(batch.mask for batch in found)])
        return StreamRows(ids.numpy(), mask.numpy(), [len(batch.mask) for batch in found], len(batches))

    def run(self, problem: Pretraining, stop_after: int | None = None, resume: bool = False) -> PretrainingRecord:
        """A run or a part of it; one is killed by an exception of the function that hears of each step."""
        decoder, steps = self._random(problem.architecture, problem.seed), []
        train, validation = _batches(problem.train), None if problem.validation is None else _batches(problem.validation)
        settings = pretrain_run.PretrainSettings(**problem.settings)

        def on_step(step: pretrain_run.PretrainStep) -> None:
            steps.append(PretrainingStep(**vars(step)))
            if step.step == stop_after:
                raise _KilledError

        result = pretrain_run.PretrainResult((), (), "")
        with suppress(_KilledError):
            given = (decoder, train, validation, settings, problem.output, problem.tokenizer)
            result = pretrain_run.pretrain(*given, resume=resume, on_step=on_step)
        return PretrainingRecord(steps, [epoch.validation_loss for epoch in result.epochs], _parameters(decoder), result.state_hash)

    def random(self, architecture: Architecture, seed: int) -> "_Decoder":
        """A decoder with random weights."""
        return _Decoder(self._random(architecture, seed))

    def load(self, folder: Path) -> "_Decoder":
        """The decoder of a checkpoint, once its tokenizer was read."""
        load_tokenizer(folder, 16)
        return _Decoder(load_decoder(folder, dtype=torch.float32, device=self._device))

    def initial(self, architecture: Path | None, weights: Path | None) -> "_Decoder":
        """The decoder that a run starts from."""
        return _Decoder(pretrain.initial_decoder(architecture, weights, device=self._device))

    def default_architecture(self) -> tuple[Architecture, int]:
        """What is trained where none is given."""
        return vars(pretrain.LLAMA_370M), parameter_count(pretrain.LLAMA_370M)

    def state_hash(self, steps: int, moments: Mapping[str, Array]) -> str:
        """The hash of a state."""
        return decoder_optimiser.state_hash({name: torch.tensor(value, device=self._device) for name, value in moments.items()}, steps)

    def _random(self, architecture: Architecture, seed: int) -> Decoder:
        return pretrain.random_decoder(DecoderConfig(**architecture), seed=seed, device=self._device)


class _Decoder(Session):
    """See `doors.TrainedDecoder`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def parameters(self) -> Parameters:
        """The parameters as they are now."""
        return _parameters(self._decoder)

    def overwrite(self, parameter: str, index: int, value: float) -> None:
        """Puts a value into a parameter."""
        self._decoder.get_parameter(parameter).data.view(-1)[index] = value

    def train(self, input_ids: Array) -> float:
        """The loss of a step."""
        return self._step.train(TokenBatch(torch.from_numpy(input_ids), torch.ones(input_ids.shape, dtype=torch.bool))).loss

    def moments(self) -> tuple[int, Mapping[str, Array]]:
        """Copies of the moments."""
        optimiser = self._step.optimiser
        return optimiser.steps, {name: _copy(value) for name, value in optimiser.state().items() if not name.startswith("trainable/")}

    @cached_property
    def _step(self) -> pretrain.StepFn:
        return pretrain.StepFn(self._decoder, total_steps=STEPS, micro_batch=2, learning_rate=1e-2, schedule="constant")

    def validate(self, tokens: Tokens, micro_batch: int) -> float:
        """The mean held-out loss."""
        return pretrain.ValFn(self._decoder, micro_batch)(_batches(tokens).epoch(0))

    def save(self, output: Path, tokenizer: Path, step: int) -> Path:
        """The folder of the checkpoint."""
        return pretrain.CheckpointFn(self._decoder, tokenizer, output)(step)


class _KilledError(Exception):
    """What stops a run from outside."""


def _batches(tokens: Tokens) -> TokenBatches:
    return TokenBatches(TokenShards(tokens.folder, tokens.vocab), batch=tokens.batch, seq=tokens.seq, seed=tokens.seed)


def _parameters(decoder: Decoder) -> Parameters:
    return {name: _copy(value.detach()) for name, value in decoder.named_parameters()}


def _copy(value: torch.Tensor) -> Array:
    return np.array(value.cpu())
