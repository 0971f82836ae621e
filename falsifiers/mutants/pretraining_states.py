"""Wrong states of pre-training runs, and wrong ways of going on from them: one step of `impl` replaced each."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


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


@wrong_step("impl.pretrain_run:_Run.save_when_due")
def pretrain_saves_by_its_start(_: Step, self: Any, step: Any) -> None:
    """The steps between two states are counted anew where a run goes on."""
    from blackswan.impl.pretrain_run import _Position

    self.since = getattr(self, "since", 0) + 1
    if self.settings.save_every is not None and self.since % self.settings.save_every == 0:
        self._save(_Position(step.epoch, step.step - step.epoch * len(self.train)))


@wrong_step("impl.pretrain_run:_Run.save_when_due")
def pretrain_position_since_its_start(correct: Step, self: Any, step: Any) -> None:
    """A state within an epoch has the number of batches since the run went on, not since the epoch began."""
    epoch, count = getattr(self, "since", (step.epoch, 0))
    self.since = (step.epoch, count + 1 if epoch == step.epoch else 1)
    save = self._save
    with mock.patch.object(self, "_save", lambda position: save(replace(position, batch=self.since[1]))):
        correct(self, step)


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


@wrong_step("impl.pretrain_run:_Run._load")
def pretrain_schedule_restarts(correct: Step, self: Any, state: Path) -> Any:
    """The learning-rate schedule starts anew after a resume."""
    position = correct(self, state)
    rates, done = self.step.learning_rates, self.step.optimiser.steps
    self.step.learning_rates = [*rates[:done], *rates[: len(rates) - done]]
    return position


wrong_step("impl.pretrain_run:save_file", name="pretrain_state_in_float32", doc="A state keeps its tensors in float32.")(
    lambda save, tensors, path: save({name: value.float() for name, value in tensors.items()}, path)
)


@wrong_step("impl.pretrain_run:_Run.require_usable")
def pretrain_begins_over_a_state(require: Step, self: Any, resume: bool) -> None:
    """A run begins anew over the state of one that has not ended an epoch."""
    if resume or self.checkpoint.folder.exists():
        require(self, resume)


@wrong_step("impl.token_shards:TokenShards.__init__")
def pretrain_state_of_a_folder_of_tokens(correct: Step, self: Any, folder: Path, vocab: int) -> None:
    """A run belongs to the folder of its tokens, and does not go on where they were moved."""
    correct(self, folder, vocab)
    self.digest += str(folder)


@wrong_step("impl.token_shards:TokenShards.__init__")
def pretrain_state_of_shards_in_any_order(correct: Step, self: Any, folder: Path, vocab: int) -> None:
    """A run belongs to its shards, in whichever order they are."""
    correct(self, folder, vocab)
    self.digest = "".join(sorted(hashlib.sha256(shard.tobytes()).hexdigest() for shard in self._shards))


@wrong_step("impl.pretrain_run:_Run._load")
def pretrain_values_turned_round(correct: Step, self: Any, state: Path) -> Any:
    """A refusal says of the state what the run has, and of the run what the state has."""
    try:
        return correct(self, state)
    except ValueError as error:
        raise ValueError(re.sub("is (.*), this run has (.*); resume", r"is \2, this run has \1; resume", str(error))) from None


@wrong_step("impl.pretrain_run:_Run._load")
def pretrain_torn_state_is_a_failure(correct: Step, self: Any, state: Path) -> Any:
    """A file of tensors that is torn ends a continuation by an error of the library, which names no file."""
    load_file(state / "state.safetensors")
    return correct(self, state)


@wrong_step("impl.pretrain_run:_Run.start")
def pretrain_looks_once(correct: Step, self: Any, resume: bool) -> Any:
    """Whether the output holds a run is not asked again where no other process can begin one any more."""
    with mock.patch.object(type(self), "require_usable"):
        return correct(self, resume)


@wrong_step("impl.pretrain_run:sole_writer")
@contextmanager
def pretrain_alone_at_its_start(sole: Step, folder: Path) -> Iterator[None]:
    """Other processes may write the folder once a run has begun."""
    with sole(folder):
        pass
    yield


def _of_dtypes(load: Step, self: Any, tensors: Any, steps: int) -> None:
    held = self.state()
    load(self, {name: value.to(held[name].dtype) if name in held else value for name, value in tensors.items()}, steps)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.load_state")
def pretrain_state_half_taken(load: Step, self: Any, tensors: Any, steps: int) -> None:
    """A state that is refused has changed the tensors that fit."""
    for name, value in self.state().items():
        if name in tensors and tensors[name].shape == value.shape:
            value.copy_(tensors[name])
    load(self, tensors, steps)


wrong_steps(
    "impl.decoder_optimiser:DecoderAdamW.load_state",
    pretrain_state_of_any_dtype=("Tensors of another dtype are converted.", _of_dtypes),
    pretrain_state_of_more_tensors=(
        "Tensors that nobody asks for are passed over.",
        lambda load, self, tensors, steps: load(self, {name: tensors[name] for name in self.state() if name in tensors}, steps),
    ),
)


@wrong_step("impl.pretrain_run:sole_writer")
@contextmanager
def pretrain_state_in_background(alone: Step, folder: Path) -> Iterator[None]:
    """Another thread hashes and writes a state, of the very tensors that the next steps move."""
    from blackswan.impl.pretrain_run import _Run

    save, written = _Run._save, list[Any]()

    def begun(run: Any, position: Any) -> None:
        for each in written:
            each.result()
        aside = copy(run)
        aside.step = copy(run.step)
        aside.step.optimiser = copy(run.step.optimiser)  # whose number of steps stays
        written[:] = [pool.submit(save, aside, position)]

    with alone(folder), ThreadPoolExecutor(1) as pool, mock.patch.object(_Run, "_save", begun):
        yield


@wrong_step("impl.pretrain_run:_Run.start")
def pretrain_state_of_half_a_step(start: Step, self: Any, resume: bool) -> Any:
    """Ctrl-C writes a state where it comes, also where a step has moved some of the parameters and not counted itself."""
    from blackswan.impl.pretrain_run import _Position

    position, optimiser = start(self, resume), self.step.optimiser
    move = optimiser.step

    def interrupted(*given: Any) -> None:
        try:
            move(*given)
        except KeyboardInterrupt:
            self._save(_Position(*divmod(optimiser.steps, len(self.train))))
            raise

    optimiser.step = interrupted
    return position


class _Lenient(dict[str, Any]):
    """A mapping that has every key, with null for those that it lacks."""

    def __contains__(self, key: object) -> bool:
        return True


@wrong_step("impl.pretrain_run:_read_facts")
def pretrain_run_without_its_nulls(read: Step, path: Path) -> Any:
    """A setting that the state lacks, and one that it alone has, count as null."""
    facts = dict(read(path))
    return {**facts, "run": _Lenient({key: value for key, value in facts["run"].items() if value is not None})}


@wrong_step("impl.pretrain_run:_Run._load")
def pretrain_refuses_what_it_has_taken(load: Any, self: Any, *given: Any) -> Any:
    """A state that is refused was put into the decoder before it was looked at."""
    try:
        return load(self, *given)
    except ValueError:
        for parameter in self.step.optimiser.parameters.values():
            parameter.data.zero_()
        raise


@wrong_step("impl.pretrain_run:_Run._load")
def pretrain_run_as_it_is_spelled(load: Any, run: Any, state: Path) -> Any:
    """A run that is given 1 for 1.0 is another one."""
    position = load(run, state)
    said, now = (json.dumps(each, sort_keys=True) for each in (json.loads((state / "state.json").read_bytes())["run"], run.identity))
    if said != now:
        raise ValueError(f"{state / 'state.json'}: the state of another run")
    return position


@wrong_step("impl.pretrain:StepFn._step")
def pretrain_keeps_gradients_of_a_broken_step(step: Any, steps: Any, batch: Any) -> Any:
    """Gradients stay, and take their memory, where a step breaks off."""
    try:
        return step(steps, batch)
    except BaseException:
        steps.optimiser.zero_gradients = lambda: delattr(steps.optimiser, "zero_gradients")
        raise


@wrong_step("impl.decoder_optimiser:DecoderAdamW.step")
def pretrain_computes_all_before_it_moves(step: Any, optimiser: Any, gradients: Any, learning_rate: float) -> None:
    """The new parameters and moments are computed before the first of them takes its place, and held beside the old ones."""
    beside = {name: value.clone() for name, value in optimiser.state().items()}
    step(optimiser, gradients, learning_rate)
    del beside


@wrong_step("impl.pretrain_run:_Run.identity")
def pretrain_counts_as_they_are_given(identity: Any, run: Any) -> dict[str, Any]:
    """Rows, tokens and seed that are integers of NumPy cannot be written into a state."""
    return {**identity(run), **{name: getattr(run.train, name) for name in ("batch", "seq", "seed")}}
