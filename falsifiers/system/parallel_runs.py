"""A data-parallel run that loses a worker and is resumed, against one that does not."""

import tempfile
from dataclasses import replace
from pathlib import Path

from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_inside
from blackswan.falsifiers.subjects.doors.training import Kill, Plan, Problem, Run
from blackswan.falsifiers.system.continued import KILLED, other_runs
from blackswan.falsifiers.system.run_problem import small_run
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial

RUN = "run.json"
WORKERS, EPOCHS, BATCH, SAVE_EVERY = 2, 2, 3, 2
MOMENTS = ("read", "before the sum", "after the sum", "os.rename state/.partial-state.safetensors")
"""A batch is about to be trained on, the workers' numbers to be summed or just summed, or the new state to replace the old one."""


def killed_run_resumes(trial: Trial) -> list[Comparison]:
    """A worker is killed in a step and at a moment that the seed chooses; the run is resumed and ends.

    Against a run that was not interrupted: every tensor on every worker, and the samples of every step that counts. In that run every
    epoch takes each sample once; at most the steps since the last state are made again.
    """
    problem, plan = _problem(trial), Plan(processes=WORKERS, save_every=SAVE_EVERY)
    with tempfile.TemporaryDirectory() as parent:
        whole = trial.trainer.fit(problem, Path(parent) / "whole", plan)
        if failed := _failures("whole run", whole):
            return failed
        kill, folder = _kill(trial, whole), Path(parent) / "killed"
        killed = trial.trainer.fit(problem, folder, replace(plan, kill=kill))
        resumed = trial.trainer.fit(problem, folder, replace(plan, resume=True))
    found = _failures(f"run resumed after {kill}", resumed)
    if (ended := killed.ranks[kill.rank].ended) != KILLED:
        found.append(broken(f"rank {kill.rank}", "not killed", str(kill), ended or "ran to the end"))
    return found or [
        *_epochs_are_complete(whole, len(problem.training)),
        *_same_samples(whole, killed, resumed),
        *_same_end(whole, resumed),
    ]


def mixed_workers_are_refused(trial: Trial) -> list[Comparison]:
    """Two workers of which one was given another setting, architecture, sample or weight, two of each drawn, begin no run; both say so.

    Nor do they where a run is there already, whatever letters its folder has, which both say as the first one found it.
    """
    problem, rng = small_run(trial, quantize_nf4=True), trial.rng("others")
    every = other_runs(trial, problem, rng)
    kinds = {name.partition(".")[0]: [each for each in every if each.startswith(name.partition(".")[0])] for name in every}
    others = {str(name): every[str(name)][0] for names in kinds.values() for name in rng.permutation(names)[:2]}
    with tempfile.TemporaryDirectory(suffix=" für zwei") as parent:
        taken = Path(parent) / str(len(others)) / RUN
        taken.parent.mkdir()
        taken.write_text("{}")
        said = trial.trainer.mixed(problem, [*others.values(), problem], Path(parent))
        left = [path.name for path in Path(parent).glob("*/*") if path.name != ".lock" and path != taken]
    found = same("files of the runs", [], left)
    wanted = {**dict.fromkeys(others, "rank 1: another"), "a run that is there": f"rank 0 of 2: {taken.parent} holds a run"}
    for rank, texts in enumerate(said):
        for (name, words), text in zip(wanted.items(), [*texts, *[""] * len(wanted)], strict=False):
            if words not in text:
                return [*found, broken(f"{name}, rank {rank}", "not refused", words, text or "a step was made")]
    return [*found, *same("workers that refused", 2, len(said))]


def _failures(name: str, run: Run) -> list[Comparison]:
    return [broken(f"{name}, rank {rank}", "failed", "the end", each.ended) for rank, each in enumerate(run.ranks) if each.ended]


def _trained(run: Run) -> list[tuple[int, int]]:
    """Step and place of each sample that the workers trained on, sorted; a sample's first token is its place."""
    return sorted((read.step, read.sample[0][0]) for read in run.reads if read.trained)


def _epochs_are_complete(whole: Run, count: int) -> list[Comparison]:
    steps = -(-count // BATCH)
    epochs = [sorted(place for step, place in _trained(whole) if (step - 1) // steps == epoch) for epoch in range(EPOCHS)]
    return [each for epoch, places in enumerate(epochs) for each in same(f"samples of epoch {epoch + 1}", list(range(count)), places)]


def _same_samples(whole: Run, killed: Run, resumed: Run) -> list[Comparison]:
    """Of the killed run the steps before the first step of the resumed one count."""
    first, second = _trained(killed), _trained(resumed)
    last = max(step for step, _ in first)
    start = min((step for step, _ in second), default=last + 1)
    counted = [*(each for each in first if each[0] < start), *second]
    return [
        value_inside(f"first step after a kill in step {last}", start, last + 1 - SAVE_EVERY, last + 1),
        *same("step and place of the samples that count", _trained(whole), counted),
    ]


def _same_end(whole: Run, resumed: Run) -> list[Comparison]:
    pairs = enumerate(zip(whole.ranks, resumed.ranks, strict=True))
    return [each for rank, (expected, got) in pairs for each in same(f"rank {rank} at the end", expected.state, got.state)]


def _problem(trial: Trial) -> Problem:
    """Seven to nine samples in effective batches of three, of which each worker takes one or two, or none; the trainer's own start."""
    count = int(trial.rng("samples").integers(7, 10))
    drawn = small_run(trial, samples=(count, 3), batch_size=1, accumulation_steps=BATCH, epochs=EPOCHS)
    return Problem(drawn.architecture, None, drawn.settings, drawn.training, drawn.validation)


def _kill(trial: Trial, whole: Run) -> Kill:
    """A moment of any worker that has it, after the first quarter of the run, where there is something to resume."""
    rng = trial.rng("kill")
    moment = str(rng.choice(MOMENTS))
    ranks = [rank for rank, each in enumerate(whole.ranks) if moment in each.events]
    rank = int(rng.choice(ranks))
    count = whole.ranks[rank].events.count(moment)
    return Kill(moment, int(rng.integers(-(-count // 4), count)) + 1, rank)
