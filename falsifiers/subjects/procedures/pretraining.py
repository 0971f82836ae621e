"""Pre-training as a subject runs it: token shards and their batches, runs, validation, checkpoints, the hash of the optimiser's state."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.impl import decoder_optimiser, pretrain
from blackswan.impl.checkpoint import load_decoder
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import Decoder, parameter_count
from blackswan.impl.pretrain_run import PretrainResult, PretrainSettings, PretrainStep
from blackswan.impl.pretrain_run import pretrain as run
from blackswan.impl.token_shards import TokenBatch, TokenBatches, TokenShards
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]
Outputs = dict[str, Array]


class _KilledError(Exception):
    """What stops a run from outside."""


def _decoder(scalars: Scalars, device: torch.device) -> Decoder:
    if "checkpoint" in scalars:
        return load_decoder(Path(scalars["checkpoint"]), dtype=torch.float32, device=device)
    return pretrain.random_decoder(DecoderConfig(**scalars["architecture"]), seed=scalars["seed"], device=device)


def _parameters(decoder: Decoder) -> Outputs:
    return {f"parameters/{name}": value.detach().cpu().numpy().copy() for name, value in decoder.named_parameters()}


def _batches(path: str, scalars: Scalars, seed: int | None) -> TokenBatches:
    return TokenBatches(TokenShards(Path(path), scalars["vocab"]), batch=scalars["batch"], seq=scalars["seq"], seed=seed)


def read_token_batches(scalars: Scalars, device: torch.device) -> Outputs:
    """The rows of an epoch from a batch on: input_ids and mask [rows, seq], and the number of each row's batch [rows]."""
    del device
    batches = _batches(scalars["path"], scalars, scalars["seed"])
    found = list(batches.epoch(scalars["epoch"], scalars["start"]))
    empty = torch.zeros(0, scalars["seq"], dtype=torch.int64)
    return {
        "input_ids": torch.cat([empty, *(batch.input_ids for batch in found)]).numpy(),
        "mask": torch.cat([empty.bool(), *(batch.mask for batch in found)]).numpy(),
        "batches": np.repeat(np.arange(len(found)), [len(batch.mask) for batch in found]),
        "length": np.asarray(len(batches)),
    }


def pretrain_run(scalars: Scalars, device: torch.device) -> Outputs:
    """A run, up to its end or to the step `stop_after`; with `resume` the rest of it."""
    decoder = _decoder(scalars, device)
    validation = None if scalars.get("validation") is None else _batches(scalars["validation"], scalars, None)
    steps: list[PretrainStep] = []

    def on_step(step: PretrainStep) -> None:
        steps.append(step)
        if step.step == scalars.get("stop_after"):
            raise _KilledError

    result = PretrainResult((), (), "")
    with suppress(_KilledError):
        result = run(
            decoder,
            _batches(scalars["path"], scalars, scalars["seed"]),
            validation,
            PretrainSettings(**scalars["settings"]),
            Path(scalars["output"]),
            Path(scalars["tokenizer"]),
            resume=scalars.get("resume", False),
            on_step=on_step,
        )
    curves = {field.name: np.asarray([getattr(step, field.name) for step in steps]) for field in fields(PretrainStep)}
    validations = np.asarray([epoch.validation_loss for epoch in result.epochs], np.float64)
    return curves | {"validation": validations, "state_hash": _text(result.state_hash)} | _parameters(decoder)


def validate_tokens(scalars: Scalars, device: torch.device) -> Outputs:
    """The mean loss of a decoder over a stream, twice, and its parameters before and after."""
    decoder = _decoder(scalars, device)
    before = _parameters(decoder)
    validate, batches = pretrain.ValFn(decoder, scalars["micro_batch"]), _batches(scalars["path"], scalars, None)
    losses = {name: np.asarray(validate(batches.epoch(0))) for name in ("loss", "again")}
    return losses | before | {f"after/{name}": value for name, value in _parameters(decoder).items()}


def optimiser_state(scalars: Scalars, device: torch.device) -> Outputs:
    """The hash and the content of an optimiser's state after some steps, with one bit of a moment flipped where `flip` names it."""
    step = _stepped(scalars, device)
    state = step.optimiser.state()
    if scalars.get("flip") is not None:
        name, at, bit = scalars["flip"]
        values = state[name].view(torch.int32).view(-1)
        values[at] ^= 1 << bit if bit < 31 else -(1 << 31)  # the sign bit of an int32
    count = step.optimiser.steps + scalars.get("more_steps", 0)
    moments = {name: value.cpu().numpy().copy() for name, value in state.items() if not name.startswith("trainable/")}
    return moments | {"steps": np.asarray(count), "state_hash": _text(decoder_optimiser.state_hash(state, count))}


def step_on_bad_weights(scalars: Scalars, device: torch.device) -> Outputs:
    """A step after an element of a parameter was set to `value`. It must raise; a RuntimeError where it raised and changed something."""
    step = _stepped(scalars, device)
    parameter = step.optimiser.parameters[scalars["parameter"]]
    with torch.no_grad():
        parameter.view(-1)[scalars["at"]] = scalars["value"]
    before = {name: value.clone() for name, value in step.optimiser.state().items()}
    try:
        result = step.train(_tokens(scalars, step.optimiser.steps))
    except FloatingPointError as error:
        same = all(torch.equal(value.view(torch.int32), before[name].view(torch.int32)) for name, value in step.optimiser.state().items())
        if not same:
            raise RuntimeError(f"changed parameters or moments, and then: {error}") from error
        raise
    return {"loss": np.asarray(result.loss), "gradient_norm": np.asarray(result.gradient_norm)}


def _stepped(scalars: Scalars, device: torch.device) -> pretrain.StepFn:
    """A step function that has made `steps` steps on random tokens."""
    total = scalars["steps"] + 1
    step = pretrain.StepFn(_decoder(scalars, device), total_steps=total, micro_batch=2, learning_rate=1e-2, schedule="constant")
    for number in range(scalars["steps"]):
        step.train(_tokens(scalars, number))
    return step


def _tokens(scalars: Scalars, number: int) -> TokenBatch:
    rng = np.random.default_rng([scalars["seed"], number])
    return TokenBatch(torch.from_numpy(rng.integers(0, scalars["architecture"]["vocab"], (3, 8))), torch.ones(3, 8, dtype=torch.bool))


def save_pretrain_checkpoint(scalars: Scalars, device: torch.device) -> Outputs:
    """A checkpoint written under `output`: its folder and the decoder's parameters."""
    decoder = _decoder(scalars, device)
    folder = pretrain.CheckpointFn(decoder, Path(scalars["tokenizer"]), Path(scalars["output"]))(scalars["step"])
    return {"folder": np.asarray(str(folder))} | _parameters(decoder)


def initial_decoder(scalars: Scalars, device: torch.device) -> Outputs:
    """The decoder that a run starts from."""
    architecture, weights = (None if scalars[name] is None else Path(scalars[name]) for name in ("architecture", "weights"))
    return _parameters(pretrain.initial_decoder(architecture, weights, device=device))


def default_architecture(scalars: Scalars, device: torch.device) -> Outputs:
    """The sizes of the architecture that a run has where none is given, and the number of its parameters."""
    del scalars, device
    config = pretrain.LLAMA_370M
    sizes = {field.name: np.asarray(getattr(config, field.name)) for field in fields(config)}
    return sizes | {"parameters": np.asarray(parameter_count(config))}


def _text(text: str) -> Array:
    return np.frombuffer(text.encode(), np.uint8)
