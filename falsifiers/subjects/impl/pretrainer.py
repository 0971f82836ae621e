"""Pre-training as `impl` does it: token shards and their batches, runs, validation, checkpoints, the state of the optimiser."""

import argparse
import io
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.subjects.conversion import config_of
from blackswan.falsifiers.subjects.doors.files import StreamRows, Tokens
from blackswan.falsifiers.subjects.doors.training import Architecture, Pretraining, PretrainingRecord
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.impl.kill_points import flushes
from blackswan.falsifiers.subjects.protocol import Session
from blackswan.impl import decoder_optimiser, pretrain, pretrain_run
from blackswan.impl.checkpoint import load_decoder
from blackswan.impl.commands import pretrain as command
from blackswan.impl.decoder import Decoder, parameter_count
from blackswan.impl.token_shards import TokenBatch, TokenBatches, TokenShards
from blackswan.impl.tokens import load_tokenizer
from blackswan.reference.table import Array

STEPS = 8
"""No check trains a decoder for longer, outside a run."""


class Pretrainer(Door):
    """Language-model pre-training: streams of tokens, runs, their parts, and what they start from."""

    def epoch(self, tokens: Tokens, epoch: int, start: int = 0) -> StreamRows:
        """The rows of an epoch from batch `start` on."""
        batches = _batches(tokens)
        found = list(batches.epoch(epoch, start))
        empty = torch.zeros(0, tokens.seq, dtype=torch.int64)
        ids, mask = torch.cat([empty, *(batch.input_ids for batch in found)]), torch.cat([empty.bool(), *(batch.mask for batch in found)])
        return StreamRows(ids.numpy(), mask.numpy(), [len(batch.mask) for batch in found], len(batches))

    def run(
        self, problem: Pretraining, stop_after: int | None = None, resume: bool = False, stop_at: int | None = None
    ) -> PretrainingRecord:
        """A run, killed after a step where one is named, or at one of its flushes, from 0; or, resumed, the rest of one that was killed.

        It is killed by an exception: of the function that hears of each step, or of the one that flushes a file.
        """
        decoder, steps, events, rows = self._random(problem.architecture, problem.seed), [], list[str](), list[int]()
        decoder.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
        train, validation = _batches(problem.train), None if problem.validation is None else _batches(problem.validation)
        settings = pretrain_run.PretrainSettings(**problem.settings)

        def on_step(step: pretrain_run.PretrainStep) -> None:
            steps.append(step)
            if step.step == stop_after:
                raise _KilledError

        def on_flush(name: str) -> None:
            events.append(name)
            if len(events) - 1 == stop_at:
                raise _KilledError

        result = pretrain_run.PretrainResult((), (), "")
        with suppress(_KilledError), flushes(problem.output, on_flush):
            given = (decoder, train, validation, settings, problem.output, problem.tokenizer)
            result = pretrain_run.pretrain(*given, resume=resume, on_step=on_step)
        losses = [epoch.validation_loss for epoch in result.epochs]
        return PretrainingRecord(steps, losses, _parameters(decoder), result.state_hash, events, rows)

    def command(self, model: Path, problem: Pretraining, *flags: str) -> Mapping[str, Array]:
        """The parameters of the last checkpoint that the command writes, which starts at that model."""
        options = {"model": model, "tokens": problem.train.folder, "output": problem.output, "device": self._device}
        options |= {"batch": problem.train.batch, "seq": problem.train.seq, "seed": problem.train.seed}
        options |= {} if problem.validation is None else {"validation": problem.validation.folder}
        parser = argparse.ArgumentParser()
        command.add_options(parser)
        given = [f"--{name.replace('_', '-')}={value}" for name, value in {**options, **problem.settings}.items()]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            command.run(parser.parse_args([*given, *flags]))
        last = max((problem.output / pretrain_run.CHECKPOINTS).iterdir())
        return _parameters(load_decoder(last, dtype=torch.float32))

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a run, as Python makes them of those that are given."""
        return asdict(pretrain_run.PretrainSettings(**given))

    def random(self, architecture: Architecture, seed: int) -> "TrainedDecoder":
        """A decoder with random weights."""
        return TrainedDecoder(self._random(architecture, seed))

    def load(self, folder: Path, dtype: str = "float32", nf4: bool = False) -> "TrainedDecoder":
        """The decoder of a checkpoint, whose tokenizer can be read too."""
        load_tokenizer(folder, 16)
        return TrainedDecoder(load_decoder(folder, dtype=getattr(torch, dtype), device=self._device, nf4=nf4))

    def initial(self, architecture: Path | None, weights: Path | None) -> "TrainedDecoder":
        """The decoder that a run of these checkpoint folders starts from."""
        return TrainedDecoder(pretrain.initial_decoder(architecture, weights, device=self._device))

    def default_architecture(self) -> tuple[Architecture, int]:
        """The architecture that is trained where none is given, and the number of its parameters."""
        return vars(pretrain.LLAMA_370M), parameter_count(pretrain.LLAMA_370M)

    def state_hash(self, steps: int, moments: Mapping[str, Array]) -> str:
        """The hash of an optimiser's state, in hexadecimal."""
        return decoder_optimiser.state_hash({name: torch.tensor(value, device=self._device) for name, value in moments.items()}, steps)

    def _random(self, architecture: Architecture, seed: int) -> Decoder:
        return pretrain.random_decoder(config_of(architecture), seed=seed, device=self._device)


class TrainedDecoder(Session):
    """A decoder that can be trained, validated and saved."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def parameters(self) -> Mapping[str, Array]:
        """The parameters as they are now."""
        return _parameters(self._decoder)

    def overwrite(self, parameter: str, index: int, value: float) -> None:
        """Puts a value into the flattened parameter."""
        self._decoder.get_parameter(parameter).data.view(-1)[index] = value

    def train(self, input_ids: Array) -> float:
        """The loss of an optimiser step on all parameters, on rows [batch, seq] without padding."""
        return self._step.train(TokenBatch(torch.from_numpy(input_ids), torch.ones(input_ids.shape, dtype=torch.bool))).loss

    def moments(self) -> tuple[int, Mapping[str, Array]]:
        """Steps made, and both moments of each parameter: `exp_avg/<parameter>` and `exp_avg_sq/<parameter>`."""
        optimiser = self._step.optimiser
        return optimiser.steps, {name: _copy(value) for name, value in optimiser.state().items() if not name.startswith("trainable/")}

    @cached_property
    def _step(self) -> pretrain.StepFn:
        return pretrain.StepFn(self._decoder, total_steps=STEPS, micro_batch=2, learning_rate=1e-2, schedule="constant")

    def validate(self, tokens: Tokens, micro_batch: int) -> float:
        """The mean loss over all tokens of an epoch that are predicted; NaN where none is."""
        return pretrain.ValFn(self._decoder, micro_batch)(_batches(tokens).epoch(0))

    def save(self, output: Path, tokenizer: Path, step: int) -> Path:
        """Writes the checkpoint after a step, and returns its folder."""
        return pretrain.CheckpointFn(self._decoder, tokenizer, output)(step)


class _KilledError(Exception):
    """Stops a run from outside."""


def _batches(tokens: Tokens) -> TokenBatches:
    return TokenBatches(TokenShards(tokens.folder, tokens.vocab), batch=tokens.batch, seq=tokens.seq, seed=tokens.seed)


def _parameters(decoder: Decoder) -> Mapping[str, Array]:
    return {name: _copy(value.detach()) for name, value in decoder.named_parameters()}


def _copy(value: torch.Tensor) -> Array:
    return np.array(value.cpu())
