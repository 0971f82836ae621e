"""Calls of a pipeline that break off in the middle, by a lack of memory or by Ctrl-C, and gradients that somebody else left."""

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.subjects.doors.training import Problem
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial

PASSES = (("swiglu", 1), ("gradient of swiglu", 1), ("weighted_cross_entropy", 1))
STEPS = (("average_gradients", 1), ("clip_by_global_norm", 0), ("adamw_step", 0))
"""Operations of a pass and of a step, with the number of the call at which they fail."""
BROKEN = {"train_batch": (*PASSES, *STEPS), "accumulate": PASSES, "apply": STEPS}
ERRORS = ("KeyboardInterrupt", "OutOfMemoryError")
FAILING = [0, 1, 2]


def broken_calls_change_nothing(trial: Trial, problem: Problem) -> list[Comparison]:
    """Whichever operation breaks a call off, the calls after it do what they would have done.

    A gradient that the program left at a parameter is part of no step, and none is left by a call that ends, or by a batch that breaks off.
    """
    rng, found = trial.rng("broken"), list[Comparison]()
    plain, mixed = trial.trainer.pipeline(problem), trial.trainer.pipeline(problem)
    calls = {"train_batch": ("accumulate", "train_batch"), "apply": ("accumulate", "apply")}
    for name, *given in (("train_batch", [0, 1, 2]), ("accumulate", [3, 4, 8, 6]), ("apply",), ("train_batch", [5, 6])):
        for call in calls.get(name, ()):
            for operation, nth in BROKEN[call]:
                error, places = str(rng.choice(ERRORS)), [] if call == "apply" else [FAILING]
                label = f"{call} before {name}, broken off by {error} in {operation}"
                found += same(label, error, mixed.breaks(call, places, operation, nth, error))
                if call == "train_batch":
                    found += same(f"gradients left by {label}", [], mixed.gradients())
        mixed.leave_gradients()
        for each in (plain, mixed):
            getattr(each, name)(*given)
        found += same(f"gradients left by {name} {given}", [], mixed.gradients())
        found += same(f"state after {name} {given}, with calls broken off before", plain.state(), mixed.state())
    return found
