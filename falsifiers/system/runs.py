"""Whole training runs: their steps, epochs, validation, checkpoints, early stop and continuation.

They are held to what their own records say, and to the reference at the subject's own parameters, so that no error of an earlier step hides
or feigns one of a later.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly, value_at_least
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.system.run_problem import BETA1, BETA2, EPS, Problem, equal, group_of, near, same_texts
from blackswan.reference.optimiser import clip_by_global_norm, learning_rate_schedule
from blackswan.reference.table import Array
from blackswan.reference.training import flatten

MOMENTS = ("exp_avg", "exp_avg_sq")


def run_steps_follow_the_reference(attack: Attack, case: Case) -> list[Comparison]:
    """Loss, pre-clip norm and moments of each step against the reference on the samples that it read, at the parameters before it; and the
    parameters after it against AdamW's at those moments.
    """
    several = case.seed % 2 == 1
    weights = None if several else "balanced"
    problem = Problem(attack, case, multi_label=several, class_weights=weights, weight_decay=0.1, gradient_clip_norm=0.1)
    answer = attack.answer(case, scalars=problem.request(states=True, record=True))
    before = {name: problem.parameters[f"parameters/{name}"] for name in problem.names}
    first = second = np.zeros(sum(value.size for value in before.values()))
    found = []
    for step in range(1, len(answer["steps/step"]) + 1):
        rows, labels = zip(*map(json.loads, answer[f"fed/{step}"]), strict=True)
        trainable = {f"parameters/{name}": np.asarray(value, np.float64) for name, value in before.items()}
        (gradient,), norm = clip_by_global_norm(problem.gradient(trainable, rows, labels)[None], problem.settings["gradient_clip_norm"])
        first, second = BETA1 * first + (1.0 - BETA1) * gradient, BETA2 * second + (1.0 - BETA2) * gradient**2
        state = {name.removeprefix(f"state/{step}/"): v for name, v in answer.items() if name.startswith(f"state/{step}/")}
        moments = [flatten([np.asarray(state[f"{group}/{name}"], np.float64) for name in problem.names]) for group in MOMENTS]
        found += [
            near(attack, f"loss of step {step}", problem.loss(trainable, rows, labels), answer["steps/loss"][step - 1]),
            near(attack, f"norm of step {step}", norm, answer["steps/gradient_norm"][step - 1]),
            near(attack, f"first moment after step {step}", first, moments[0].astype(np.float32)),
            # The root errs by no more than the gradient does, and it is what AdamW divides by.
            near(attack, f"root of the second moment after step {step}", np.sqrt(second), np.sqrt(moments[1]).astype(np.float32)),
        ]
        rate, decay = float(answer["steps/learning_rate"][step - 1]), problem.settings["weight_decay"]
        for name, value in before.items():
            expected = _moved(value, state[f"exp_avg/{name}"], state[f"exp_avg_sq/{name}"], step, rate, decay)
            found.append(near(attack, f"{name} after step {step}", expected, state[f"trainable/{name}"]))
        before, (first, second) = {name: state[f"trainable/{name}"] for name in problem.names}, moments
    return found


def _moved(parameter: Array, first: Array, second: Array, step: int, rate: float, decay: float) -> Array:
    """AdamW's parameter after a step, from the moments after it: a gradient that is noise would have any sign, and so would the move."""
    theta, unbiased, square = (np.asarray(each, np.float64) for each in (parameter, first, second))
    unbiased, square = unbiased / (1.0 - BETA1**step), square / (1.0 - BETA2**step)
    return np.asarray(theta - rate * decay * theta - rate * unbiased / (np.sqrt(square) + EPS))


def every_sample_once_an_epoch(attack: Attack, case: Case) -> list[Comparison]:
    """The samples that the steps of an epoch read are those of the corpus, each once; their order changes from epoch to epoch."""
    problem = Problem(attack, case, epochs=3)
    answer = attack.answer(case, scalars=problem.request(record=True))
    every = sorted(json.dumps([row, label]) for row, label in zip(*problem.train, strict=True))
    orders, found = [], []
    for epoch in range(3):
        steps = [step for step, number in zip(answer["steps/step"], answer["steps/epoch"], strict=True) if number == epoch + 1]
        orders.append([text for step in steps for text in answer[f"fed/{int(step)}"].tolist()])
        found.append(same_texts(f"samples of epoch {epoch + 1}", every, sorted(orders[-1])))
        lengths = [len(answer[f"fed/{int(step)}"]) for step in steps]
        found.append(compare_exactly(f"samples a step of epoch {epoch + 1}", np.array(problem.batches), np.array(lengths)))
    if orders[0] == orders[1] or orders[1] == orders[2]:
        found.append(broken("order", "the same in two epochs"))
    return found


def rates_are_the_schedules(attack: Attack, case: Case) -> list[Comparison]:
    """The recorded rate of every optimiser step against the reference's schedule over epochs · ⌈samples / effective batch⌉ steps."""
    rng = generator_for(case.seed, "schedule")
    kind, warmup = str(rng.choice(["linear", "cosine"])), float(rng.choice([0.06, 0.3]))
    problem = Problem(attack, case, epochs=3, schedule=kind, warmup_fraction=warmup)
    answer = attack.answer(case, scalars=problem.request())
    expected = learning_rate_schedule(3 * len(problem.batches), problem.settings["learning_rate"], warmup, kind)
    return [near(attack, "learning rates", expected, answer["steps/learning_rate"])]


def validation_loss_is_the_mean_over_samples(attack: Attack, case: Case) -> list[Comparison]:
    """After each epoch the validation loss against the reference's mean over all samples, their number no multiple of the batch, at the
    parameters then; and the training loss against the mean over samples of the steps' losses.
    """
    several = case.seed % 2 == 1
    problem = Problem(attack, case, samples=(9, 7), multi_label=several, class_weights=None if several else "balanced")
    answer = attack.answer(case, scalars=problem.request())
    found = []
    for number, loss in enumerate(answer["epochs/validation_loss"], start=1):
        trainable = {name: np.asarray(value, np.float64) for name, value in group_of(answer, f"epoch/{number}/").items()}
        found.append(near(attack, f"validation loss of epoch {number}", problem.loss(trainable, *problem.validation), loss))
        own = answer["steps/epoch"] == number
        mean = np.average(answer["steps/loss"][own], weights=answer["steps/samples"][own])
        found.append(near(attack, f"training loss of epoch {number}", mean, answer["epochs/train_loss"][number - 1]))
    return found


STANDSTILL = 1e-30
"""A learning rate by which float32 moves nothing but zeros, and no logit at all."""


def _tied_or_not(attack: Attack, case: Case, **settings: Any) -> Problem:
    """A run; in half of the cases one whose epochs all end with the same validation loss, and not with the same head bias."""
    if not generator_for(case.seed, "ties").integers(2):
        return Problem(attack, case, **settings)
    problem = Problem(attack, case, **{**settings, "learning_rate": STANDSTILL})
    problem.parameters["parameters/score.bias"] = np.zeros_like(problem.parameters["parameters/score.bias"])
    return problem


def best_checkpoint_has_the_lowest_loss(attack: Attack, case: Case) -> list[Comparison]:
    """best/ holds the tensors after the first epoch of the lowest validation loss, last/ those after the last epoch.

    Where epochs tie, their tensors are not the same.
    """
    problem = _tied_or_not(attack, case, epochs=4, learning_rate=0.1)
    answer = attack.answer(case, scalars=problem.request())
    losses = answer["epochs/validation_loss"]
    best = int(np.argmin(losses)) + 1
    flags = np.array([loss < min([math.inf, *losses[:index]]) for index, loss in enumerate(losses)])
    return [
        compare_exactly("best epoch", np.asarray(best), np.asarray(int(answer["result/best_epoch"]))),
        compare_exactly("best loss", np.asarray(losses.min()), answer["result/best_loss"]),
        compare_exactly("epochs called the best so far", flags, answer["epochs/best"].astype(bool)),
        *equal(group_of(answer, f"epoch/{best}/"), group_of(answer, "best/"), "best/"),
        *equal(group_of(answer, f"epoch/{len(losses)}/"), group_of(answer, "last/"), "last/"),
    ]


def stops_after_patience_epochs(attack: Attack, case: Case) -> list[Comparison]:
    """The run ends with the first epoch that is `patience` epochs after the best one, else with the last."""
    patience = 1 + case.seed % 3
    problem = _tied_or_not(attack, case, epochs=7, learning_rate=0.2, early_stop_patience=patience)
    answer = attack.answer(case, scalars=problem.request())
    losses = answer["epochs/validation_loss"]
    bests = [int(np.argmin(losses[: epoch + 1])) for epoch in range(len(losses))]
    due = [epoch for epoch, best in enumerate(bests) if epoch - best == patience]
    expected = due[0] + 1 if due else 7
    return [
        compare_exactly("epochs", np.asarray(expected), np.asarray(len(losses))),
        compare_exactly("stopped early", np.asarray(expected < 7), answer["result/stopped_early"]),
    ]


def killed_run_goes_on(attack: Attack, case: Case) -> list[Comparison]:
    """Processes killed (SIGKILL) at random moments, writes to the folder and steps, and continued, against one that is not.

    Every step that any of them made, and in the end parameters, moments, rates, progress and both adapters, bit for bit. The rates are no
    longer the schedule's: each step sets that of the next one.
    """
    rng = generator_for(case.seed, "kills")
    problem = Problem(attack, case, epochs=4, learning_rate=0.1, early_stop_patience=2 + case.seed % 2)
    every = {"save_every": [None, 1, 2][int(rng.integers(3))], "next_rate": 0.5}
    whole = attack.answer(case, scalars=problem.request(kills=[], **every))
    kills = _kills(rng, whole["moments"].tolist(), int(attack.claim.arguments["kills"]))
    killed = attack.answer(case, scalars=problem.request(kills=kills, **every))
    made = dict.fromkeys(killed["log"].tolist())
    found = [same_texts("steps made", sorted(whole["log"].tolist()), sorted(made))]
    for part in ("final/", "best/", "last/", "result/"):
        found += equal(group_of(whole, part), group_of(killed, part), part)
    return found


def _kills(rng: Generator, moments: Sequence[str], count: int) -> list[tuple[str, int]]:
    """Random moments after the run has begun, one of the names of the state's file and one of the others by turns; early ones more often,
    since a continued process has fewer.
    """
    names = sorted({name for name in moments if "run.json" not in name and not name.startswith("os.mkdir")})
    chosen = []
    for turn in range(count):
        among = [name for name in names if ("state" in name) == (turn % 2 == 0)]
        name = str(rng.choice(among))
        chosen.append((name, int(rng.integers(1, max(1, moments.count(name) // (turn + 1)) + 1))))
    return chosen


FREE = "log_interval"
"""The setting that a continuation may change: it changes no step."""
_OTHERS: dict[str, tuple[Any, ...]] = {
    "lora_targets": ("q_v", "all"),
    "schedule": ("linear", "cosine"),
    "pooling": ("mean", "last"),
    "padding_side": ("right", "left"),
    "dtype": ("float32", "bfloat16"),
    "engine": ("auto", "torch"),
    "class_weights": ("balanced",),
    "early_stop_patience": (1,),
}
"""Values of the settings that are neither numbers nor true or false."""


def refuses_to_continue_another_run(attack: Attack, case: Case) -> list[Comparison]:
    """Another value of each setting but the free one, other samples, a damaged state: each is refused by its name.

    The folder is as it was, and with another value of the free setting the run goes on to its end.
    """
    problem = Problem(attack, case)
    rng = generator_for(case.seed, "changes")
    request = partial(problem.request, stop=2, save_every=1)
    settings = json.loads(str(attack.answer(case, scalars=request(changes={}))["settings"]))
    others = {f"settings.{name} was": _with_another(attack, case, name, value) for name, value in settings.items() if name != FREE}
    others |= _with_other_samples(problem, rng)
    free = {"settings": {**problem.settings, FREE: settings[FREE] + 1}}
    answer = attack.answer(case, scalars=request(changes=free, others=others))
    found = [_refused(name, str(answer[f"others/{name}"])) for name in others]
    found.append(compare_exactly("steps", np.asarray(problem.settings["epochs"] * len(problem.batches)), answer["result/steps"]))
    for part in ("file", "tensors", "progress"):
        damaged = request(changes={}, damage=(part, float(rng.random())))
        refused = refusal(partial(attack.answer, case, scalars=damaged), "ValueError", "state.*damaged")
        found.append(replace(refused, tensor=f"a damaged state, in its {part}"))
    return found


def _with_another(attack: Attack, case: Case, name: str, value: Any) -> dict[str, Any]:
    """The same run but for one setting, with the parameters and labels that go with it."""
    if name in _OTHERS:
        other = next(each for each in _OTHERS[name] if each != value)
    else:
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2
    return Problem(attack, case, **{name: other}).request()


def _with_other_samples(problem: Problem, rng: Generator) -> dict[str, dict[str, Any]]:
    """One token of a training sample, and one label of a validation sample; by what refuses it."""
    rows, targets = [list(row) for row in problem.train[0]], list(problem.validation[1])
    rows[int(rng.integers(len(rows)))][-1] ^= 1
    at = int(rng.integers(len(targets)))
    targets[at] = (targets[at] + 1) % problem.classes
    return {"data.training": {"train_rows": rows}, "data.validation": {"validation_targets": targets}}


def _refused(name: str, error: str) -> Comparison:
    if error.startswith("ValueError") and name in error:
        return Comparison(name, True, 0.0, "refusal")
    return broken(name, "not refused by its name", f"ValueError mentioning {name!r}", error or "accepted")


def run_keeps_the_base_weights(attack: Attack, case: Case) -> list[Comparison]:
    """Whatever the model holds besides the trainable tensors, NF4 codes among it, before and after a whole run, bit for bit."""
    problem = Problem(attack, case, quantize_nf4=case.seed % 2 == 1)
    answer = attack.answer(case, scalars=problem.request())
    return equal(group_of(answer, "before/"), group_of(answer, "after/"), "frozen")


def nf4_run_is_quantised_and_trains(attack: Attack, case: Case) -> list[Comparison]:
    """Each of the seven projections computes with the reference's NF4 of its weight; and every trainable tensor moves."""
    problem = Problem(attack, case, quantize_nf4=True, epochs=1)
    answer = attack.answer(case, scalars=problem.request())
    used, found = group_of(answer, "before/used/"), []
    for name, weight in problem.parameters.items():
        if name.endswith("_proj.weight"):
            if name.replace("parameters/", "before/used/") not in answer:
                found.append(broken(name, "not quantised, though NF4 was asked for"))
                continue
            found.append(near(attack, name, _through_nf4(weight), used[name]))
    for name in problem.names:
        moved = np.asarray(answer[f"epoch/1/{name}"], np.float64) != problem.parameters[f"parameters/{name}"]
        found.append(value_at_least(f"share of {name} that moved", float(moved.mean()), 0.5))
    return found


def _through_nf4(weight: Array) -> Array:
    rows, columns = weight.shape
    stored = reference.evaluate("nf4_quantize", {"weight": weight}, {"block_size": 64})
    shape = {"rows": rows, "columns": columns, "block_size": 64}
    return reference.evaluate("nf4_dequantize", {**stored}, shape)["weight"]


def non_finite_value_stops_the_run(attack: Attack, case: Case) -> list[Comparison]:
    """A NaN planted in the head's bias after a step: no step is made any more, and the run says when and which tensor.

    The folder holds the state from before.
    """
    problem = Problem(attack, case)
    spoil = 1 + case.seed % 3
    answer = attack.answer(case, scalars=problem.request(spoil=spoil))
    found = [compare_exactly("steps made", np.asarray(spoil), np.asarray(len(answer["steps/step"])))]
    when = f"step {spoil + 1}:" if spoil < len(problem.batches) else "validation after epoch 1:"
    for word in (when, "score.bias"):
        if word not in str(answer["stopped"]):
            found.append(broken("the end", "does not say where", word, str(answer["stopped"]) or "ended as usual"))
    kept = {f"parameters/{name}": problem.parameters[f"parameters/{name}"].astype(np.float32) for name in problem.names}
    return found + equal(kept, group_of(answer, "final/trainable/"), "state in the folder")
