"""Runs that are interrupted, and runs of programs that have their own way with interrupts."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.subjects.doors.training import Plan, State
from blackswan.falsifiers.system.run_problem import left_as_kept, small_run
from blackswan.falsifiers.system.runs import FEW
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial


def interrupts_end_a_run(trial: Trial) -> Iterator[Comparison]:
    """One Ctrl-C in the first step, two of them, one as the first epoch ends, one in a program with a handler of its own and in one that
    ignores it, and none in another thread. The program's own steps begin anew after each.

    The first of these comes twice more as the run goes on, in the step after it and in one of the next epoch.
    A run, on weights in NF4, that ended goes on, by a model of its own and by the one that has moved; each leaves what a whole run does.
    The model in memory holds what the state does, at the interrupt and at the end.
    """
    problem = small_run(trial, samples=FEW, epochs=2, quantize_nf4=True)
    plans = {
        "one": (Plan(interrupts=1), 1),
        "two": (Plan(interrupts=2), 0),
        "one, late": (Plan(interrupts=1, late=True), len(problem.batches)),
        "one, late, and the same model goes on": (Plan(interrupts=1, late=True, going_on=True), None),
        "one, handled": (Plan(interrupts=1, handled=True), None),
        "one, ignored": (Plan(interrupts=1, ignored=True), None),
        "none, in another thread": (Plan(aside=True), None),
    }
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "whole"
        whole = trial.trainer.fit(problem, folder, Plan())
        for name, (plan, step) in plans.items():
            own = Path(parent) / name
            run = trial.trainer.fit(problem, own, plan)
            ends = plan.interrupts and not (plan.handled or plan.ignored)
            yield from same(f"{name}: end", "KeyboardInterrupt" if ends else "", run.stopped)
            yield from same(f"{name}: interrupts that the program's own handler had", int(plan.handled), run.handled)
            yield from as_at_the_beginning(name, run.left)
            settings = ({key: value for key, value in each.items() if key != "open files"} for each in run.process)
            yield from same(f"{name}: process", *settings)
            if step is not None:
                kept = trial.trainer.kept(own)
                yield from same(f"{name}: step of the state", step, kept.progress["step"])
                yield from left_as_kept(name, run, kept) if plan.interrupts == 1 else []  # the second one writes no state
                for number in (2, 3) if name == "one" else ():  # the last one of the first epoch, and one of the next
                    again = trial.trainer.fit(problem, own, Plan(resume=True, interrupts=1))
                    ended = again.stopped, trial.trainer.kept(own).progress["step"]
                    yield from same(f"{name}: end of the run that goes on", ("KeyboardInterrupt", number), ended)
                run = trial.trainer.fit(problem, own, replace(Plan(), resume=True))
            yield from same(f"{name}: result", whole.result, run.result)
            yield from same(f"{name}: folder", *(trial.trainer.kept(each) for each in (folder, own)))
            yield from left_as_kept(f"{name}, at the end", run, trial.trainer.kept(own))
            yield from same(f"{name}: loss of the model", whole.left_loss, run.left_loss)


def as_at_the_beginning(name: str, left: State | None) -> list[Comparison]:
    """What a step by hand depends on after the run: no step was made, there are no moments and no schedule."""
    if left is None:
        return []
    moved = sorted(key for key, value in left.items() if key.startswith("exp_avg") and np.asarray(value).any())
    return [*same(f"{name}: steps, rates and moments left", [0, 1, []], [int(left["step"]), len(left["learning_rates"]), moved])]
