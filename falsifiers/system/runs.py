"""Whole training runs: their steps, epochs, validation, checkpoints and early stop.

They are held to their own records, and to the reference at the subject's own parameters, so that an error of an earlier step neither hides
nor feigns one of a later step.
"""

import math
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly, value_at_least, value_at_most, value_inside
from blackswan.falsifiers.subjects.doors.training import Corpus, Kept, Plan, Run, Sample, Trainer
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.falsifiers.system.run_problem import SmallRun, part, small_run, with_samples
from blackswan.falsifiers.system.same import content, same, same_samples
from blackswan.falsifiers.system.trial import Trial, by_each_backend
from blackswan.falsifiers.system.workloads import through_nf4
from blackswan.reference.optimiser import clip_by_global_norm, learning_rate_schedule
from blackswan.reference.table import Array
from blackswan.reference.training import flatten

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
MANY = 7
"""Micro-batches of a step."""
LARGE, HIDDEN, DOZENS = 1_030, 64, 35
"""Classes, and a rank, by which a tensor has more than 2¹⁶ numbers where a hidden state has so many; micro-batches of a step."""


def whole_run(trial: Trial, problem: SmallRun, **plan: Any) -> tuple[Run, Kept]:
    """A run from its first step to its last, and what it leaves in its folder."""
    return _whole_run(trial.trainer, problem, Plan(**plan))


def _whole_run(trainer: Trainer, problem: SmallRun, plan: Plan) -> tuple[Run, Kept]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        return trainer.fit(problem, folder, plan), trainer.kept(folder)


@by_each_backend
def steps_follow_the_reference(trial: Trial) -> Iterator[Comparison]:
    """Loss, pre-clip norm and moments of each step are the reference's on the samples that it read, at the parameters before it; the
    parameters after it are AdamW's at those moments.

    Torch's default dtype has 16 bits, and its default device is another one, as some programs make it, where that can be asked. In half
    of the cases nothing decays or is
    clipped, and a step has more micro-batches than a trainer keeps side by side. After the run the pipeline is at its beginning again but
    for the weights; in half of the cases a second run shows it.
    """
    several, plain = trial.seed % 2 == 1, trial.seed % 4 >= 2
    weights = None if several else ["balanced", "balanced_over_classes"][plain]
    limits: dict[str, Any] = (
        {"weight_decay": 0.0, "gradient_clip_norm": None} if plain else {"weight_decay": 0.1, "gradient_clip_norm": 0.1}
    )
    parts: dict[str, Any] = {"batch_size": 1, "accumulation_steps": MANY} if plain else {}
    # Of ten samples three classes have no equal shares, by which they would weigh alike.
    problem = small_run(trial, (10, 7), multi_label=several, class_weights=weights, backend=trial.backend or "torch", **limits, **parts)
    most = math.inf if plain else limits["gradient_clip_norm"]
    others = {"default": ("bfloat16", "float16")[plain], "elsewhere": trial.backend != "fused"}
    run, _ = whole_run(trial, problem, **(others if trial.subject.name == "impl" else {}))
    yield from _by_the_reference(trial, problem, run, most)
    yield from _as_at_the_beginning(trial, problem, run)
    yield from _as_a_fresh_one(trial, problem, run)
    if trial.subject.name == "impl":  # others lack 16 bits, or NF4 of such sizes, and are asked what stands above
        yield from _by_its_settings(trial)
        yield from _beside_what_waits(trial)


def _beside_what_waits(trial: Trial) -> Iterator[Comparison]:
    """A sample that the program leaves waiting after each step, when it has looked at its gradient, is part of no step of the run."""
    problem = small_run(trial, epochs=1, backend=trial.backend or "torch")
    (plain, state), (looking, beside) = (whole_run(trial, problem, looking=each) for each in (False, True))
    yield from same("losses of steps beside a sample that waits", *([step.loss for step in run.steps] for run in (plain, looking)))
    yield from same("state after steps beside a sample that waits", state.state, beside.state)


def _by_its_settings(trial: Trial) -> Iterator[Comparison]:
    """Moments and parameters of a run in 16 bits or on NF4 follow from each other by its own limit of the norm, decay and rates."""
    limit, decay, warmup, schedule = 1e-3, 0.5, 0.3, ["cosine", "constant"][trial.seed % 2]
    dtype, nf4, several = [("bfloat16", False, True), ("float32", True, True), ("bfloat16", True, False), ("bfloat16", False, False)][
        trial.seed % 4
    ]
    kinds: dict[str, Any] = {"dtype": dtype, "quantize_nf4": nf4, "multi_label": several, "backend": trial.backend or "torch"}
    parts: dict[str, Any] = {"gradient_clip_norm": limit, "weight_decay": decay, "schedule": schedule, "warmup_fraction": warmup}
    problem = small_run(trial, (5, 3), **kinds, **parts)
    run, _ = whole_run(trial, problem)
    what, names = f"{dtype}{' on NF4' if nf4 else ''}", problem.names
    rates = learning_rate_schedule(len(run.steps), problem.settings["learning_rate"], warmup, schedule)
    yield trial.near(f"{what}, rates", rates, np.array([step.learning_rate for step in run.steps]))
    before, first = problem.trainable(), {name: np.zeros_like(problem.parameters[name], np.float64) for name in names}
    for step in run.steps:
        after, mean, square = (part(step.state, group) for group in ("trainable", "exp_avg", "exp_avg_sq"))
        gradient = flatten([(np.asarray(mean[name], np.float64) - BETA1 * first[name]) / (1.0 - BETA1) for name in names])
        when, most = f"{what}, step {step.number}", min(limit, step.gradient_norm)
        yield trial.near(f"{when}, norm of the clipped gradient", most, float(np.linalg.norm(gradient)))
        for name in names:
            moved = after_adamw(before[name], mean[name], square[name], step.number, step.learning_rate, decay)
            yield trial.near(f"{when}, {name}", moved, after[name])
        before, first = after, {name: np.asarray(mean[name], np.float64) for name in names}


def _by_the_reference(trial: Trial, problem: SmallRun, run: Run, most: float) -> Iterator[Comparison]:
    """The steps of a run that clips to a norm."""
    spared = trial.attack.declared.get("multi_label_steps" if problem.several else "train_steps", {}).get("decay") == "weights"
    before = problem.trainable()
    first = second = np.zeros(sum(value.size for value in before.values()))
    for step in run.steps:
        when, samples = f"step {step.number}", [read.sample for read in run.reads if read.trained and read.step == step.number]
        (gradient,), norm = clip_by_global_norm(problem.gradient(before, samples)[None], most)
        first, second = BETA1 * first + (1.0 - BETA1) * gradient, BETA2 * second + (1.0 - BETA2) * gradient**2
        moments = {group: part(step.state, group) for group in ("exp_avg", "exp_avg_sq")}
        got = [flatten([np.asarray(each[name], np.float64) for name in problem.names]) for each in moments.values()]
        yield trial.near(f"{when}, loss", problem.loss(before, samples), step.loss)
        yield trial.near(f"{when}, norm", norm, step.gradient_norm)
        yield trial.near(f"{when}, first moment", first, got[0].astype(np.float32))
        # The root errs by no more than the gradient does, and it is what AdamW divides by.
        yield trial.near(f"{when}, root of the second moment", np.sqrt(second), np.sqrt(got[1]).astype(np.float32))
        after = part(step.state, "trainable")
        for name, value in before.items():
            decay = 0.0 if spared and name.endswith("bias") else problem.settings["weight_decay"]
            moved = after_adamw(value, moments["exp_avg"][name], moments["exp_avg_sq"][name], step.number, step.learning_rate, decay)
            yield trial.near(f"{when}, {name}", moved, after[name])
        before, (first, second) = {name: after[name] for name in problem.names}, got


@by_each_backend
def large_runs_are_as_small_ones(trial: Trial) -> Iterator[Comparison]:
    """Where tensors that are trained have more than 2¹⁶ numbers, and a step dozens of micro-batches, its loss, norm, moments and parameters
    are the reference's too; a run that goes on from a state ends with the tensors, the state and the answers of one that was whole."""
    sizes: dict[str, Any] = {"num_classes": LARGE, "lora_rank": LARGE, "lora_alpha": 2.0 * LARGE, "lora_targets": "q_v", "epochs": 1}
    parts: dict[str, Any] = {"batch_size": 1, "accumulation_steps": DOZENS, "backend": trial.backend or "torch"}
    problem = small_run(trial, (DOZENS + 20, 5), hidden=HIDDEN, gradient_clip_norm=0.5, weight_decay=0.1, **sizes, **parts)
    with tempfile.TemporaryDirectory() as parent:
        folders = Path(parent) / "whole", Path(parent) / "continued"
        run = trial.trainer.fit(problem, folders[0], Plan(save_every=1))
        yield from _by_the_reference(trial, problem, run, 0.5)
        trial.trainer.fit(problem, folders[1], Plan(save_every=1, stop_after=2))
        rest = trial.trainer.fit(problem, folders[1], Plan(save_every=1, resume=True))
        yield from same("steps that were left", run.steps[1:], rest.steps)
        yield from same("what a continued run leaves", *(trial.trainer.kept(folder) for folder in folders))
        yield from same("the answer of a continued run", (run.result, run.left_loss), (rest.result, rest.left_loss))


def _as_at_the_beginning(trial: Trial, problem: SmallRun, run: Run) -> list[Comparison]:
    """Steps by hand after a run start from its last weights, with moments of zero, at the settings' rate, and make the run's loss."""
    last, left = part(run.steps[-1].state, "trainable"), run.left
    if left is None:
        return []
    unmoved = {f"{group}/{name}": np.zeros_like(value) for group in ("exp_avg", "exp_avg_sq") for name, value in last.items()}
    fresh = {"step": 0, "learning_rates": np.array([problem.settings["learning_rate"]]), **unmoved}
    found = same("after the run", {**{f"trainable/{name}": value for name, value in last.items()}, **fresh}, left)
    loss = problem.loss(last, problem.training.samples()[:3])
    return [*found, trial.near("loss of an evaluation after the run", loss, _number(run.left_loss))]


def _as_a_fresh_one(trial: Trial, problem: SmallRun, first: Run) -> list[Comparison]:
    """A second run of a pipeline, on other samples, is bit for bit that of a fresh one at the first run's last weights, and so is what both
    leave: state, adapters with all that they say, the loss of an evaluation.
    """
    if first.left is None or trial.seed % 4 in (1, 2):  # of plain and other settings, of one label and several, one each
        return []
    training, last = problem.training, part(first.steps[-1].state, "trainable")
    other = with_samples(problem, "training", Corpus(training.rows[:-1], training.labels[:-1]))  # the classes have other shares
    fresh, found = replace(other, parameters={**problem.parameters, **last}), []
    with tempfile.TemporaryDirectory() as parent:
        for name, begun, before in (("fresh", fresh, None), ("second", other, training)):
            folder = Path(parent) / name
            run, kept = trial.trainer.fit(begun, folder, Plan(before=before)), trial.trainer.kept(folder)
            said = {part: content(folder / part) for part in ("best", "last")}
            found.append({"steps": run.steps, "result": run.result, "left": run.left, "loss": run.left_loss, "kept": kept, "files": said})
    return same("second run", *found)


def after_adamw(parameter: Array, first: Array, second: Array, step: int, rate: float, decay: float) -> Array:
    """AdamW's parameter after a step, from the moments after it: a gradient that is noise would have any sign, and so would the move."""
    theta, unbiased, square = (np.asarray(each, np.float64) for each in (parameter, first, second))
    unbiased, square = unbiased / (1.0 - BETA1**step), square / (1.0 - BETA2**step)
    return np.asarray(theta - rate * decay * theta - rate * unbiased / (np.sqrt(square) + EPS))


def every_sample_once_an_epoch(trial: Trial) -> Iterator[Comparison]:
    """The samples that the steps of an epoch read are those of the corpus, each once; no two epochs of one seed, or of another one, have
    the same order, though their lower 32 bits be the same; other libraries take no larger ones. Seeds that follow each other may share
    orders: some libraries draw those of an epoch from the sum of both."""
    problem = small_run(trial, epochs=3, backend="torch")
    orders = yield from _orders(trial, problem)
    other = problem.settings["seed"] + (2**32 if trial.subject.name == "impl" else 10)
    orders += yield from _orders(trial, replace(problem, settings={**problem.settings, "seed": other}))
    if any(order in orders[:place] for place, order in enumerate(orders)):
        yield broken("order", "the same in two epochs, or in runs of two seeds")


def _orders(trial: Trial, problem: SmallRun) -> Generator[Comparison, None, list[list[Sample]]]:
    """Whether each sample was read once in each epoch; gives the samples of each epoch in their order."""
    run, _ = whole_run(trial, problem)
    orders = []
    for epoch in range(1, 4):
        steps = {step.number for step in run.steps if step.epoch == epoch}
        reads = [read for read in run.reads if read.trained and read.step in steps]
        sizes = [sum(read.step == number for read in reads) for number in sorted(steps)]
        orders.append([read.sample for read in reads])
        yield same_samples(f"epoch {epoch}, samples", problem.training.samples(), orders[-1])
        yield compare_exactly(f"epoch {epoch}, samples of each step", np.array(problem.batches), np.array(sizes))
    return orders


def rates_are_the_schedules(trial: Trial) -> list[Comparison]:
    """The recorded rate of every optimiser step is the reference schedule's over epochs · ⌈samples / effective batch⌉ steps.

    In half of the cases each step sets that of the next one to a share of it, which holds for that step alone; a trainer that lacks
    that is asked for the schedule's own rates in all of them.
    """
    rng = trial.rng("schedule")
    kind, warmup = str(rng.choice(["linear", "cosine"])), float(rng.choice([0.06, 0.3]))
    problem, share = small_run(trial, epochs=3, schedule=kind, warmup_fraction=warmup), [None, 0.5][trial.seed % 2]
    trainer = trial.trainer
    try:
        run, _ = _whole_run(trainer, problem, Plan(next_rate=share))
    except Lacks:
        share, (run, _) = None, _whole_run(trainer, problem, Plan())
    expected = learning_rate_schedule(3 * len(problem.batches), problem.settings["learning_rate"], warmup, kind)
    expected[1:] *= share or 1.0
    return [trial.near("learning rate of each step", expected, np.array([step.learning_rate for step in run.steps]))]


def validation_loss_is_the_mean_over_samples(trial: Trial) -> Iterator[Comparison]:
    """The validation loss of an epoch is the reference's mean over all samples, whose number is no multiple of the batch, at the parameters
    then, and that of a single sample its own; the training loss is the mean over samples of the steps' losses. An evaluation after the run
    has the run's class weights too.
    """
    several = trial.seed % 2 == 1
    settings: dict[str, Any] = {"multi_label": several, "class_weights": None if several else (0.25, 1.5, 4.0)}
    yield from _losses_of_epochs(trial, small_run(trial, **settings))
    yield from _losses_of_epochs(trial, small_run(trial, samples=(5, 1), **settings | {"epochs": 1}), "one sample, ")


def _losses_of_epochs(trial: Trial, problem: SmallRun, of: str = "") -> Iterator[Comparison]:
    assert problem.validation is not None
    run, _ = whole_run(trial, problem)
    for epoch in run.epochs:
        expected = problem.loss(part(epoch.state, "trainable"), problem.validation.samples())
        yield trial.near(f"{of}epoch {epoch.number}, validation loss", expected, _number(epoch.validation_loss))
        own = [step for step in run.steps if step.epoch == epoch.number]
        mean = np.average([step.loss for step in own], weights=[step.samples for step in own])
        yield trial.near(f"{of}epoch {epoch.number}, training loss", mean, epoch.train_loss)
        if epoch.seconds is not None:
            yield value_inside(f"{of}epoch {epoch.number}, seconds", epoch.seconds, 0.99 * epoch.passed, epoch.passed)
    yield from _as_at_the_beginning(trial, problem, run)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


STANDSTILL = 1e-30
"""A learning rate by which float32 moves nothing but zeros, and no logit at all."""

HARDLY = 1e-7
"""A learning rate by which the loss of an epoch is another one, and by less than a millionth."""

UNSTEADY = 0.5
"""A learning rate by which most runs have an epoch whose loss is lower than that before it, and not the lowest."""


FEW = (5, 4)
"""Samples to train on and to validate on, where it is the epochs that count."""


def _tied_or_not(trial: Trial, pace: str, **settings: Any) -> SmallRun:
    """Draws a run, of which all epochs end with the same validation loss, and not with the same head bias (`tied`), with losses that
    `hardly` differ, with others at the rate given, or of which all losses are 0 (`perfect`).
    """
    if pace == "perfect":
        return _perfect(small_run(trial, **settings))
    if pace != "tied":
        return small_run(trial, **(settings | ({"learning_rate": HARDLY} if pace == "hardly" else {})))
    problem = small_run(trial, **{**settings, "learning_rate": STANDSTILL})
    bias = np.zeros_like(problem.parameters["score.bias"])
    return replace(problem, parameters={**problem.parameters, "score.bias": bias})


def _perfect(problem: SmallRun) -> SmallRun:
    """Every sample is of the first class, which the head's bias gives a probability that float32 rounds to 1: only its decay moves it."""
    bias = np.where(np.arange(problem.classes) == 0, 200.0, -200.0).astype(problem.parameters["score.bias"].dtype)
    corpora = {name: replace(corpus, labels=[0] * len(corpus)) for name in ("training", "validation") if (corpus := getattr(problem, name))}
    return replace(problem, parameters={**problem.parameters, "score.bias": bias}, **corpora)


def best_checkpoint_has_the_lowest_loss(trial: Trial) -> Iterator[Comparison]:
    """best/ holds the tensors after the first epoch of the lowest validation loss, last/ those after the last epoch, each in its own files.

    Where epochs tie, their tensors are not the same; in a quarter of the cases all losses are 0.
    """
    settings: dict[str, Any] = {"epochs": 4, "learning_rate": 0.1}
    pace = ("perfect", "tied", "hardly", "given")[trial.seed % 4]
    run, kept = whole_run(trial, _tied_or_not(trial, pace, **settings))
    losses = [_number(epoch.validation_loss) for epoch in run.epochs]
    best = int(np.argmin(losses))
    yield from same("result, best epoch", best + 1, run.result and run.result.best_epoch)
    yield from same("result, best loss", losses[best], run.result and run.result.best_loss)
    for index, epoch in enumerate(run.epochs):
        lower = losses[index] < min([math.inf, *losses[:index]])
        yield from same(f"epoch {epoch.number}, called the best so far", lower, epoch.best)
    yield from same(f"best/ against epoch {best + 1}", part(run.epochs[best].state, "trainable"), kept.best)
    yield from same(f"last/ against epoch {len(losses)}", part(run.epochs[-1].state, "trainable"), kept.last)
    yield from same("files of the run that have another name", [], kept.shared)


def stops_after_patience_epochs(trial: Trial) -> Iterator[Comparison]:
    """The run ends with the first epoch that is `patience` epochs after the best one, else with the last.

    Where all losses are the same, patience ends with the last epoch: such a run was not stopped early. Where all are 0, epochs are left.
    """
    patience, pace = 1 + trial.seed % 3, ("tied", "given", "hardly", "given", "perfect")[trial.seed // 3 % 5]
    most = 1 + patience if pace == "tied" else 7
    run, _ = whole_run(trial, _tied_or_not(trial, pace, samples=FEW, epochs=most, learning_rate=UNSTEADY, early_stop_patience=patience))
    losses = [_number(epoch.validation_loss) for epoch in run.epochs]
    bests = [int(np.argmin(losses[: epoch + 1])) for epoch in range(len(losses))]
    due = [epoch for epoch, best in enumerate(bests) if epoch - best == patience]
    expected = due[0] + 1 if due else most
    yield from same(f"epochs of {most} with patience {patience}", expected, len(losses))
    yield from same("result, stopped early", expected < most, run.result and run.result.stopped_early)


FIRST_TIME = 4
"""So many files libraries may open once, when they are first used; on a GPU the driver's come and go."""


def base_weights_are_kept(trial: Trial) -> list[Comparison]:
    """The frozen tensors, NF4 codes among them, are the same bits before and after a whole run; so are Ctrl-C and torch's settings, and
    no file is left open. Nothing is there of a model that was let go of."""
    problem = small_run(trial, quantize_nf4=trial.seed % 2 == 1, epochs=1)
    run, _ = whole_run(trial, problem)
    before, after = run.process
    more = after.pop("open files", 0) - before.pop("open files", 0)
    found = [*same("frozen", *run.frozen), *same("process", before, after)]
    found += same("what outlives models that were let go of", [], trial.trainer.left_of(problem))
    return found if trial.on_gpu else [*found, value_at_most("files left open", more, FIRST_TIME)]


def nf4_is_applied_and_trains(trial: Trial) -> list[Comparison]:
    """Each of the seven projections computes with the reference's NF4 of its weight, with double quantisation and without, in bfloat16
    too; and every trainable tensor moves."""
    return [each for double in (False, True) for each in _nf4_trains(trial, double)]


def _nf4_trains(trial: Trial, double_quantize: bool) -> list[Comparison]:
    problem = small_run(trial, quantize_nf4=True, double_quantize=double_quantize, epochs=1)
    run, _ = whole_run(trial, problem)
    found = []
    for name in (name for name in problem.parameters if name.endswith("_proj.weight")):
        if name in run.quantised:
            found.append(trial.near(name, through_nf4(problem.parameters[name], double_quantize), run.quantised[name]))
            rounded = run.quantised[name].astype(ml_dtypes.bfloat16).astype(np.float32)
            found += same(f"{name} in bfloat16, rounded once", rounded, run.quantised[f"{name} in bfloat16"])
        else:
            found.append(broken(name, "not quantised, though NF4 was asked for"))
    for name, value in part(run.epochs[0].state, "trainable").items():
        moved = np.asarray(value, np.float64) != problem.parameters[name]
        found.append(value_at_least(f"share of {name} that moved", float(moved.mean()), 0.5))
    return found
