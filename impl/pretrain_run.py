"""A pre-training run: epochs of steps, validation and a checkpoint after each, and a state from which it goes on after a kill."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from blackswan.impl import strict_json
from blackswan.impl.config import SCHEDULES, require_choice, require_count, require_number, require_share
from blackswan.impl.decoder import Decoder
from blackswan.impl.decoder_optimiser import state_hash
from blackswan.impl.folder import sole_writer, whole_folder
from blackswan.impl.optimiser import require_a_rate
from blackswan.impl.pretrain import CheckpointFn, StepFn, StepResult, ValFn
from blackswan.impl.token_shards import TokenBatches

STATE, CHECKPOINTS = "state", "checkpoints"
_TENSORS, _POSITION = "state.safetensors", "state.json"


@dataclass(frozen=True)
class PretrainSettings:
    """Settings of a run, besides those of its batches. `save_every` is the number of steps between states; None: after each epoch."""

    epochs: int = 1
    micro_batch: int = 8
    learning_rate: float = 3e-4
    warmup_fraction: float = 0.06
    schedule: str = "cosine"
    weight_decay: float = 0.1
    gradient_clip_norm: float | None = 1.0
    save_every: int | None = None

    def __post_init__(self) -> None:
        """Raises a ValueError that names the setting, its value and what was expected."""
        for name in ("epochs", "micro_batch", *(() if self.save_every is None else ("save_every",))):
            require_count(name, getattr(self, name))
        for name in ("learning_rate", *(() if self.gradient_clip_norm is None else ("gradient_clip_norm",))):
            require_number(name, getattr(self, name), above=0.0)
        for name in ("warmup_fraction", "weight_decay"):
            require_share(name, getattr(self, name))
        require_choice("schedule", self.schedule, SCHEDULES)


@dataclass(frozen=True)
class PretrainStep:
    """A step that was made; `step` counts from 1 over the run, `epoch` from 0."""

    step: int
    epoch: int
    loss: float
    gradient_norm: float
    tokens: int
    learning_rate: float


@dataclass(frozen=True)
class PretrainEpoch:
    """An epoch that ended: its number, the mean held-out loss (NaN without held-out tokens), and its checkpoint."""

    epoch: int
    validation_loss: float
    checkpoint: Path


@dataclass(frozen=True)
class PretrainResult:
    """What was done in this process, and the hash of the optimiser's state at the end."""

    steps: tuple[PretrainStep, ...]
    epochs: tuple[PretrainEpoch, ...]
    state_hash: str


@dataclass(frozen=True)
class _Position:
    """Where a run stands: the epoch, and the number of its batches that are done."""

    epoch: int
    batch: int


def pretrain(
    decoder: Decoder,
    train: TokenBatches,
    validation: TokenBatches | None,
    settings: PretrainSettings,
    output: Path,
    tokenizer: Path,
    *,
    special: Mapping[str, Any] | None = None,
    resume: bool = False,
    on_start: Callable[[], None] | None = None,
    on_step: Callable[[PretrainStep], None] | None = None,
    on_epoch: Callable[[PretrainEpoch], None] | None = None,
) -> PretrainResult:
    """Trains `decoder` in place; `output` gets `checkpoints/` and `state/`, `special` are the ids of `special_tokens`. `on_start` is called
    once nothing is refused any more.

    With `resume` a run goes on from its state on the same trajectory, given the same architecture, batches, tokenizer and settings; the
    decoder's weights are the state's then, and `save_every` and `validation`, on which no step depends, may be others.
    Raises a FileExistsError for an output with a run in it without `resume`, a FileNotFoundError for one without a run with it, a
    ValueError for no tokens to train on, for a run whose every rate is 0 and for a state of another run, an InUseError where another
    process writes the output, and what the step raises.
    """
    output, tokenizer = output.absolute(), tokenizer.absolute()  # a callback may leave the folder that their names begin in
    if len(train) == 0:
        raise ValueError(f"{train.shards.folder}: {len(train.shards)} tokens; expected at least two, one of them to predict")
    run = _Run(decoder, train, validation, settings, output, tokenizer, special)
    run.require_usable(resume)
    steps: list[PretrainStep] = []
    epochs: list[PretrainEpoch] = []
    with sole_writer(output):
        position = run.start(resume)
        if on_start is not None:
            on_start()
        for epoch in range(position.epoch, settings.epochs):
            stream = train.epoch(epoch, position.batch if epoch == position.epoch else 0)
            while (result := run.step(stream)) is not None:
                steps.append(run.record(epoch, result))
                run.save_when_due(steps[-1])
                if on_step is not None:
                    on_step(steps[-1])
            epochs.append(run.end(epoch))
            if on_epoch is not None:
                on_epoch(epochs[-1])
    return PretrainResult(tuple(steps), tuple(epochs), state_hash(run.step.optimiser.state(), run.step.optimiser.steps))


class _Run:
    """The functions of a run, and its state on disk."""

    def __init__(
        self,
        decoder: Decoder,
        train: TokenBatches,
        validation: TokenBatches | None,
        settings: PretrainSettings,
        output: Path,
        tokenizer: Path,
        special: Mapping[str, Any] | None = None,
    ) -> None:
        self.train, self.validation, self.settings, self.output = train, validation, settings, output
        self.checkpoint = CheckpointFn(decoder, tokenizer, output / CHECKPOINTS, special)
        self.validate = ValFn(decoder, settings.micro_batch)
        self.step = StepFn(
            decoder,
            total_steps=settings.epochs * len(train),
            micro_batch=settings.micro_batch,
            learning_rate=settings.learning_rate,
            warmup_fraction=settings.warmup_fraction,
            schedule=settings.schedule,
            weight_decay=settings.weight_decay,
            max_norm=settings.gradient_clip_norm,
        )
        require_a_rate(self.step.learning_rates)

    @property
    def identity(self) -> dict[str, Any]:
        """What a state belongs to: a run with other values is another run."""
        settings = {name: value for name, value in asdict(self.settings).items() if name != "save_every"}
        counts = {"batch": self.train.batch, "seq": self.train.seq, "seed": self.train.seed}
        data = {"data": self.train.shards.digest, **{name: value if value is None else int(value) for name, value in counts.items()}}
        tokenizer = hashlib.sha256(self.checkpoint.tokenizer.read_bytes()).hexdigest()
        return {**settings, **data, "architecture": asdict(self.validate.decoder.config), "tokenizer": tokenizer}

    def require_usable(self, resume: bool) -> None:
        """Raises an error for an output without the run to go on with, and for one that holds a run otherwise."""
        state = self.output / STATE
        if resume and not state.exists():
            raise FileNotFoundError(f"{state}: no such folder, so there is no run to continue; start it without --resume")
        if not resume and (state.exists() or self.checkpoint.folder.exists()):
            raise FileExistsError(f"{self.output} holds a run; resume it, or choose another output")

    def start(self, resume: bool) -> _Position:
        """The beginning, or where the state stands."""
        self.require_usable(resume)  # again, now that nobody else can begin here
        if resume:
            return self._load(self.output / STATE)
        beginning = _Position(0, 0)
        self._save(beginning)
        return beginning

    def record(self, epoch: int, result: StepResult) -> PretrainStep:
        """The step that was just made."""
        done = self.step.optimiser.steps
        return PretrainStep(done, epoch, result.loss, result.gradient_norm, result.tokens, self.step.learning_rates[done - 1])

    def save_when_due(self, step: PretrainStep) -> None:
        """Writes the state after every `save_every` steps."""
        if self.settings.save_every is not None and step.step % self.settings.save_every == 0:
            self._save(_Position(step.epoch, step.step - step.epoch * len(self.train)))

    def end(self, epoch: int) -> PretrainEpoch:
        """Validates and writes checkpoint and state. A checkpoint that is there was written before the run was killed here."""
        steps = self.step.optimiser.steps
        loss = self.validate(() if self.validation is None else self.validation.epoch(0))
        folder = self.checkpoint.path(steps)
        if not folder.exists():
            self.checkpoint(steps)
        self._save(_Position(epoch + 1, 0))
        return PretrainEpoch(epoch, loss, folder)

    def _save(self, position: _Position) -> None:
        optimiser = self.step.optimiser
        tensors = {name: value.cpu().contiguous() for name, value in optimiser.state().items()}
        facts = {"steps": optimiser.steps, **_hashes(tensors, optimiser.steps), **vars(position), "run": self.identity}
        with whole_folder(self.output / STATE, replace=True) as folder:
            save_file(tensors, folder / _TENSORS)
            (folder / _POSITION).write_text(json.dumps(facts, indent=2) + "\n")

    def _load(self, state: Path) -> _Position:
        facts = _read_facts(state / _POSITION)
        given, now = facts["run"], json.loads(json.dumps(self.identity))
        for name in sorted(given.keys() | now.keys()):
            if (name in given, given.get(name)) != (name in now, now.get(name)):
                own, other = (repr(values[name]) if name in values else "missing" for values in (given, now))
                raise ValueError(f"{state / _POSITION}: {name} is {own}, this run has {other}; resume with the same")
        optimiser, position = self.step.optimiser, _Position(facts["epoch"], facts["batch"])
        if facts["steps"] != position.epoch * len(self.train) + position.batch:
            raise ValueError(f"{state / _POSITION}: {facts['steps']} steps do not end at batch {position.batch} of epoch {position.epoch}")
        try:
            tensors = _read_tensors(state / _TENSORS)
            for name, value in _hashes(tensors, facts["steps"]).items():
                if value != facts[name]:
                    raise ValueError(f"the {name} is not what was saved: its SHA-256 differs")
            optimiser.load_state(tensors, facts["steps"])
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{state / _TENSORS}: not the state of this run ({error})") from None
        return position


def _hashes(tensors: Mapping[str, Tensor], steps: int) -> dict[str, str]:
    """What is kept beside the tensors: a hash of the moments and one of the parameters."""
    return {"optimiser": state_hash(tensors, steps), "decoder": state_hash(tensors, steps, of=("trainable/",))}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a file by its map, and as a whole where its path is not UTF-8: safetensors maps no such file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return load(path.read_bytes())
    return load_file(path)


def _read_facts(path: Path) -> Mapping[str, Any]:
    try:
        facts = strict_json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); the run cannot go on from here") from None
    counts = ("steps", "epoch", "batch")
    expected = {*counts, "optimiser", "decoder", "run"}
    wrong = sorted(expected ^ facts.keys()) if isinstance(facts, dict) else []
    if not isinstance(facts, dict) or wrong or not isinstance(facts["run"], dict):
        said = f"{wrong[0]!r} is {'missing' if wrong[0] in expected else 'unexpected'}" if wrong else "expected an object with the run's"
        raise ValueError(f"{path}: not the state of a pre-training run ({said})")
    if any(type(facts[name]) is not int or facts[name] < 0 for name in counts):
        raise ValueError(f"{path}: {', '.join(counts)} must be counts, 0 or more")
    return facts
