"""Training runs of `impl`: through its pipeline and its command, in this process or by workers in processes of their own."""

import argparse
import dataclasses
import io
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic  # not the one that goes ahead while a run is watched
from types import FrameType
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from torch.distributed import distributed_c10d

from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.subjects.conversion import config_of
from blackswan.falsifiers.subjects.doors import training as told
from blackswan.falsifiers.subjects.doors.training import Epoch, Fault, Kept, Plan, Problem, Raised, Read, Run, State, Step, Steps
from blackswan.falsifiers.subjects.impl import Door, parallel_steps
from blackswan.falsifiers.subjects.impl.disks import writing
from blackswan.falsifiers.subjects.impl.kill_points import Copies, KillPoints, behind, file_events, sums
from blackswan.falsifiers.subjects.impl.misuse import misuses
from blackswan.falsifiers.subjects.impl.pipelines import Pipeline, left_of
from blackswan.falsifiers.subjects.impl.slow_disk import slow, until_the_next_step
from blackswan.falsifiers.subjects.impl.watching import ERRORS, Note, Stopped, Watch, on_host, read_notes, reading, state_of
from blackswan.falsifiers.subjects.impl.workers import Outcome, on_ranks
from blackswan.falsifiers.subjects.patching import standing_in
from blackswan.falsifiers.subjects.shared import default_dtype, random_states, torch_settings
from blackswan.impl import config as configs
from blackswan.impl import fit as whole_runs
from blackswan.impl import group as groups
from blackswan.impl import kernels
from blackswan.impl import trainer as trainers
from blackswan.impl.classifier import Adaptation, Classifier, initial_trainable, trainable_shapes
from blackswan.impl.commands import train as train_command
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.corpus import load_corpus
from blackswan.impl.decoder import random_tensors
from blackswan.impl.fit import EpochRecord, FitResult
from blackswan.impl.group import ALONE, Group
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.samples import Samples
from blackswan.impl.tokens import ByteTokens
from blackswan.reference.table import Array

PREFIX = "base_model.model."
"""PEFT writes this before the names of an adapter's tensors."""
PLACES = {
    "the beginning of a run": "blackswan.impl.fit._weights_digest",
    "samples of a batch": "blackswan.impl.samples.Samples.batch",
    "a batch": "blackswan.impl.trainer.Trainer.accumulate",
    "the mean": "blackswan.impl.trainer.Trainer._weighted",
    "a step": "blackswan.impl.optimiser.AdamW.step",
    "an evaluation": "blackswan.impl.trainer.Trainer.forward_only",
    "an adapter": "blackswan.impl.pipeline.ClassifyPipeline.save",
    "a state": "blackswan.impl.training_state.save_state",
    "a state that is read": "blackswan.impl.training_state.load_state",
}
PROGRESS = ("step", "epoch", "position", "best_loss", "best_epoch", "stale_epochs", "finished")


class Trainer(Door):
    """Training runs: see the protocol of that name."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Automatic differentiation, and the hand-written layers, which need a GPU and are the default there."""
        return ("torch", "fused") if self._device.type == "cuda" else ("torch",)

    @property
    def stand_in_backends(self) -> tuple[str, ...]:
        """On a CPU the hand-written layers, where Triton, which they import, is there."""
        return ("fused",) if self._device.type == "cpu" and kernels.missing() is None else ()

    def fit(self, problem: Problem, folder: Path, plan: Plan) -> Run:
        """A run in that folder, or its continuation."""
        if not plan.processes:
            with default_dtype(plan.default):
                return _joined([_fit(ALONE, self._device, problem, folder, plan, None)])
        with tempfile.TemporaryDirectory() as journals:
            outcomes = on_ranks(_fit, plan.processes, (problem, folder, plan, Path(journals)), self._device)
            return _joined([_survived(outcome, Path(journals) / str(rank)) for rank, outcome in enumerate(outcomes)])

    def mixed(self, problem: Problem, others: Sequence[Problem], folder: Path) -> list[list[str]]:
        """The message of each of two workers for each of the other problems, which the second one is given in turn.

        The last one is "" where a run was not refused but made two steps; the problems after it are not asked.
        """
        outcomes = on_ranks(_mixed, 2, (problem, list(others), folder), self._device)
        return [outcome.answer or [outcome.ended] for outcome in outcomes]

    def told(self, problem: Problem, raised: Sequence[Raised], folder: Path) -> list[list[str]]:
        """How each of two workers ends where one of them has an error at a place of a run, for each of these in turn."""
        outcomes = on_ranks(_told, 2, (problem, list(raised), folder), self._device)
        return [outcome.answer or [outcome.ended] for outcome in outcomes]

    def parted(self, problem: Problem, raised: Raised, folder: Path, seconds: float) -> list[tuple[str, bool]]:
        """How two workers end of which one fails by itself, and whether they do so at once. They exchange on the host."""
        outcomes = on_ranks(_parted, 2, (problem, raised, folder, seconds), self._device, by_environment=True)
        ends = [outcome.answer or (outcome.ended, math.inf, math.inf) for outcome in outcomes]
        return [(text, end - ends[raised.rank][1] < seconds / 2) for text, _, end in ends]

    def patience(self, seconds: float) -> list[float | str]:
        """How many seconds each of two workers waits for what the other one sends, where it was told to wait so long."""
        outcomes = on_ranks(_patience, 2, (seconds,), "cpu", by_environment=True)
        return [outcome.ended or outcome.answer for outcome in outcomes]

    def agree(
        self, held: Sequence[Sequence[Array]], texts: Sequence[Sequence[str]], reasons: Sequence[str], chunk: int
    ) -> list[tuple[list[str], list[Array], list[list[str]]]]:
        """Returns of each worker what it is told, what it sums, and the texts of all workers as they arrived there."""
        outcomes = on_ranks(parallel_steps.agree, len(texts[0]), (held, texts, reasons, chunk), self._device)
        return [outcome.answer or ([outcome.ended], [], []) for outcome in outcomes]

    def kept(self, folder: Path) -> Kept:
        """Reads the folder of a run without `impl`."""
        with safe_open(folder / "state" / "state.safetensors", framework="numpy") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open cannot be iterated
            progress = json.loads(file.metadata()["progress"])
        shared = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink > 1]
        return Kept(state, {name: progress[name] for name in PROGRESS}, _adapter(folder / "best"), _adapter(folder / "last"), shared)

    def base_known_by(self, weights: Mapping[str, Array]) -> str:
        """What run.json says of these weights."""
        base = torch.nn.Module()
        for name, value in weights.items():
            base.register_buffer(name, torch.tensor(value))
        return whole_runs._weights_digest(base)

    def targets_known_by(self, projections: Sequence[str]) -> str:
        """What run.json and an adapter's files say of these projections."""
        return configs.targets_named(projections)

    def settings(self, problem: Problem) -> dict[str, Any]:
        """Every setting of the run."""
        return dataclasses.asdict(ClassifyConfig.from_mapping(problem.settings))

    def pipeline(self, problem: Problem) -> "Pipeline":
        """The model as the run would begin with it."""
        return Pipeline(_pipeline(problem, self._device, ALONE), _samples(problem, problem.training))

    def in_float64(self, problem: Problem, places: Sequence[int]) -> tuple[float, State, State]:
        """A first step, and the same one again from the state of before it, by trainers of a classifier in float64."""
        config, architecture = ClassifyConfig(**problem.settings), config_of(problem.architecture)
        base, trainable = _given(problem, torch.float64)
        weights = None if config.class_weights is None else torch.tensor(config.class_weights, dtype=torch.float64, device=self._device)

        def made() -> trainers.Trainer:
            of = Classifier(architecture, Adaptation.of(config), base, trainable, dtype=torch.float64, device=self._device)
            rate = config.learning_rate
            return trainers.Trainer(of, total_steps=None, micro_batch=config.batch_size, learning_rate=rate, class_weights=weights)

        tokens = ByteTokens(config.max_seq_len, config.padding_side)
        batch = _samples(problem, problem.training).batch(places, tokens, self._device)
        by_batch, by_vector = made(), made()
        by_batch.train_batch(batch)
        by_batch.load_state(by_vector.state())
        loss = by_batch.train_batch(batch).loss
        by_vector.accumulate(batch)
        by_vector.apply_gradient_vector(by_vector.gradient_vector())
        return loss, state_of(by_batch), state_of(by_vector)

    def left_of(self, problem: Problem) -> list[str]:
        """What outlives pipelines of the problem."""
        return left_of(lambda: self.pipeline(problem))

    def misuse(self, problem: Problem, name: str) -> None:
        """Calls a part of the library with what it has to refuse."""
        misuses(_pipeline(problem, self._device, ALONE))[name]()

    def fit_files(self, entry: str, settings: dict[str, Any], output: Path, **files: Path) -> list[Read]:
        """A run on files, by the pipeline, to which an empty one is an empty list, or by the command."""
        reads: list[Read] = []
        with reading(reads.extend), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            {"pipeline": self._by_pipeline, "command": self._by_command}[entry](settings, output, files)
        return reads

    def _by_pipeline(self, settings: dict[str, Any], output: Path, files: Mapping[str, Path]) -> None:
        config = ClassifyConfig.from_mapping(settings)
        pipeline = ClassifyPipeline.from_pretrained(files["model"], config, device=self._device)
        read = {
            name: load_corpus(path, config.num_classes, config.multi_label) if path.stat().st_size else []
            for name, path in files.items()
            if name != "model"
        }
        pipeline.fit(read["corpus"], read.get("validation"), output)

    def _by_command(self, settings: dict[str, Any], output: Path, files: Mapping[str, Path]) -> None:
        parser = argparse.ArgumentParser()
        train_command.add_options(parser)
        config = output.with_suffix(".yaml")
        config.write_text(json.dumps(settings))
        options = {**files, "output": output, "config": config, "device": self._device}
        train_command.run(parser.parse_args([f"--{name}={value}" for name, value in options.items()]))

    def shares(self, samples: Sequence[int], workers: int) -> list[list[int]]:
        """The samples of a batch that each worker takes."""
        return [list(groups.shard(list(samples), rank, workers)) for rank in range(workers)]

    def steps_in_parallel(self, training: Case, backend: str, workers: int, chunk: int | None, fault: Fault | None) -> list[Steps]:
        """A case of `train_steps` by workers."""
        outcomes = on_ranks(parallel_steps.train, workers, (training, backend, chunk, fault), self._device)
        return [outcome.answer or Steps({}, outcome.ended) for outcome in outcomes]


@dataclasses.dataclass(frozen=True)
class _Part:
    """One worker's part of a run: all that it noted, and what it answers apart from that."""

    notes: list[Note]
    rank: told.Rank
    answer: dict[str, Any] = dataclasses.field(default_factory=dict)


def _leaving(on_step: Callable[..., None], *given: Any) -> None:
    """Hears of a step, after which the program is in another folder."""
    on_step(*given)
    os.chdir("/")


def _fit(group: Group, device: torch.device, problem: Problem, folder: Path, plan: Plan, journals: Path | None) -> _Part:
    """One worker's part; where its notes go to a folder, in a process of its own, which ends with the run."""
    pipeline = _pipeline(problem, device, group)
    kill = plan.kill if plan.kill and plan.kill.rank == group.rank else None
    by = signal.SIGINT if kill and kill.interrupt else signal.SIGKILL
    event = Copies(folder, plan.copies) if plan.copies else KillPoints(kill.event, kill.times, by) if kill else KillPoints()
    if journals is not None:
        file_events(folder, event)
        if group.size > 1:
            sums(group, event)
        if plan.behind:
            behind(group, folder)
    train = _samples(problem, problem.training)
    validation = None if problem.validation is None else _samples(problem, problem.validation)
    if plan.before is not None:
        pipeline.fit(_samples(problem, plan.before), validation, folder.with_name(f"before {folder.name}"))
    watch = Watch(pipeline, plan, event, journals and journals / str(group.rank))
    before, quantised, result, stopped = _frozen(pipeline), _quantised(pipeline), None, ""
    on_step = partial(_leaving, watch.step) if plan.leaving else watch.step
    output, around = (Path(folder.name), chdir(folder.parent)) if plan.leaving else (folder, nullcontext())
    fit = partial(pipeline.fit, train, validation, output, save_every=plan.save_every, on_step=on_step, on_epoch=watch.epoch)
    short = writing(plan.at_most) if plan.at_most else nullcontext()
    disk = slow(until_the_next_step(pipeline.classifier.trainable_parameters().values())) if plan.slowly else nullcontext()
    with reading(watch.read), watch.clock(), _of_the_process(problem) as process, _handled(plan) as handled, short, disk, around:
        try:
            with ThreadPoolExecutor(1) as thread, torch.device("meta") if plan.elsewhere else nullcontext():
                run = partial(fit, resume=plan.resume)
                result = thread.submit(run).result() if plan.aside else run()
        except Stopped:
            pass
        except KeyboardInterrupt:
            if not (plan.interrupts or (kill and kill.interrupt)):
                raise
            _edit(plan.edited, pipeline, train)
            stopped, result = "KeyboardInterrupt", fit(resume=True) if plan.going_on else None
        except FloatingPointError as error:
            stopped = str(error)
    answer: dict[str, Any] = {
        "result": result and _result(result),
        "stopped": stopped,
        "frozen": (before, _frozen(pipeline)),
        "quantised": quantised,
    }
    answer["handled"] = len(handled)
    answer["left"] = state_of(pipeline.trainer)
    answer["left_loss"] = pipeline.evaluate(train.select(range(3))).loss if result and group.size == 1 else None
    return _Part(watch.notes, told.Rank(stopped if kill else "", watch.state, event.seen), {**answer, "process": tuple(process)})


def _edit(kind: str, pipeline: ClassifyPipeline, samples: Samples) -> None:
    """Changes what a run was given where it lies in memory, as its plan says."""
    if kind == "a label":
        samples.targets[-1] = (samples.targets[-1] + 1) % samples.num_classes if samples.targets.ndim == 1 else 1 - samples.targets[-1]
    elif kind == "a weight":
        next(each for each in pipeline.classifier.parameters() if not each.requires_grad).data.view(-1)[-1] += 1.0


@contextmanager
def _handled(plan: Plan) -> Iterator[list[int]]:
    """Inside the block Ctrl-C is noted by a handler of this program's own, or ignored, as the plan says; at the end it is so still."""
    noted: list[int] = []
    if not (plan.handled or plan.ignored):
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        noted.append(number)

    own = note if plan.handled else signal.SIG_IGN
    usual = signal.signal(signal.SIGINT, own)
    yield noted
    if signal.getsignal(signal.SIGINT) == own:
        signal.signal(signal.SIGINT, usual)


@contextmanager
def _of_the_process(problem: Problem) -> Iterator[list[dict[str, Any]]]:
    """The state of this process that others depend on, before the block and, when it has ended, after it.

    Random weights are made after the first look. Inside, Ctrl-C does what it does in a program of a user's, also in a worker that leaves
    it to its parent.
    """
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)

    def now() -> dict[str, Any]:
        interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        numbers = {f"{owner}'s random numbers": state for owner, state in random_states().items()}
        return {"Ctrl-C interrupts": interrupts, "open files": len(list(Path("/proc/self/fd").iterdir())), **torch_settings(), **numbers}

    torch.rand(())  # so that a generator that is seeded as before has changed, too
    found = [now()]
    try:
        config, architecture = ClassifyConfig.from_mapping(problem.settings), config_of(problem.architecture)
        random_tensors(architecture, config.seed), initial_trainable(architecture, Adaptation.of(config), config.seed)
        yield found
    finally:
        found.append(now())
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # another one that was left is for the trial to find
            signal.signal(signal.SIGINT, usual)


def _mixed(group: Group, device: torch.device, problem: Problem, others: list[Problem], folder: Path) -> list[str]:
    said: list[str] = []
    for number, other in enumerate(others):
        given, together = problem if group.rank == 0 else other, folder / str(number)
        alone = folder / f"{number} of rank {group.rank}"
        own = alone if alone.is_dir() else together
        try:
            _fit(group, device, given, own, Plan(stop_after=2, resume=(own / "state").is_dir()), None)
        except (ValueError, OSError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            return [*said, ""]
    return said


def _told(group: Group, device: torch.device, problem: Problem, raised: list[Raised], folder: Path) -> list[str]:
    said: list[str] = []
    for number, each in enumerate(raised):
        error = type(each.kind, (ERRORS.get(each.kind, Exception),), {})(each.message)
        spoilt = _raising(PLACES[each.place], error) if group.rank == each.rank else nullcontext()
        own = folder / str(number)
        plan = Plan(save_every=1, resume=(own / "state").is_dir())
        try:
            with spoilt, mock.patch("blackswan.impl.warm_up.COLD", (device.type,)):  # the rehearsal of a GPU is no place of a run
                _fit(group, device, problem, own, plan, None)
        except Exception as caught:  # what a worker ends with is asked
            said.append(f"{type(caught).__name__}: {caught}")
            if f"rank {each.rank}" not in str(caught):
                return said  # it has told nobody, and nobody would meet it in the next run
        else:
            return [*said, ""]
    return said


def _raising(place: str, error: Exception) -> AbstractContextManager[object]:
    """Inside the block a method, or a function under whatever name, raises that error."""
    function, raising = resolve_name(place), mock.Mock(side_effect=error)
    return standing_in(function, raising) if "." not in function.__qualname__ else mock.patch(place, raising)


def _parted(alone: Group, device: torch.device, problem: Problem, raised: Raised, folder: Path, seconds: float) -> tuple[str, float, float]:
    """The end of a worker, and when it failed and when it had left the group, by the clock of the host."""
    del alone
    failed, text = [0.0], ""

    def fail(*_: object) -> None:
        failed.append(monotonic())
        raise type(raised.kind, (ERRORS.get(raised.kind, Exception),), {})(raised.message)

    try:
        with (
            groups.joined("cpu", timeout=seconds) as (group, _),
            mock.patch.object(Watch, "step", fail if group.rank == raised.rank else Watch.step),
        ):
            _fit(group, device, problem, folder, Plan(), None)
    except Exception as caught:  # what a worker ends with is asked
        text = f"{type(caught).__name__}: {caught}"
    return text, failed[-1], monotonic()


def _patience(group: Group, device: torch.device, seconds: float) -> float:
    del group
    with groups.joined(str(device), timeout=seconds) as (several, own):
        several.sum(torch.ones(1))
        exchange = distributed_c10d._get_default_group()._get_backend(own)
        return float(exchange.options._timeout.total_seconds())


def _survived(outcome: Outcome, journal: Path) -> _Part:
    """A worker's part, or what is left of it."""
    return outcome.answer or _Part(list(read_notes(journal)), told.Rank(outcome.ended, {}, []))


def _joined(parts: list[_Part]) -> Run:
    first, ranks = parts[0].notes, [part.rank for part in parts]
    steps, epochs = [note for note in first if isinstance(note, Step)], [note for note in first if isinstance(note, Epoch)]
    reads = [note for part in parts for note in part.notes if isinstance(note, Read)]
    return Run(reads, steps, epochs, ranks, **parts[0].answer)


def _result(result: FitResult) -> told.Result:
    names = [field.name for field in dataclasses.fields(EpochRecord) if field.name != "seconds"]
    epochs = [{name: getattr(record, name) for name in names} for record in result.epochs]
    return told.Result(result.steps, epochs, result.best_epoch, result.best_validation_loss, result.stopped_early)


def _adapter(folder: Path) -> dict[str, Array]:
    path = folder / "adapter_model.safetensors"
    return {name.removeprefix(PREFIX): value for name, value in load_file(path).items()} if path.exists() else {}


def _pipeline(problem: Problem, device: torch.device, group: Group) -> ClassifyPipeline:
    config = ClassifyConfig(**problem.settings)  # by Python, where class weights may be a list, which `from_mapping` makes a tuple
    architecture = config_of(problem.architecture)
    kind: type[ClassifyPipeline] = ClassifyPipeline
    if config.backend == "fused" and device.type == "cpu":
        from blackswan.falsifiers.subjects.impl.hand_written import ByLayers  # imports Triton

        kind = ByLayers
    if problem.parameters is None:
        return kind.from_random(architecture, config, device=device, group=group)
    base, trainable = _given(problem, torch.float32)
    tokens = ByteTokens(config.max_seq_len, config.padding_side)
    return kind(architecture, config, base, trainable, tokens, device=device, group=group)


def _given(problem: Problem, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The problem's tensors: those of the base, and those that are trained."""
    names = trainable_shapes(config_of(problem.architecture), Adaptation.of(ClassifyConfig(**problem.settings)))
    given = {name: torch.tensor(value, dtype=dtype) for name, value in (problem.parameters or {}).items()}
    return {name: given[name] for name in given if name not in names}, {name: given[name] for name in given if name in names}


def _samples(problem: Problem, corpus: told.Corpus) -> Samples:
    read = {**problem.settings, **corpus.read_with}
    labels = [tuple(label) if isinstance(label, list) else label for label in corpus.labels]
    beyond = {place: label for place, label in enumerate(labels) if isinstance(label, int) and label >= read["num_classes"]}
    known = [0 if place in beyond else label for place, label in enumerate(labels)]
    made = Samples.of(corpus.rows, known, read["num_classes"], bool(read.get("multi_label", False)))
    for place, label in beyond.items():  # which no samples are made with, but a program may write there
        made.targets[place] = label
    return made


def _frozen(pipeline: ClassifyPipeline) -> dict[str, Array]:
    """The tensors of the model that are not trained."""
    trainable = pipeline.classifier.trainable_parameters()
    return on_host({name: value for name, value in pipeline.classifier.state_dict().items() if name not in trainable})


def _quantised(pipeline: ClassifyPipeline) -> dict[str, Array]:
    """The weight that each quantised projection computes with, in float32 and, by its name with `in bfloat16`, in bfloat16."""
    held = {name: getattr(module, "quantized", None) for name, module in pipeline.classifier.named_modules()}
    weights = {f"{name}.weight": weight for name, weight in held.items() if weight is not None}
    wide = {name: weight.dequantized(torch.float32) for name, weight in weights.items()}
    return on_host(wide | {f"{name} in bfloat16": weight.dequantized(torch.bfloat16).float() for name, weight in weights.items()})
