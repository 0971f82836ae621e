"""The protocol of a trainer, which is handed a whole problem and says what every step did; and runs of pre-training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.subjects.doors.files import Label, Tokens
from blackswan.reference.table import Array

if TYPE_CHECKING:
    from blackswan.impl.pretrain_run import PretrainStep

Sample = tuple[tuple[int, ...], int | tuple[int, ...]]
"""Token ids and the label."""
State = dict[str, Array]
"""The next steps depend on these: `trainable/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`, `step`, and the `learning_rates` of all steps."""
NO_SETTINGS: tuple[tuple[str, float], ...] = (
    *(("learning_rate", value) for value in (-1.0, float("nan"), float("inf"))),
    *(("weight_decay", value) for value in (-1.0, float("nan"), float("inf"))),
    *(("micro_batch", value) for value in (0, -1)),
)
"""Settings of steps that would move parameters the wrong way or anywhere, or compute nothing."""


@dataclass(frozen=True)
class Corpus:
    """Samples as token ids, and their labels; read with the run's settings but for those of `read_with`."""

    rows: list[list[int]]
    labels: list[Label]
    read_with: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.rows)

    def samples(self) -> list[Sample]:
        """Each sample as a value that can be compared."""
        labels = (tuple(label) if isinstance(label, list) else label for label in self.labels)
        return list(zip(map(tuple, self.rows), labels, strict=True))


@dataclass(frozen=True)
class Problem:
    """A run: a decoder's sizes and the names of its parameters are the reference's, settings have the names of the hyperparameter rules.

    `parameters` are those of decoder, LoRA and head; None leaves them to the trainer, which draws them from the settings' seed.
    """

    architecture: dict[str, Any]
    parameters: dict[str, Array] | None
    settings: dict[str, Any]
    training: Corpus
    validation: Corpus | None


@dataclass(frozen=True)
class Kill:
    """SIGKILL, or Ctrl-C's SIGINT, for a worker that comes to an event of that name for that many times."""

    event: str
    times: int
    rank: int = 0
    interrupt: bool = False


@dataclass(frozen=True)
class Plan:
    """How a run goes, and what happens to it on the way.

    `processes` is 0 for a run in this process, else the number of workers, each a process of its own. `next_rate`: each step sets the rate
    of the next one to that share of the schedule's. The run is broken off after step `stop_after`; after `poison_after` the first element
    of the head's bias is NaN. After the first step that it makes, or where it is `late` as the first epoch ends, Ctrl-C comes `interrupts`
    times, to a handler of the program's own where `handled`, to nobody where `ignored`, as under nohup; the model that it ended goes on
    with the run where `going_on`. A run `aside` is made by another thread than the main one. `copies` gets a folder `NUMBER EVENT` for each
    event of the process, as a kill would leave the run's. The model was fitted to the samples `before` already, in another folder. The
    folder is named from the one around it, which the program leaves after the first step, where it is `leaving`. The system takes
    `at_most` so many bytes of what a call writes, and `slowly` what another thread than that of the steps writes. Before the
    model goes on, `a label` of the same samples or `a weight` of its base is another one, as `edited` says. Where the run is in this
    process, `default` is torch's default dtype, and where it is `elsewhere` its default device holds no numbers. The last worker is
    `behind`: up to the first state it goes on only when the first one waits for it. A program that is `looking` at the gradient of a sample
    after each step leaves it waiting.
    """

    resume: bool = False
    processes: int = 0
    save_every: int | None = None
    next_rate: float | None = None
    stop_after: int | None = None
    poison_after: int | None = None
    interrupts: int = 0
    late: bool = False
    handled: bool = False
    ignored: bool = False
    going_on: bool = False
    aside: bool = False
    kill: Kill | None = None
    copies: Path | None = None
    before: Corpus | None = None
    at_most: int | None = None
    leaving: bool = False
    slowly: bool = False
    edited: str = ""
    default: str = "float32"
    elsewhere: bool = False
    behind: bool = False
    looking: bool = False


@dataclass(frozen=True)
class Read:
    """A sample that a pass reads, to train on it or to evaluate it, while that step (from 1) is the next or the current one."""

    step: int
    trained: bool
    sample: Sample


@dataclass(frozen=True)
class Step:
    """An optimiser step, counted from 1: mean loss over its samples, norm before clipping, rate, and the state after it."""

    number: int
    epoch: int
    loss: float
    gradient_norm: float
    learning_rate: float
    samples: int
    state: State


@dataclass(frozen=True)
class Epoch:
    """An epoch, counted from 1: mean losses, whether it is called the best so far, and the state after it.

    `seconds` are what the run says that it took, where it does, and `passed` those between the ends of the epoch before and of this one.
    """

    number: int
    train_loss: float
    validation_loss: float | None
    best: bool
    state: State
    seconds: float | None = None
    passed: float = 0.0


@dataclass(frozen=True)
class Result:
    """The answer of a run that came to its end, with its parts before an interruption; `epochs` are the fields of each but the time."""

    steps: int
    epochs: list[dict[str, Any]]
    best_epoch: int | None
    best_loss: float | None
    stopped_early: bool


@dataclass(frozen=True)
class Rank:
    """How a worker ended ("" at the end, "killed", or error and text), its last state, and its events: what a kill can be aimed at."""

    ended: str
    state: State
    events: list[str]


@dataclass(frozen=True)
class Run:
    """The notes of a run up to its end, or to the kill: steps and epochs by rank 0, samples by all workers.

    `frozen` is what the model holds beside the trainable tensors, before and after; `quantised` the weights that its projections
    compute with where they are stored in fewer bits. `stopped` is the error that ended it because a number was not finite,
    or the interrupt of the plan. `handled` is how often the program's own handler was called.
    `process` is the state of the process that others depend on, before and after, its `open files` by their number. `left` is what the
    next step by hand depends on after the run, where there are such, and `left_loss`, of a run that one process brought to its end, the
    loss of an evaluation of the first three training samples then.
    """

    reads: list[Read]
    steps: list[Step]
    epochs: list[Epoch]
    ranks: list[Rank]
    result: Result | None = None
    stopped: str = ""
    frozen: tuple[dict[str, Array], dict[str, Array]] = field(default_factory=lambda: ({}, {}))
    quantised: dict[str, Array] = field(default_factory=dict)
    handled: int = 0
    process: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    left: State | None = None
    left_loss: float | None = None


@dataclass(frozen=True)
class Kept:
    """The content of a run's folder, read without the trainer: state and progress, the trainable tensors of both adapters, and which files
    of the folder have another name."""

    state: State
    progress: dict[str, Any]
    best: dict[str, Array]
    last: dict[str, Array]
    shared: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Passed:
    """The report of a call on a batch; the norm is None where no step was made."""

    loss: float
    gradient_norm: float | None
    total: int
    correct: int
    accuracy: float


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, accuracy, confusion, and the scores of each class, [classes] each."""

    loss: float
    accuracy: float
    confusion: Array
    precision: Array
    recall: Array
    f1: Array
    support: Array


class Pipeline(Protocol):
    """The calls of a model that is trained by hand; samples are given by their places in the problem's training corpus."""

    def train_batch(self, places: Sequence[int]) -> Passed:
        """One optimiser step."""

    def train_step(self, places: Sequence[int]) -> Passed:
        """One optimiser step on one sample."""

    def train_texts(self, places: Sequence[int]) -> Passed:
        """One optimiser step on samples that are given as texts of their bytes, one of them by itself."""

    def accumulate(self, places: Sequence[int]) -> Passed:
        """Adds to what the next step averages."""

    def apply(self) -> Passed:
        """The step on what was accumulated."""

    def breaks(self, call: str, places: Sequence[Sequence[int]], operation: str, nth: int, error: str) -> str:
        """The class of the error with which the call ends when that operation fails by one of that class at its nth call (from 0), or, as
        `gradient of OPERATION`, the backward pass through that call; "" where the call ends well."""

    def resume_nothing(self) -> None:
        """Goes on with a run on all samples in a folder that holds none."""

    def leave_gradients(self) -> None:
        """Leaves a gradient at each trained parameter, as a backward pass of the program's own does."""

    def gradients(self) -> list[str]:
        """The names of the trained parameters that have a gradient."""

    def records_after(self, places: Sequence[int]) -> list[str]:
        """The names of the answers after which gradients are recorded in a block of the program's own that records none."""

    def forward_only(self, places: Sequence[int]) -> Passed:
        """Loss and accuracy."""

    def forward_no_row(self) -> Passed:
        """Those of a batch of tensors without a row."""

    def evaluate(self, places: Sequence[int]) -> Evaluation:
        """Loss and scores."""

    def answers_held(self, places: Sequence[int]) -> int:
        """The most micro-batches of an evaluation whose answers are there at one time."""

    def evaluated_ahead(self, places: Sequence[int]) -> int:
        """The most samples of an evaluation that are made and not used yet, where the model takes its time."""

    def validated_ahead(self, places: Sequence[int]) -> int:
        """The same of the validations of a run on the first sample."""

    def predict(self, places: Sequence[int]) -> Array:
        """The classes of the samples as texts of their bytes; of several labels 0 or 1 for each."""

    def gradient_vector(self) -> Array:
        """The mean gradient of what was accumulated."""

    def take_parameters_out(self) -> None:
        """Takes all parameters out of what says which are trained."""

    def apply_gradient_vector(self, vector: Array) -> Passed:
        """The step with a gradient."""

    def state(self) -> State:
        """The state that the next steps depend on."""

    def load(self, state: State) -> None:
        """Goes on from what `state` gave. What was accumulated is forgotten."""

    def schedule(self, steps: int) -> None:
        """Begins anew, with moments of zero, on the settings' schedule over so many steps; without it there is no end."""

    def rate(self) -> float:
        """The learning rate of the next step."""

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the next step and, where there is no schedule, of those after it."""

    def saved(self) -> dict[str, Array]:
        """The trained tensors of an adapter that is saved now."""

    def rows(self) -> list[tuple[int, bool]]:
        """How many samples went through the model at a time, in their order, since this was asked last, and whether what a backward pass
        needs was kept. Steps of hand-written layers are not counted."""

    def summary(self) -> str:
        """A description for people, with the number of trainable parameters."""


@dataclass(frozen=True)
class Fault:
    """A fault on one rank in one step (from 0): a `gradient` with that value, a `label` out of range, a weight that `drift`s, or samples
    that are `waiting` for another step."""

    kind: str
    rank: int
    step: int
    tensor: int
    element: int
    value: float


@dataclass(frozen=True)
class Raised:
    """An error on one rank: the name of its class, which is one of Python's, torch's or a library's own, and its message; and the place."""

    place: str
    kind: str
    message: str
    rank: int


@dataclass(frozen=True)
class Steps:
    """A worker's answer after steps on its shares: outputs of `train_steps`, or the error, its step, and the state before and after.

    `nothing` is the error of a step before all others, for which no worker has a sample.
    """

    outputs: dict[str, Array]
    stopped: str = ""
    step: int | None = None
    before: State = field(default_factory=dict)
    after: State = field(default_factory=dict)
    nothing: str = ""


class Trainer(Protocol):
    """Training runs, by one worker or several."""

    @property
    def backends(self) -> tuple[str, ...]:
        """The ways in which it computes a step here: what is claimed of a step is asked of each."""

    @property
    def stand_in_backends(self) -> tuple[str, ...]:
        """Those that cannot compute here, and whose runs are asked with plain formulas in the places of their kernels."""

    def fit(self, problem: Problem, folder: Path, plan: Plan) -> Run:
        """A run in that folder, or its continuation."""

    def mixed(self, problem: Problem, others: Sequence[Problem], folder: Path) -> list[list[str]]:
        """The refusals of each of two workers, of which the second one is given each of the other problems in turn; "" stands for none.

        The n-th run is in the folder `n`; that of the second worker is in `n of rank 1` where this folder is there. It goes on from the
        state in its folder, if there is one.
        """

    def told(self, problem: Problem, raised: Sequence[Raised], folder: Path) -> list[list[str]]:
        """How a run of two workers ends for each, by kind and message, where one of them has these errors, each in a run of its own.

        The n-th run is in the folder `n`, and goes on from the state there, if there is one. "" stands for no error, and is the last.
        """

    def parted(self, problem: Problem, raised: Raised, folder: Path, seconds: float) -> list[tuple[str, bool]]:
        """How a run of two workers that wait so many seconds for each other ends for each where one has an error after its first step, of
        which it tells nobody, and whether that was before half of these seconds had passed."""

    def agree(
        self, held: Sequence[Sequence[Array]], texts: Sequence[Sequence[str]], reasons: Sequence[str], chunk: int
    ) -> list[tuple[list[str], list[Array], list[list[str]]]]:
        """Returns of each worker what it is told, what it sums, and the texts of all workers as they arrived there.

        The workers compare groups of tensors [workers, …] and the first of the texts [workers]; then the last worker fails for each of the
        reasons in turn.
        """

    def patience(self, seconds: float) -> list[float | str]:
        """How long each of two workers on CPUs waits for what the other one sends, where both were told so many seconds; or its error."""

    def kept(self, folder: Path) -> Kept:
        """Reads the folder of a run."""

    def base_known_by(self, weights: Mapping[str, Array]) -> str:
        """What a run keeps of the weights of a base, to know them again."""

    def targets_known_by(self, projections: Sequence[str]) -> str:
        """What a run and an adapter keep of the projections that get an update, to know them again."""

    def settings(self, problem: Problem) -> dict[str, Any]:
        """Every setting of the run, those that the problem leaves open too."""

    def pipeline(self, problem: Problem) -> Pipeline:
        """The model as the run would begin with it."""

    def in_float64(self, problem: Problem, places: Sequence[int]) -> tuple[float, State, State]:
        """By a program's own trainers of a classifier in float64: a first step, which one makes twice, the second time from the state of
        another that has made none; its loss, and the state after it. The other then makes it with the gradient that it gives as a vector:
        its state."""

    def left_of(self, problem: Problem) -> list[str]:
        """The parts of pipelines of the problem that are there still when a program has used them and let them go."""

    def misuse(self, problem: Problem, name: str) -> None:
        """Calls a part of the library with what it has to refuse; `falsifiers.system.misuse` has the names."""

    def fit_files(self, entry: str, settings: dict[str, Any], output: Path, **files: Path) -> list[Read]:
        """A run on the checkpoint `model`, the corpus `corpus` and perhaps `validation`; by the `pipeline`, or by the `command`."""

    def shares(self, samples: Sequence[int], workers: int) -> list[list[int]]:
        """The samples of a batch that each worker takes."""

    def steps_in_parallel(self, training: Case, backend: str, workers: int, chunk: int | None, fault: Fault | None) -> list[Steps]:
        """A case of `train_steps` by workers, each with its share of every batch; `chunk` elements are summed or compared at a time."""


Architecture = Mapping[str, Any]
"""The sizes and scalars of a decoder, by the names of `reference.decoder`, and `max_positions`."""


@dataclass(frozen=True)
class Pretraining:
    """A run of pre-training from random weights of that seed. `settings` are by the names of `impl.pretrain_run.PretrainSettings`."""

    architecture: Architecture
    seed: int
    train: Tokens
    validation: Tokens | None
    output: Path
    tokenizer: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PretrainingRecord:
    """The record of a run up to its end or its kill: steps, validation loss of each epoch, parameters, and the state's hash at the end.

    `flushes` are the files and folders that it waited for until they were on the disk. `passes` has, for each loss that it computed, the
    number of rows and that of the tensors which automatic differentiation held before. `free` are the moments (flushes, steps) at which
    another process could have begun to write its folder.
    """

    steps: "list[PretrainStep]"
    validation: list[float]
    parameters: Mapping[str, Array]
    state_hash: str
    flushes: list[str] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
