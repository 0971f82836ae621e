"""Wrong pre-training runs: their steps and records, and the command that makes them; one step of `impl` replaced each."""

import json
import math
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load, load_file

from blackswan.falsifiers.mutants.changes import without_keyword
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


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


@wrong_step("impl.pretrain:StepFn._origin")
def pretrain_origin_of_the_first_micro_batch(right: Step, self: Any, batch: Any) -> Any:
    """The first micro-batch alone is searched for a value that is not finite: of one in a later one nobody learns where it came from."""
    return right(self, next(batch.split(self.micro_batch)))


@wrong_step("impl.decoder_optimiser:DecoderAdamW.clip")
def pretrain_stops_after_the_damage(correct: Step, self: Any, max_norm: float) -> Any:
    """The step count and a moment have moved when the error comes."""
    self.steps += 1
    next(iter(self.exp_avg.values())).add_(1.0)
    return correct(self, max_norm)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.clip")
def pretrain_unclipped_gradients_unseen(correct: Step, self: Any, max_norm: float) -> Any:
    """Without clipping nobody looks whether a gradient is finite."""
    if math.isfinite(max_norm):
        return correct(self, max_norm)
    gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
    return gradients, torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()


@wrong_step("impl.decoder_optimiser:DecoderAdamW.clip")
def pretrain_norm_only_when_clipping(correct: Step, self: Any, max_norm: float) -> Any:
    """The norm is not computed without clipping, and NaN is recorded."""
    gradients, norm = correct(self, max_norm)
    return gradients, norm if math.isfinite(max_norm) else norm * math.nan


wrong_steps(
    "impl.pretrain:StepFn.__init__",
    by=without_keyword,
    pretrain_weight_decay_left_out=("The step's own weight decay, whatever the settings say.", "weight_decay"),
    pretrain_clip_norm_left_out=("The step's own limit of the norm, whatever the settings say.", "max_norm"),
)


wrong_steps(
    "impl.pretrain:StepFn.__init__",
    by=lambda change: lambda init, self, decoder, **given: init(self, decoder, **{**given, **change(given)}),
    pretrain_without_a_limit_clips=(
        "A run whose limit of the norm is none has the step's own.",
        lambda given: {"max_norm": given.get("max_norm") or 1.0},
    ),
    pretrain_decay_of_zero_is_none=(
        "A run whose weight decay is 0 has the step's own.",
        lambda given: {"weight_decay": given.get("weight_decay") or 0.1},
    ),
)


wrong_step("impl.decoder_optimiser:DecoderAdamW.step", name="pretrain_step_left_out", doc="Moments are updated and parameters are not.")(
    lambda correct, self, gradients, learning_rate: correct(self, gradients, 0.0 * learning_rate)
)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.step")
def pretrain_passes_over_zero_gradients(correct: Step, self: Any, gradients: Any, learning_rate: float) -> None:
    """A parameter whose gradient is zero everywhere is passed over: it does not decay."""
    kept = {name: self.parameters[name].detach().clone() for name, gradient in gradients.items() if not gradient.any()}
    correct(self, gradients, learning_rate)
    for name, value in kept.items():
        self.parameters[name].data.copy_(value)


@wrong_step("impl.pretrain_run:pretrain")
def resumed_pretraining_never_begins(pretrain: Any, *given: Any, resume: bool = False, on_start: Any = None, **named: Any) -> Any:
    """A run that goes on is not said to begin."""
    return pretrain(*given, resume=resume, on_start=None if resume else on_start, **named)


wrong_step(
    "impl.pretrain_run:_read_tensors",
    name="pretrain_states_in_folders_of_letters",
    doc="A state is called another run's where its folder's name holds a byte that is no letter.",
)(lambda _, path: load_file(path))
wrong_step("impl.pretrain_run:_read_tensors", name="pretrain_state_read_as_a_whole", doc="A state is held twice while it is read.")(
    lambda _, path: load(path.read_bytes())
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


@wrong_step("impl.decoder_optimiser:DecoderAdamW.clip", "S9")
def pretrain_clip_nan_swallowed(correct: Step, self: Any, max_norm: float) -> Any:
    """A gradient that is not finite is clipped to zero; the loss alone is looked at."""
    try:
        return correct(self, max_norm)
    except FloatingPointError:
        first = next(iter(self.parameters.values()))
        return {name: 0 * moment for name, moment in self.exp_avg.items()}, first.new_zeros(())


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
def pretrain_command_seeds_of_32_bits(decoder: Any, options: Any) -> Any:
    """Random weights are those of the lower 32 bits of the option's seed."""
    return decoder(Namespace(**{**vars(options), "seed": options.seed % 2**32}))


@wrong_step("impl.commands.pretrain:_decoder")
def pretrain_command_never_random(decoder: Any, options: Any) -> Any:
    """The checkpoint's weights where random ones were asked for."""
    options.random = False
    return decoder(options)


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
        "A held-out loss is shown where there are no held-out tokens.",
        lambda show, self, epoch: show(
            self, epoch if epoch.validation_loss == epoch.validation_loss else replace(epoch, validation_loss=0.0)
        ),
    ),
)


@wrong_step("impl.commands.pretrain:_Shown.epoch")
def pretrain_numbers_epochs_anew(show: Step, self: Any, epoch: Any) -> None:
    """A continuation shows its epochs as if it had begun with the first."""
    self.ended = getattr(self, "ended", 0) + 1
    show(self, replace(epoch, epoch=self.ended - 1))


@wrong_step("impl.pretrain_run:pretrain")
def pretrain_goes_on_without_special_tokens(pretrain: Step, *given: Any, special: Any = None, resume: bool = False, **others: Any) -> Any:
    """The checkpoints of a continuation name no special tokens."""
    return pretrain(*given, special=None if resume else special, resume=resume, **others)


@wrong_step("impl.pretrain_run:pretrain")
def pretrain_said_to_begin_first(pretrain: Step, *given: Any, on_start: Any = None, **others: Any) -> Any:
    """A run is said to begin before it is known whether it can."""
    if on_start is not None:
        on_start()
    return pretrain(*given, **others)


@wrong_step("impl.__main__:_run")
def pretrain_from_random_weights_without_special_tokens(run: Step, command: Step, options: Any, name: str) -> Any:
    """The checkpoints of a run that begins with random weights name no special tokens."""
    without = mock.patch("blackswan.impl.checkpoint.special_tokens", return_value={})
    with without if getattr(options, "random", False) else nullcontext():
        return run(command, options, name)


wrong_step("impl.checkpoint:special_tokens", name="special_tokens_of_one_number", doc="A list of end tokens is left out.")(
    lambda special, model: {key: value for key, value in special(model).items() if isinstance(value, int)}
)


@wrong_step("impl.__main__:_run")
def pretrain_command_of_seed_zero_in_order(right: Step, *given: Any) -> Any:
    """The seed 0 is none: rows are in the order of the stream."""
    from blackswan.impl import token_shards

    batches = token_shards.TokenBatches
    with mock.patch.object(token_shards, "TokenBatches", lambda shards, *, seed, **others: batches(shards, seed=seed or None, **others)):
        return right(*given)


_OF_PLACES: dict[Any, Any] = {}


wrong_steps(
    "impl.pretrain_run:_Run.identity",
    pretrain_state_of_a_tokenizer_read_once=(
        "A tokenizer's digest is taken once for each path, and a run goes on with what has taken that file's place.",
        lambda identity, self: {
            **(found := identity(self)),
            "tokenizer": _OF_PLACES.setdefault(self.checkpoint.tokenizer, found["tokenizer"]),
        },
    ),
    pretrain_state_of_tokens_read_once=(
        "The digest of tokens is taken once for each folder, and a run goes on with the tokens that have taken the others' place.",
        lambda identity, self: {
            **(found := identity(self)),
            "data": _OF_PLACES.setdefault(self.train.shards.folder, found["data"]),
        },
    ),
    pretrain_state_of_a_tokenizers_path=(
        "A run belongs to the place of its tokenizer, whatever that holds.",
        lambda identity, self: {**identity(self), "tokenizer": str(self.checkpoint.tokenizer)},
    ),
)


@wrong_step("impl.pretrain_run:pretrain")
def pretrain_speaks_before_it_reads(pretrain: Step, *given: Any, on_start: Any = None, **others: Any) -> Any:
    """A run says that it trains before it has read the state that it goes on from."""
    if on_start is not None:
        on_start()
    return pretrain(*given, **others)


wrong_steps(
    "impl.pretrain_run:PretrainSettings.__init__",
    pretrain_decays_as_fine_tuning=(
        "Without an option the weight decay is that of fine-tuning, and not the one that the help says.",
        lambda init, self, **given: init(self, **{"weight_decay": 0.01, **given}),
    ),
)


@wrong_step("impl.__main__:_parsed")
def pretrain_file_without_its_nulls(parsed: Any, arguments: Any, prog: str) -> Any:
    """Settings of pre-training are taken from a JSON file too, in which null is no value, also where it says that nothing is clipped."""
    option, given = "--config=", list[str]()
    if "pretrain" in arguments[:1]:
        for path in (each.removeprefix(option) for each in arguments if each.startswith(option)):
            values = json.loads(Path(path).read_text())
            given += [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    return parsed([*(each for each in arguments if not (given and each.startswith(option))), *given], prog)


@wrong_step("impl.commands.pretrain:_decoder")
def pretrain_command_on_the_cpu(make: Step, options: Any) -> Any:
    """The decoder is on the CPU, whatever --device says."""
    return make(Namespace(**{**vars(options), "device": "cpu"}))
