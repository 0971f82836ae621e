"""Runs in which a number is not finite: in a parameter, in a call of the forward pass, in one of the backward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Corpus, Run
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.falsifiers.system.interrupts import as_at_the_beginning
from blackswan.falsifiers.system.run_problem import PARTS, SmallRun, part, small_run, with_samples
from blackswan.falsifiers.system.runs import whole_run
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, may_be_non_finite

LARGEST = 3.4e38
"""A class weight by which the loss of a few samples is larger than any number in float32."""
DTYPES = ("float32", "bfloat16")
LAST_BYTE = 255
"""The token beyond it fills up."""


@may_be_non_finite("*")
def value_stops_the_run(trial: Trial) -> Iterator[Comparison]:
    """After a NaN is planted in the head's bias no step is made any more, and the run says when it stopped and which tensor is to blame.

    That is in the first epoch, in the second one, or after it. The folder holds the state from before. So it is where the parameters are
    finite, and one sample's forward pass or one sample's backward pass is not: the run says in which step, or validation, which call it
    was, of finite inputs, and how many numbers it spoilt.
    """
    problem = small_run(trial)
    poisoned = 2 + 2 * (trial.seed % 3)
    run, kept = whole_run(trial, problem, poison_after=poisoned)
    ended, more = divmod(poisoned, len(problem.batches))
    when = f"step {poisoned + 1}:" if more else f"validation after epoch {ended}:"
    yield from _stopped("", run, poisoned, (when, "score.bias", "1 NaN of 3"))
    before = {name: value.astype(np.float32) for name, value in problem.trainable().items()}
    if written := ended if more else ended - 1:
        before = part(run.epochs[written - 1].state, "trainable")
    yield from same("state in the folder", before, part(kept.state, "trainable"))
    at, hidden = trial.seed % 3, problem.architecture["hidden"]
    name = PARTS[trial.seed % 2]
    words = ("model.layers.0.mlp.swiglu (swiglu): 1 infinite of ", "from finite inputs")
    for dtype in DTYPES:
        overflowing = _overflows_forward(small_run(trial, dtype=dtype), name, at)
        yield from _stops_at(trial, f"forward pass, {name}, {dtype}", overflowing, name, at, words)
    run, _ = whole_run(trial, small_run(trial, class_weights=[LARGEST] * 3))
    yield from _stopped("class weights: ", run, 0, ("step 1:", "(weighted_cross_entropy): 1 infinite of 1, from finite inputs"))
    words = (f"score (linear): the gradient of its input x has {hidden} infinite of {hidden}", "from a finite one")
    overflowing = _overflows_backward(small_run(trial, batch_size=1, gradient_clip_norm=None if trial.seed % 2 else 0.5), at)
    yield from _stops_at(trial, "backward pass", overflowing, "training", at, words)
    yield from _by_hand(trial, overflowing, at)


def _by_hand(trial: Trial, problem: SmallRun, at: int) -> list[Comparison]:
    """A step that fails leaves the samples that wait for it, and all else, as they were: their gradient can still be looked at.

    An evaluation whose loss is not finite has no result either.
    Nothing is asked of a trainer that makes whole runs only.
    """
    try:
        pipeline = trial.trainer.pipeline(problem)
    except Lacks:
        return []
    pipeline.accumulate([at, 3])
    before = {"gradient": pipeline.gradient_vector(), **pipeline.state()}
    found = [trial.refuses("apply by hand", pipeline.apply, "finite|norm", "FloatingPointError")]
    heavy = trial.trainer.pipeline(small_run(trial, class_weights=[3e38] * 3, batch_size=9))  # of finite logits
    found.append(trial.refuses("an evaluation whose loss overflows", partial(heavy.evaluate, range(9)), "loss", "FloatingPointError"))
    return found + same("what waits after it", before, {"gradient": pipeline.gradient_vector(), **pipeline.state()})


def _stopped(name: str, run: Run, made: int, words: Sequence[str]) -> list[Comparison]:
    """The run made so many steps, says where the number came from, and leaves a trainer for the program's own steps."""
    missing = [word for word in words if word not in run.stopped]
    return [
        *same(f"{name}steps made", made, len(run.steps)),
        *as_at_the_beginning(f"{name}trainer", run.left),
        *(broken(f"{name}the end", "does not say where", word, run.stopped or "ended as usual") for word in missing),
    ]


def _stops_at(trial: Trial, name: str, problem: SmallRun, where: str, at: int, words: Sequence[str]) -> list[Comparison]:
    """The run ends where that sample of a part is read; a sample's first token is its place."""
    run, _ = whole_run(trial, problem)
    step = next((read.step for read in run.reads if read.trained == (where == "training") and read.sample[0][0] == at), 0)
    when = f"step {step}:" if where == "training" else "validation after epoch 1:"
    return _stopped(f"{name}: ", run, step - 1, (when, *words))


def _overflows_forward(problem: SmallRun, name: str, at: int) -> SmallRun:
    """The activation overflows on the last token of one sample, which no other has; it alone has a first component after attention."""
    token, changed = LAST_BYTE, {key: value.copy() for key, value in problem.parameters.items()}
    for key, value in changed.items():
        if "embed_tokens" in key:
            value[:, 0] = 0.0
            value[token, 0] = 50.0
        elif ".o_proj." in key and "lora_A" not in key:
            value[0] = 0.0
        elif key.endswith(("gate_proj.weight", "up_proj.weight")):
            value[0, 0] = 1e20
        elif key.endswith("post_attention_layernorm.weight"):
            value[0] = 1.0
    problem = replace(problem, parameters=changed)
    for where in PARTS:
        corpus: Corpus = getattr(problem, where)
        rows = [[min(number, token - 1) for number in row] + [token] * (where == name and row[0] == at) for row in corpus.rows]
        problem = with_samples(problem, where, replace(corpus, rows=rows))
    return problem


def _overflows_backward(problem: SmallRun, at: int) -> SmallRun:
    """The final norm gives zeros, so that all logits are 0; the gradient that the head hands back overflows for its first class, which one
    sample has."""
    head = np.full_like(problem.parameters["score.weight"], 3e38)
    head[0] *= -1
    parameters = {**problem.parameters, "score.weight": head}
    for name in ("score.bias", "model.norm.weight"):
        parameters[name] = np.zeros_like(parameters[name])
    labels: list[Label] = [0 if place == at else 1 for place in range(len(problem.training))]
    return replace(problem, parameters=parameters, training=replace(problem.training, labels=labels))
